"""What reads a text or a stream takes time in proportion to its length."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from itertools import product

import pytest
from covering import covering

from sinkscope.app.cli import main

SMALL, LARGE = 2_000, 12_000
"""Words."""


def words(count: int) -> list[str]:
    choice = random.Random(0)
    return [f"w{choice.randrange(3000)}" for _ in range(count)]


def one_line(count: int) -> str:
    return " ".join(words(count))


def one_json_line(count: int) -> str:
    return json.dumps({"text": one_line(count)})


def events(count: int) -> str:
    parts = [json.dumps({"choices": [{"index": 0, "delta": {"content": word + " "}}]}) for word in words(count)]
    return "".join(f"data: {part}\n\n" for part in parts) + "data: [DONE]\n\n"


def one_event(count: int) -> str:
    part = json.dumps({"choices": [{"index": 0, "delta": {"content": one_line(count)}}]})
    return f"data: {part}\n\ndata: [DONE]\n\n"


MADE = [one_line, one_json_line, events, one_event]
CASES = covering(
    [*product(["--follow", ""], MADE)], {("--follow", one_json_line), ("--follow", one_event), ("", one_line)}
)


def seconds(path, option: str) -> float:
    """Of the processor; the least of three, because others run beside."""
    found = []
    for _ in range(3):
        start = time.process_time()
        assert main(["loops", *option.split(), str(path)]) in (0, 3)
        found.append(time.process_time() - start)
    return min(found)


@pytest.mark.parametrize(("option", "made"), CASES)
def test_time_grows_as_the_input_does(option: str, made: Callable[[int], str], tmp_path, capsys):
    for name, count in (("warm", 100), ("small", SMALL), ("large", LARGE)):
        (tmp_path / name).write_text(made(count))
    seconds(tmp_path / "warm", option)
    growth = seconds(tmp_path / "large", option) / seconds(tmp_path / "small", option)
    assert growth < 2.5 * LARGE / SMALL  # what is quadratic grows 36 times
