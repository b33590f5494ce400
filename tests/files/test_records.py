"""Files of records: what is read, and the one line that says what is wrong with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from refusals import refused

from sinkscope.files.records import read_records


@dataclass(frozen=True)
class Inner:
    words: tuple[str, ...]


@dataclass(frozen=True)
class Sample:
    id: str
    size: int
    kind: Literal["small", "large"] = "small"
    parts: tuple[Inner, ...] = ()

    def __post_init__(self):
        if self.size < 0:
            raise ValueError(f"size is {self.size}, expected a number from 0")


GOOD = {"id": "a", "size": 3, "kind": "large", "parts": [{"words": ["x", "y"]}]}


def put(path: Path, *rows) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "a.jsonl line 2 is not JSON: give samples"),
        ("[" * 100_000, "a.jsonl line 2 is not JSON: give samples"),
        ([1], "a.jsonl line 2 is [1]: expected an object: give samples"),
        ({"size": 3}, "a.jsonl line 2: id is missing: give samples"),
        ({**GOOD, "id": "b", "size": "3"}, "a.jsonl line 2: size is '3': expected a valid integer: give samples"),
        ({**GOOD, "parts": [{"words": ["x", 1]}]}, "a.jsonl line 2: parts[0].words[1] is 1: expected a valid string"),
        ({**GOOD, "size": -1}, "a.jsonl line 2: size is -1, expected a number from 0: give samples"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, row, says):
    with refused(words=[says]):
        read_records(put(tmp_path / "a.jsonl", GOOD, row), Sample, "samples")
