from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from refusals import refused
from sample_results import STOP, sample_find_sinks

from sinkscope.files.arguments import parameters_of
from sinkscope.files.envelope import CHECKOUT, documented_at, provenance
from sinkscope.files.plain import plain
from sinkscope.results.result import Result
from sinkscope.sinks.spikes.result import FindSinks

EXAMPLE = replace(sample_find_sinks(), typical_norm=(math.nan, 2.0))
WHOLE = json.loads(EXAMPLE.to_json())


@dataclass(frozen=True, kw_only=True)
class Bare(Result):
    kind = "test-bare"

    value: Any


def test_a_saved_result_is_loaded_as_its_own_class_and_equal(tmp_path):
    again = Result.load(EXAMPLE.save(tmp_path / "x.json"))
    assert isinstance(again, FindSinks) and again == EXAMPLE and hash(again) == hash(EXAMPLE)
    assert math.isnan(again.typical_norm[0]) and again != replace(again, spikes=again.spikes[:1])
    with refused("x.json holds 'find-sinks', expected 'test-bare'"):
        Bare.load(tmp_path / "x.json")


def test_envelope_is_the_contract():
    assert list(WHOLE) == ["schema", "kind", "model", "result", "settings", "provenance"]
    assert (WHOLE["schema"], WHOLE["kind"]) == (7, "find-sinks")
    assert list(WHOLE["model"]) == ["name", "family", "n_layers", "d_model", "d_mlp", "fingerprint"]
    own = "argv versions device dtype attention bos seed seconds commit first_ids bos_added"
    assert list(WHOLE["provenance"]) == own.split()
    key = {"kind": "tokens", "tokens": ["."], "position": None}
    assert WHOLE["result"]["spikes"][1]["place"] == {"words": "'.' wherever it stands", "token": ".", "key": key}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, None),
        ({"a": (1, math.inf)}, {"a": [1, None]}),
        (torch.tensor([[1.0, math.nan]]), [[1.0, None]]),
        (np.arange(2), [0, 1]),
        (torch.float16, "float16"),
        ({3, 1, 2}, [1, 2, 3]),
        (STOP.key, {"kind": "tokens", "tokens": ["."], "position": None}),
    ],
)
def test_values_become_those_of_json(value, expected):
    assert json.loads(Bare(value=value).to_json())["result"]["value"] == expected
    with refused("function cannot be written"):
        plain(lambda: value)


def changed(**fields: Any) -> str:
    """The file, whose first spike has other values."""
    first, *others = WHOLE["result"]["spikes"]
    return json.dumps(WHOLE | {"result": WHOLE["result"] | {"spikes": [first | fields, *others]}})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "f.json is not a JSON file"),
        ("[" * 100_000, "f.json is not a JSON file"),
        ("\udcff", "f.json is not UTF-8 text"),
        ("{}", "f.json is not a result of sinkscope"),
        (
            json.dumps(WHOLE | {"schema": 1}),
            "f.json has schema 1, and this version reads 6 and 7: run the command again",
        ),
        (json.dumps(WHOLE | {"kind": "magic"}), "f.json holds the unknown kind 'magic'"),
        (changed(peak="1"), r"spikes\[0\].peak='1': expected a valid integer"),
        (changed(layers=[1]), r"spikes\[0\].layers\[1\] is missing"),
    ],
)
def test_a_file_that_is_no_result_is_refused_in_one_line(tmp_path, content, says):
    (tmp_path / "f.json").write_text(content, errors="surrogateescape")
    with refused(says):
        Result.load(tmp_path / "f.json")


def test_pages_are_those_of_the_checkout_or_of_the_installed_package(monkeypatch, tmp_path):
    assert (CHECKOUT / documented_at("cli.md")).is_file()
    monkeypatch.setattr("sinkscope.files.envelope.CHECKOUT", tmp_path)
    said = documented_at("cli.md#exit-codes")
    assert said.endswith("sinkscope/docs/cli.md#exit-codes") and str(Path.home()) not in said


@pytest.mark.parametrize(("word", "back"), [("\ud800", "?"), ("\\udcff", "\\udcff"), ("😀\udcff", "😀?")])
def test_a_result_can_be_read_back_whatever_bytes_a_name_holds(word, back, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sinkscope", word])
    made = replace(EXAMPLE, provenance=provenance(0.0))
    assert Result.load(made.save(tmp_path / "x.json")).provenance.argv[1] == back


def test_settings_that_name_files_lose_their_folders_and_no_other_text_is_changed():
    said = {"prompt": "/no_think Why ...?", "tokens": ["/a", "~/b", "C:\\c"], "text": Path("/home/me/texts/a.txt")}
    settings = replace(EXAMPLE, settings=said).settings
    assert settings == said | {"text": "a.txt"}


def named_by(one: str | Path | None = None, other: str | PathLike[str] | int = 3, word: str = "a", number: int = 1):
    """Names files.

    Args:
        one: A file.
        other: A file.
        word: No file.
        number: None either.
    """


def test_parameters_that_name_files_are_known_from_the_signature():
    assert [parameter.name for parameter in parameters_of(named_by) if parameter.names_file] == ["one", "other"]
