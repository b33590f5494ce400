"""Tables recomputed by hand, and what a table says, keeps and draws."""

from __future__ import annotations

import json
from math import isnan

import numpy as np
import pytest
from bench_kit import SETTINGS, made_record
from refusals import refused

from sinkscope.bench.record import BenchRecord, BenchRun
from sinkscope.bench.table import BenchTable, tabulate_records
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import SCORES, interval_of
from sinkscope.results.result import Result


def table(*records, task: str = "file", beside: str | None = None) -> BenchTable:
    return tabulate_records([BenchRun(list(records), SETTINGS | {"task": task})], beside)  # type: ignore[arg-type]


FULL = [made_record("full", f"p{i}") for i in range(4)]
H2O = [
    made_record(
        "h2o:8",
        f"p{i}",
        metrics={"score": float(i == 1), "read": 4.0 + i, "cells": 0.5, "seconds": 3.0},
        tokens=(1, 2) if i else (1, 3, 4, 5),
        turn=i // 2,
    )
    for i in range(4)
]


def test_a_group_is_recomputed():
    h2o, full = table(*FULL, *H2O).groups
    assert (full.method, full.score) == ("full", 1.0)
    assert full.metrics["time"] == 1.0 and isnan(full.metrics["cells"])
    rate = interval_of(np.array([0.0, 1.0, 0.0, 0.0]), SCORES)
    assert rate is not None and (h2o.score, h2o.low, h2o.high, h2o.answers) == (0.25, rate.low, rate.high, 4)
    time = pytest.approx((12 / 10) / (4 / 8))  # seconds of a token: 12 s of 10 tokens, 4 s of 8
    assert h2o.metrics == {"read": 5.5, "cells": 0.5, "cached_peak": 10.0, "time": time}


def test_details_of_a_table():
    result = table(*FULL, *H2O, made_record("tova:8"))
    assert Result.from_dict(json.loads(result.to_json())) == result
    assert list(result.to_frame()["score"]) == [1.0, 0.25, 1.0]
    (drawn,) = result.figure().data
    assert list(drawn.x) == ["tova:8", "h2o:8", "full"] and list(drawn.y) == [1.0, 0.25, 1.0]
    row = next(row for row in result.text(None).splitlines() if row.startswith("tova:8"))
    assert row.split()[:4] == ["tova:8", "100.0%", "-", "-"], "one answer has no interval"


def scored(task: str, answers: str) -> list[BenchRecord]:
    """Records of "h2o:4 0*4 1*16 read=3 set=a": a method, how often it has each value, and what its answers cost."""
    method, *words = answers.split()
    values: list[float] = []
    costs = {}
    for word in words:
        name, given, number = word.partition("=")
        value, _, times = name.partition("*")
        if given:
            costs[name] = number
        else:
            values += [float(value)] * int(times or 1)
    of_set = costs.pop("set", "s")
    metrics = {name: float(number) for name, number in costs.items()}
    records = []
    for number, value in enumerate(values):
        metrics[task_class(task).main] = value
        records.append(made_record(method, f"{of_set}{number}", set=of_set, metrics=metrics))
    return records


