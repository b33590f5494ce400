"""Tables recomputed by hand, and what a table says, keeps and draws."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import stdev

import pytest
from bench_kit import SETTINGS, made_record

from sinkscope.bench.record import BenchRecord, BenchRun, open_run
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
    said = "h2o:8 25% (5%-70%, cells 50%, reads 61%): no difference shown; full, the control, 100%."
    assert result.conclusion() == f"Task file s, score: {said}"
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
    assert table(*guard, *full).conclusion() == (
        "Task loops s: LoopGuard 0 of 3 answers loop (0%-56%, reads 100%): no difference shown; full, the "
        "control, 2 of 3 answers loop."
    )
    many = loops("loopguard:64", *[0.0] * 12), loops("full", *[1.0] * 12)
    assert table(*many[0], *many[1]).conclusion() == (
        "Task loops s: LoopGuard 0 of 12 answers loop (0%-24%, reads 100%); full, the control, 12 of 12 answers loop."
    )
    several = table(*guard, *full, *other).conclusion()
    said = "LoopGuard 0 of 3 answers loop (reads 100%) and h2o:8 1 of 2 answers loop (reads 100%)"
    control = "full, the control, 2 of 3 answers loop"
    assert several == f"Task loops s: of 2, no difference shown between {said}; {control}."
    assert table(*full).conclusion() == (
        "Task loops s: full, the control, 2 of 3 answers loop; no other method was run."
    )


def scored(method: str, *values: float, of_set: str = "s", **metrics) -> list[BenchRecord]:
    records = []
    for number, value in enumerate(values):
        metrics["score"] = value
        records.append(made_record(method, f"{of_set}{number}", settings={"set": of_set}, metrics=metrics))
    return records


def test_the_best_is_named_only_where_intervals_part():
    full = scored("full", *[1.0] * 20)
    good, bad = scored("snapkv:4", *[1.0] * 20, read=3.0), scored("h2o:4", *[0.0] * 20, read=3.0)
    assert table(*full, *good, *bad).conclusion() == (
        "Task file s, score: snapkv:4 100% (84%-100%, reads 33%), the best of 2; full, the control, 100%."
    )
    near = scored("h2o:4", *[0.0] * 4, *[1.0] * 16, read=3.0)
    assert "of 2, no difference shown between snapkv:4 100%" in table(*full, *good, *near).conclusion()
    lost = scored("snapkv:4", *[0.0] * 20, read=3.0)
    assert table(*full, *lost).conclusion().startswith("Task file s, score: snapkv:4 0% (0%-16%, reads 33%); full")


def test_what_costs_as_much_as_the_whole_cache_is_no_finding():
    full, poor = scored("full", *[1.0] * 20), scored("h2o:4", *[0.0] * 20, read=3.0)
    same = scored("loopserve:9", *[1.0] * 20, cells=0.985)
    said = "loopserve:9 100% (84%-100%, cells 98.5%, reads 100%), the best of 2, saving less than 5%; full, the"
    assert said in table(*full, *same, *poor).conclusion()
    sparse = scored("loopserve:9", *[1.0] * 20, cells=0.5)
    assert "saving" not in table(*full, *sparse, *poor).conclusion()


def test_a_conclusion_is_about_all_sets_of_a_task():
    records = []
    for of_set, right in (("a", 10), ("b", 0)):
        records += scored("full", *[1.0] * 10, of_set=of_set)
        records += scored("h2o:4", *[1.0] * right, *[0.0] * (10 - right), of_set=of_set, read=3.0 if right else 6.0)
        records += scored("tova:4", *[0.0] * 10, of_set=of_set, read=3.0)
    rates = wilson(10, 10), wilson(0, 10)
    low = 0.5 - 0.5 * math.hypot(1 - rates[0].low, 0 - rates[1].low)
    high = 0.5 + 0.5 * math.hypot(rates[0].high - 1, rates[1].high - 0)
    said = f"h2o:4 50% ({low:.0%}-{high:.0%}, reads 50%), the best of 2; full, the control, 100%."
    assert table(*records).conclusion() == f"Task file, 2 sets, score: {said}"
    # A method that was run on one of the sets alone is not compared.
    assert "the best of 2" in table(*records, *scored("snapkv:4", *[1.0] * 10, of_set="a")).conclusion()


def test_one_answer_shows_no_difference():
    records = []
    for method, value in (("random:8", 9.0), ("h2o:8", 1.0)):
        records.append(made_record(method, "p", task="text", metrics={"kl": value}))
    result = table(*records)
    assert math.isnan(result.groups[0].low)
    said = "h2o:8 1 nats (reads 9 tokens): no difference shown; random:8, the control, 9 nats."
    assert result.conclusion() == f"Task text s, divergence from full attention: {said}"


@pytest.mark.parametrize("budgets", [(8, 4), (4, 8)])
def test_the_control_has_the_budget_of_the_best_method(budgets):
    """Two random parts were run; the one that keeps as much as the best method stands beside it."""
    records = []
    for budget in budgets:
        for number in range(20):
            records.append(made_record(f"random:{budget}", f"p{number}", task="text", metrics={"kl": float(budget)}))
    for number in range(20):
        records.append(made_record("h2o:8", f"p{number}", task="text", metrics={"kl": 1.0}))
    assert table(*records).conclusion().endswith("random:8, the control, 8 nats.")


def test_the_budget_in_the_words_of_kvpress():
    known = {"prompt_tokens": 40, "score": 1.0}
    rows = {}
    for method in ("full", "h2o:0.25", "h2o:10", "h2o:400", "loopserve:8", "progressive:8", "loopguard:8", "sampling"):
        row = table(made_record(method, metrics=known)).rows()[0]
        rows[method] = row["compression_ratio"]
    assert rows == {
        "full": 0.0,
        "h2o:0.25": 0.75,
        "h2o:10": 0.75,
        "h2o:400": 0.0,
        "loopserve:8": None,
        "progressive:8": None,
        "loopguard:8": None,
        "sampling": 0.0,
    }


def test_folders_are_joined(tmp_path: Path):
    for name, records in (("a", FULL), ("b", H2O)):
        with open_run(tmp_path / name, SETTINGS, []) as folder:
            folder.append(records)
    joined = bench_table([tmp_path / "b", tmp_path / "a"])
    assert joined.groups == table(*FULL, *H2O).groups
    assert len(joined.settings["runs"]) == 2
