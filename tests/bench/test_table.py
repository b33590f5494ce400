"""Tables recomputed by hand, and what a table says, keeps and draws."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import stdev

import pytest
from bench_kit import SETTINGS, made_record

from sinkscope.bench.record import BenchRun, open_run
from sinkscope.bench.table import BenchTable, bench_table, tabulate_records
from sinkscope.display.result import Result
from sinkscope.measure.rate import wilson


def table(*records, by: str = "part") -> BenchTable:
    return tabulate_records([BenchRun(list(records), SETTINGS)], by)  # type: ignore[arg-type]


FULL = [made_record("full", f"p{i}", settings={"part": "ab"[i % 2]}) for i in range(4)]
H2O = [
    made_record(
        "h2o:8",
        f"p{i}",
        settings={"part": "ab"[i % 2], "depth": 0.5 * (i // 2)},
        metrics={"score": float(i == 1), "read": 4.0 + i, "cells": 0.5, "seconds": 3.0, "chance": 0.25},
        tokens=(1, 2) if i else (1, 3, 4, 5),
        turn=i // 2,
    )
    for i in range(4)
]


def test_a_group_is_recomputed():
    full, h2o = table(*H2O, *FULL).groups
    assert (full.method, full.score) == ("full", 1.0)
    assert (full.metrics["time"], full.metrics["same"], full.metrics["cells"]) == (1.0, 1.0, None)
    rate = wilson(1, 4)
    assert (h2o.score, h2o.low, h2o.high, h2o.answers) == (0.25, rate.low, rate.high, 4)
    assert h2o.parts == {"a": 0.0, "b": 0.5}
    costs = h2o.metrics
    assert (costs["read"], costs["cells"], costs["cached_peak"], costs["chance"]) == (5.5, 0.5, 10.0, 0.25)
    assert costs["time"] == pytest.approx((12 / 10) / (4 / 8))  # seconds of a token: 12 s of 10 tokens, 4 s of 8
    assert costs["same"] == 0.5  # of turn 0, one of two; the full cache has no turn 1


@pytest.mark.parametrize(("by", "parts"), [("turn", {"1": 0.5, "2": 0.0}), ("depth", {"0.0": 0.5, "0.5": 0.0})])
def test_columns_by_turn_or_by_a_field_of_the_prompts(by: str, parts: dict[str, float]):
    assert table(*H2O, by=by).groups[0].parts == parts


def test_divergences_have_the_interval_of_a_mean():
    values = [0.1, 0.3, 0.8]
    records = [
        made_record(f"h2o:{8}", f"p{i}", task="text", metrics={"kl": value, "agree": 1.0})
        for i, value in enumerate(values)
    ]
    group = table(*records).groups[0]
    assert group.score == pytest.approx(0.4)
    assert group.high - group.score == pytest.approx(1.96 * stdev(values) / math.sqrt(3))
    assert group.metrics["agree"] == 1.0


def test_the_alarm_of_a_row_is_a_median():
    records = [
        made_record("loopguard:64", f"p{i}", task="loops", metrics={"loop": 0.0, "alarm": alarm})
        for i, alarm in enumerate([40, None, 60, 70])
    ]
    group = table(*records).groups[0]
    assert group.metrics["alarm"] == 60 and group.metrics["early"] is None


def test_what_a_table_says():
    result = table(*H2O, *FULL)
    assert result.conclusion() == "Task file s: h2o:8 scores 25%; full, the control, scores 100%."
    other = [made_record("h2o:2", f"p{i}", task="text", metrics={"kl": 9.0}) for i in range(2)]
    assert table(*H2O, *FULL, *other).conclusion() == result.conclusion(), "another task on a set of the same name"
    assert table(*H2O).conclusion().endswith("full was not run.")
    assert table(*FULL).conclusion().endswith("no other method was run.")
    number = next(each for each in result.numbers() if "h2o" in each.label)
    assert (number.value, number.control) == (0.25, 1.0) and number.margin is not None
    text = result.text(None)
    for column in ("score", "low", "read", "cells", "time", "cached peak", "25.0%"):
        assert column in text
    assert Result.from_dict(json.loads(result.to_json())) == result
    assert list(result.to_frame()["score"]) == [1.0, 0.25]
    drawn = json.loads(str(result.figure().to_json()))["data"]
    assert drawn[0]["y"] == [1.0, 0.25] and drawn[1]["x"] == [9.0, 5.5]


def test_loops_are_counted():
    def loops(method, *ends):
        records = []
        for number, end in enumerate(ends):
            records.append(made_record(method, f"p{number}", task="loops", metrics={"loop": end}))
        return records

    guard, full, other = loops("loopguard:64", 0.0, 0.0, 0.0), loops("full", 1.0, 1.0, 0.0), loops("h2o:8", 0.0, 1.0)
    assert table(*guard, *full).conclusion() == "LoopGuard: 0 of 3 answers loop; without a guard: 2 of 3."
    several = table(*guard, *full, *other).conclusion()
    assert several == "loopguard:64, the best of 2: 0 of 3 answers loop; without a guard: 2 of 3."
    assert table(*guard).conclusion() == "LoopGuard: 0 of 3 answers loop; full was not run."
    assert table(*full).conclusion() == "without a guard: 2 of 3 answers loop; no other method was run.".capitalize()


def test_folders_are_joined(tmp_path: Path):
    for name, records in (("a", FULL), ("b", H2O)):
        with open_run(tmp_path / name, SETTINGS, []) as folder:
            folder.append(records)
    joined = bench_table([tmp_path / "b", tmp_path / "a"])
    assert joined.groups == table(*FULL, *H2O).groups
    assert len(joined.settings["runs"]) == 2