@pytest.mark.parametrize(
    ("task", "answers", "said"),
    [
        ("file", ["h2o:8 1"], "h2o:8 has 100% in s (score); full was not run."),
        ("file", ["full 1"], "full has 100% in s (score); control full has 100%."),
        ("loops", ["loopguard:64 0*3", "full 1 1 0", "h2o:8 0 1"],
         "loopguard:64 has 0% (0% to 76%) in s (answers that loop); control full has 67%."),
        ("file", ["full 1*20", "snapkv:4 1*19 0 read=3", "loopserve:4 1*18 0*2 read=8.1 cells=1.32"],
         "snapkv:4 has 95% (78% to 100%) in s (score), +5.0 points, 95 % -12.1 to +21.2, from loopserve:4: too close "
         "to rank; control full has 100%."),
        # One is ahead only where the interval of the paired differences leaves zero out.
        ("file", ["full 1*20", "snapkv:4 1*20 read=3", "h2o:4 0*20 read=3"],
         "snapkv:4 has 100% (86% to 100%) in s (score), +100.0 points, 95 % +72.0 to +100.0, from h2o:4; control full "
         "has 100%."),
        ("file", ["full 1*20", "h2o:4 1*10 0*10"],
         "h2o:4 has 50% (27% to 73%) in s (score), -50.0 points, 95 % -71.9 to -19.0, from full; control full has "
         "100%."),
        # A floor: what no method can do tells none of them apart.
        ("file", ["full 1*20", "h2o:4 0*20", "snapkv:4 1 0*19"],
         "Nothing can be told of methods in s (score): the best, snapkv:4 has 5% (0% to 22%); control "
         "full has 100%; give larger budgets or easier prompts."),
        ("file", ["full 0*20", "h2o:4 0*20"],
         "h2o:4 has 0% (0% to 14%) in s (score), +0.0 points, 95 % -13.7 to +13.7, from full: too close to rank; "
         "control full has 0%."),
        # Prompts differ more than methods do: the difference is small of each pair.
        ("text", ["h2o:8 .1 1.1 3.1 9.12", "snapkv:8 .2 1.2 3.2 9.3"],
         "h2o:8 has 3.4 (-3.1 to 9.8) in s (KL to full, nats), -0.12, 95 % -0.184 to -0.0564, from snapkv:8; random "
         "was not run."),
        # Of several random parts, the best one stands beside it.
        ("text", ["random:0.5 8*20", "random:0.25 4*20", "h2o:0.25 1*20"],
         "h2o:0.25 has 1 (1 to 1) in s (KL to full, nats), -3, 95 % -3 to -3, from random:0.25; control random:0.25 "
         "has 4."),
    ],
)  # fmt: skip
def test_the_conclusion_of_a_table(task: str, answers: list[str], said: str):
    conclusion = table(*[record for some in answers for record in scored(task, some)], task=task).conclusion()
    assert conclusion == said and len(said.split()) <= 30


def test_any_two_methods_are_compared_on_the_same_prompts():
    """Also two that are not the best; the interval is that of the differences, prompt by prompt."""
    answers = ["full 1*20", "h2o:4 1*20", "snapkv:4 1*10 0*10", "tova:4 1*8 0*12"]
    records = [record for some in answers for record in scored("file", some)]
    found = table(*records, beside="snapkv:4")
    interval = interval_of(np.array([0.0] * 8 + [-1.0] * 2 + [0.0] * 10), (-1.0, 1.0))
    (row,) = [row for row in found.rows() if row["method"] == "tova:4"]
    assert interval is not None
    assert (row["difference"], row["from"], row["to"]) == (interval.mean, interval.low, interval.high)
    differences = {row["method"]: row["difference"] for row in table(*records).rows()}
    assert differences == {"h2o:4": None, "snapkv:4": -0.5, "tova:4": -0.6, "full": 0.0}
    with refused("--beside c: expected full, h2o:4, snapkv:4, tova:4"):
        table(*records, beside="c")


def test_the_best_method_stands_first_beside_the_control():
    records = [*scored("text", "random:8 9"), *scored("text", "h2o:8 1"), *scored("text", "tova:8 2")]
    row, *_ = table(*records, task="text").findings()
    assert (row.name, row.get("value")) == ("s, h2o:8: KL to full, nats", 1.0)
    assert (row.note, row.get("control")) == ("random:8", 9.0)
    row, *_ = table(*scored("loops", "full 1*3 0"), *scored("loops", "loopguard:64 0*4"), task="loops").findings()
    assert (row.get("share"), row.note, row.get("control")) == (0.0, "full", 0.75)
    assert row.numbers["share"].margin is not None


def test_runs_under_other_conditions_stand_in_no_table_together():
    runs = [BenchRun(scored("file", "h2o:8 1*4"), some) for some in (SETTINGS, SETTINGS | {"chat": True})]
    with refused(words=["runs were measured under other settings (chat was false, now true): show them in a table"]):
        tabulate_records(runs)
