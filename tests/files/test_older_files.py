"""Files of results that users have are read by every later version: a number that is new is absent in them.

`python tests/files/test_older_files.py` writes a file for each measurement that has none; those that are there stay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import sinkscope as ss
from sinkscope.errors import SinkscopeError
from sinkscope.results.result import Result

FOLDER = Path(__file__).parents[1] / "fixtures/results"
TEXT = "The bird sang a song, and then the children went home to eat bread and soup. " * 36
MADE: dict[str, Callable[[Any, Path], Result]] = {
    "attack": lambda model, text: ss.attack(model, n_tokens=16, sequences=4, length=4, text=text),
    "barcode": lambda model, text: ss.barcode(model, ids=[1, 300, 301, 302] * 4),
    "check-cache": lambda model, text: ss.check_cache("h2o", only=["the_first_and_the_latest_tokens_survive"]),
    "find-sinks": lambda model, text: ss.find_sinks(model, text=text),
    "lines": lambda model, text: ss.lines(model, count=2, length=32, layers=[1], etas=[0.1]),
    "loops": lambda model, text: ss.loops.check("a b c d e f g h " * 40),
    "patch": lambda model, text: ss.patch(model, max_repeats=60, pieces=2, length=16, text=text),
    "repeat": lambda model, text: ss.repeat(model, tokens=["the"], max_repeats=24, text=text),
    "why-loop": lambda model, text: ss.why_loop(model, max_new_tokens=64, cuts=3),
    "why-sink": lambda model, text: ss.why_sink(model, text=text),
}


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.json")), ids=lambda path: f"{path.parent.name}, {path.stem}")
def test_a_file_of_an_earlier_version_is_read_and_shown(path):
    name = path.stem
    try:
        result = Result.load(path)
        shown = result.text(80), result.to_csv(), result.to_html()
    except (SinkscopeError, AttributeError, TypeError, KeyError) as error:
        pytest.fail(
            f"{name} files of users are refused: {type(error).__name__}: {error}. Give what is new a default of None, "
            "and leave it out where it is shown if it is None, as `optional` columns are",
            pytrace=False,
        )
    assert all(shown) and result.kind == name


def values_of(data: Any) -> list[float]:
    """All numbers that rows hold, wherever they stand."""
    if isinstance(data, dict) and {"value", "by_text"} <= data.keys():
        return [] if data["value"] is None else [data["value"]]
    parts = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [value for part in parts for value in values_of(part)]


@pytest.mark.parametrize("name", sorted(path.stem for path in (FOLDER / "schema6").glob("*.json")))
def test_a_file_of_schema_6_keeps_every_number(name):
    path = FOLDER / "schema6" / f"{name}.json"
    before = values_of(json.loads(path.read_text())["result"])
    after = values_of(Result.load(path).to_dict()["result"])
    if name != "sink-card":  # whose numbers are in the files beside it
        assert {*before} <= {*after}


if __name__ == "__main__":
    sys.argv = ["sinkscope"]  # files name no folder of a machine
    FOLDER.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder:
        text_file = Path(folder) / "text.txt"
        text_file.write_text(TEXT)
        for missing in MADE:
            if not (FOLDER / f"{missing}.json").exists():
                MADE[missing](ss.load(), text_file).save(FOLDER / f"{missing}.json")
