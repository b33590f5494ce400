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


def event(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': text}}]})}\n\n"


MADE: dict[str, Callable[[list[str]], str]] = {
    "one line": " ".join,
    "no space": "".join,
    "one JSON line": lambda words: json.dumps({"text": " ".join(words)}),
    "events": lambda words: "".join(event(f"{word} ") for word in words) + "data: [DONE]\n\n",
    "one event": lambda words: event(" ".join(words)) + "data: [DONE]\n\n",
}
CASES = covering(
    [*product(["--follow", ""], MADE)], {("--follow", "one JSON line"), ("--follow", "one event"), ("", "one line")}
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
def test_time_grows_as_the_input_does(option, made, tmp_path, capsys):
    choice = random.Random(0)
    words = [f"w{choice.randrange(3000)}" for _ in range(LARGE)]
    for name, count in (("warm", 100), ("small", SMALL), ("large", LARGE)):
        (tmp_path / name).write_text(MADE[made](words[:count]))
    seconds(tmp_path / "warm", option)
    growth = seconds(tmp_path / "large", option) / seconds(tmp_path / "small", option)
    assert growth < 2.5 * LARGE / SMALL  # what is quadratic grows 36 times
