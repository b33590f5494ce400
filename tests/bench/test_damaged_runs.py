"""A field of a run's folder is changed, of any kind: a table all the same, or one line with file, line and field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from typing import Any

from bench_kit import SETTINGS, made_record

from sinkscope import SinkscopeError
from sinkscope.bench.table import bench_table
from sinkscope.files.plain import plain

GONE = object()
VALUES = (None, math.nan, math.inf, [], [1], {}, {"a": [1]}, "x", "", 5, -1, True, 10**30, "\ud800", GONE)
EVENT = {"row": 0, "step": 1, "position": 2, "kind": "guard", "data": {}}
ROWS = [
    plain(made_record(method, str(number), metrics={"score": number / 4}, events=(EVENT,), steps={"kl": (0.5, 1.0)}))
    for method in ("full", "tova:8")
    for number in range(4)
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every field of a value, at any depth; of a list the first."""
    if place:
        yield place
    inside = dict(enumerate(value[:1])) if isinstance(value, list) else value
    for key, part in inside.items() if isinstance(inside, dict) else ():
        yield from places(part, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    value = inside = copy.deepcopy(value)
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = new
    if new is GONE:
        del inside[place[-1]]
    return value


def test_every_changed_field_is_read_or_named(tmp_path):
    folder, refused = tmp_path / "run", 0
    folder.mkdir()
    cases = [(whole, place, new) for whole in (SETTINGS, ROWS[1]) for new in VALUES for place in places(whole)]
    for whole, place, new in cases:
        damaged = changed(whole, place, new)
        settings, rows = (damaged, ROWS) if whole is SETTINGS else (SETTINGS, [ROWS[0], damaged, *ROWS[2:]])
        (folder / "settings.json").write_text(json.dumps(settings))
        (folder / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        try:
            table = bench_table([folder])
            assert table.conclusion() and table.rows() and table.to_json() and table.findings() and table.grids()
        except SinkscopeError as error:
            refused += 1
            said = str(error)
            assert "\n" not in said, (place, new)
            if whole is not SETTINGS:
                name = place[0] if place[-1] == 0 or place[0] == "events" else place[-1]
                assert said.startswith("run/runs.jsonl line 2: ") and str(name) in said, (place, new, said)
    assert refused > len(cases) / 3
