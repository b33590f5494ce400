"""A field of a run's folder is changed: a table all the same, or one line with file, line and field."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from bench_kit import SETTINGS, made_record
from refusals import refused

from sinkscope.bench.table import BenchTable, bench_table
from sinkscope.files.plain import plain

EVENT = {"row": 0, "step": 1, "position": 2, "kind": "guard", "data": {}}


@pytest.fixture
def table(tmp_path):
    def written(settings: dict[str, Any] | None = None, **fields: Any) -> BenchTable:
        """The table of a folder whose second line, or whose settings, have other fields."""
        run, steps = tmp_path / "run", {"kl": (0.5, 1.0)}
        run.mkdir(exist_ok=True)
        (run / "settings.json").write_text(json.dumps(SETTINGS | (settings or {})))
        rows = [plain(made_record(method, "0", events=(EVENT,), steps=steps)) for method in ("full", "tova:8")]
        rows[1] |= fields
        (run / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return bench_table([run])

    return written


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("turn", ["1", None, 1.5]),
        ("tokens", ["x", None, ["x"], {}]),
        ("metrics", [None, [1], {"score": "x"}, {"score": math.nan}]),
        ("events", ["x", [1], {"a": [1]}]),
        ("steps", [None, {"kl": "x"}]),
    ],
)
def test_a_field_of_another_kind_is_named(table, name, values):
    for value in values:
        with refused(words=["run/runs.jsonl line 2: ", name]):
            table(**{name: value})


def test_settings_of_another_kind_are_refused_and_odd_values_are_read(table):
    for name in ("model", "task"):
        for value in (None, 5, [], {"a": [1]}):
            with refused(words=["run"]):
                table({name: value})
    for fields in ({"text": "\ud800"}, {"metrics": {"score": None}}, {"events": [], "steps": {}}):
        made = table(**fields)
        assert made.conclusion() and made.rows() and made.to_json()
