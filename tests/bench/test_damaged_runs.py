"""A field of a run's folder is changed, of any kind: a table all the same, or one line with file, line and field."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest

from sinkscope import SinkscopeError
from sinkscope.bench.record import COMMAND, VERSION
from sinkscope.bench.table import bench_table

GONE = object()
VALUES = (None, math.nan, math.inf, [], [1], {}, {"a": [1]}, "x", "", 5, -1, True, 10**30, "\ud800", GONE)
SETTINGS = {
    "attention": "sdpa",
    "chat": False,
    "command": COMMAND,
    "decoding": {"do_sample": False, "eos_token_id": [1]},
    "device": "cpu",
    "dtype": "float32",
    "kind": "hf",
    "max_new_tokens": 4,
    "model": {"d_mlp": 8, "d_model": 4, "family": "llama", "fingerprint": "01", "n_layers": 2, "name": "tiny"},
    "prompts": "02",
    "task": "file",
    "temperature": 0.0,
    "version": VERSION,
}


def record(prompt: str, method: str, score: float) -> dict[str, Any]:
    return {
        "model": "01",
        "task": "file",
        "method": method,
        "prompt": prompt,
        "turn": 0,
        "seed": 0,
        "set": "file",
        "part": "late",
        "metrics": {"score": score, "chance": None, "read": 6.0, "cells": None, "cached_peak": 7, "seconds": 0.1},
        "tokens": [4, 5],
        "text": "a b",
        "ended": "cap",
        "events": [{"row": 0, "step": 1, "position": 2, "layer": None, "head": None, "kind": "guard", "data": {}}],
        "steps": {"kl": [0.25, 0.5]},
    }


ROWS = [record(str(number), method, number / 4) for method in ("full", "tova") for number in range(4)]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a value, at any depth; of a list the first."""
    if place:
        yield place
    inside = {}
    if isinstance(value, dict):
        inside = value
    elif isinstance(value, list) and value:
        inside = {0: value[0]}
    for key, part in inside.items():
        yield from places(part, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    value = copy.deepcopy(value)
    inside = value
    for step in place[:-1]:
        inside = inside[step]
    if new is GONE:
        del inside[place[-1]]
    else:
        inside[place[-1]] = new
    return value


CASES = [(file, place, new) for file in ("settings", "row") for new in VALUES
         for place in places(SETTINGS if file == "settings" else ROWS[1])]  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


def written(folder, settings, rows) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "settings.json").write_text(json.dumps(settings))
    (folder / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_every_changed_field_is_read_or_named(folder):
    refused = 0
    for file, place, new in CASES:
        settings, rows = SETTINGS, ROWS
        if file == "settings":
            settings = changed(SETTINGS, place, new)
        else:
            rows = [ROWS[0], changed(ROWS[1], place, new), *ROWS[2:]]
        written(folder, settings, rows)
        try:
            table = bench_table([folder])
            assert table.conclusion() and table.rows() and table.to_json() and table.findings() and table.grids()
        except SinkscopeError as error:
            refused += 1
            said = str(error)
            assert "\n" not in said, (place, new)
            if file == "row":
                name = place[0] if place[-1] == 0 or place[:1] == ("events",) else str(place[-1])
                assert said.startswith("run/runs.jsonl line 2: ") and str(name) in said, (place, new, said)
    assert refused > len(CASES) / 3


def test_a_folder_of_changed_files_is_read_or_refused(folder):
    """Bytes changed at random, lines cut, joined and doubled."""
    generator = random.Random(0)
    for _ in range(120):
        written(folder, SETTINGS, ROWS)
        for name in ("settings.json", "runs.jsonl"):
            content = bytearray((folder / name).read_bytes())
            for _ in range(generator.choice((0, 1, 3))):
                at = generator.randrange(len(content))
                content[at : at + generator.choice((0, 1, 40))] = generator.randbytes(generator.choice((0, 1, 4)))
            (folder / name).write_bytes(content)
        try:
            assert bench_table([folder]).to_json()
        except SinkscopeError as error:
            assert "\n" not in str(error)
