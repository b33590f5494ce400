"""Tables recomputed by hand, and what a table says, keeps and draws."""

from __future__ import annotations

import json
from math import isnan

import numpy as np
import pytest
from bench_kit import SETTINGS, made_record
from refusals import refused

from sinkscope.bench.methods import uneven_budgets
from sinkscope.bench.record import BenchRun
from sinkscope.bench.table import BenchTable, tabulate_records
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import SCORES, interval_of


def table(*records, task: str = "file", beside: str | None = None) -> BenchTable:
    return tabulate_records([BenchRun(records, SETTINGS | {"task": task})], beside)


def scored(answers: list[str], task: str = "file", beside: str | None = None) -> BenchTable:
    """A table of methods such as "h2o:4 0*4 1*16": a method, and how often it has each value."""
    records = []
    for method, *words in map(str.split, answers):
        values: list[str] = []
        for word in words:
            value, _, times = word.partition("*")
            values += [value] * int(times or 1)
        for number, value in enumerate(values):
            records.append(made_record(method, f"p{number}", metrics={task_class(task).main: float(value)}))
    return table(*records, task=task, beside=beside)


def test_a_group_is_recomputed_kept_and_drawn():
    records = [made_record("tova:8")]
    for i, tokens in enumerate(((1, 3, 4, 5), (1, 2), (1, 2), (1, 2))):
        costs = {"score": float(i == 1), "read": 4.0 + i, "cells": 0.5, "seconds": 3.0}
        records += [made_record("full", f"p{i}"), made_record("h2o:8", f"p{i}", metrics=costs, tokens=tokens)]
    result = table(*records)
    _, two, one = result.groups
    assert (one.method, one.score, one.metrics["time"]) == ("full", 1.0, 1.0) and isnan(one.metrics["cells"])
    rate = interval_of(np.array([0.0, 1.0, 0.0, 0.0]), SCORES)
    assert (two.score, two.low, two.high, two.answers) == (0.25, rate.low, rate.high, 4)
    time = pytest.approx((12 / 10) / (4 / 8))  # seconds of a token: 12 s of 10 tokens, 4 s of 8
    assert two.metrics == {"read": 5.5, "cells": 0.5, "cached_peak": 10.0, "time": time}
    assert BenchTable.from_dict(json.loads(result.to_json())) == result
    (drawn,) = result.figure().data
    assert (*zip(drawn.x, drawn.y, strict=True),) == (("tova:8", 1.0), ("h2o:8", 0.25), ("full", 1.0))
    whiskers = [drawn.error_y[side][1] for side in ("array", "arrayminus")]
    assert not drawn.error_y.symmetric and whiskers == [two.high - two.score, two.score - two.low]
    assert two.high - two.score > two.score - two.low  # the score is near 0, where an interval ends
    row = next(row for row in result.text(None).splitlines() if row.startswith("tova:8"))
    assert row.split()[1] == "100%"
    assert "(" not in row, "one answer has no interval"


FULL_HAS = "The reference, full (all tokens stay cached): "


@pytest.mark.parametrize(
    ("task", "answers", "best", "lead", "control"),
    [
        ("file", ["h2o:8 1"], "h2o:8 has 100% in s", "", "Full was not run."),
        ("loops", ["loopguard:64 0*3", "full 1 1 0", "h2o:8 0 1"],
         "loopguard:64 has 0% (0% to 76%) in s (answers that loop, lower is better, 3 prompts)", "", FULL_HAS + "67%."),
        ("file", ["full 1*20", "snapkv:4 1*19 0", "loopserve:4 1*18 0*2"], "snapkv:4 has 95% (78% to 100%)",
         ", +5.0 points (95%: -12.1 to +21.2) against loopserve:4: too close to rank.", FULL_HAS + "100%."),
        # One is ahead only where the interval of the paired differences leaves zero out.
        ("file", ["full 1*20", "h2o:4 1*10 0*10"], "h2o:4 has 50% (27% to 73%)",
         ", -50.0 points (95%: -71.9 to -19.0) against full.", FULL_HAS + "100%."),
        # Prompts differ more than methods do: the difference is small of each pair.
        ("text", ["h2o:8 .1 1.1 3.1 9.12", "snapkv:8 .2 1.2 3.2 9.3"],
         "h2o:8 has 3.4 (-3.1 to 9.8) in s (KL to full, nats, lower is better, 4 prompts)",
         ", -0.12 (95%: -0.184 to -0.0564) against snapkv:8.", "Random was not run."),
        # Methods are at the floor, and so is the control: it is not above them.
        ("file", ["full 0*20", "h2o:4 0*20"], "h2o:4 has 0% (0% to 14%)",
         ", +0.0 points (95%: -13.7 to +13.7) against full: too close to rank.", FULL_HAS + "0%."),
        # A control that is better than every method.
        ("text", ["random:0.25 1*20", "h2o:0.25 2*20", "snapkv:0.25 3*20"], "h2o:0.25 has 2 (2 to 2)",
         ", -1 (95%: -1 to -1) against snapkv:0.25.", "The control, random:0.25: 1."),
        # Another control, which is better than that of the task, is no rival.
        ("loops", ["sampling 0*20", "full 1*20", "loopguard:64 0*20"], "loopguard:64 has 0% (0% to 14%)",
         ", -100.0 points (95%: -100.0 to -72.0) against full.", FULL_HAS + "100%."),
        # Of several random parts, the best one stands beside it.
        ("text", ["random:0.5 8*20", "random:0.25 4*20", "h2o:0.25 1*20"], "h2o:0.25 has 1 (1 to 1)",
         ", -3 (95%: -3 to -3) against random:0.25.", "The control, random:0.25: 4."),
    ],
)  # fmt: skip
def test_the_conclusion_says_the_best_its_lead_and_the_control(
    task: str, answers: list[str], best: str, lead: str, control: str
):
    conclusion = scored(answers, task).conclusion()
    first = conclusion.partition(". ")[0]
    assert conclusion.startswith(best)
    assert lead in f"{first}."
    assert bool(lead) == (" against " in first)
    assert conclusion.endswith(control)


def test_of_methods_that_cannot_do_a_task_nothing_is_told():
    """What no method can do tells none of them apart."""
    conclusion = scored(["full 1*20", "h2o:4 0*20", "snapkv:4 1 0*19"]).conclusion()
    assert conclusion == (
        "Nothing can be told of the methods in s (score, higher is better, 20 prompts): the best, snapkv:4 has 5% (0% "
        "to 22%); the reference, full (all tokens stay cached): 100%. Give larger budgets or easier prompts."
    )


def test_a_record_of_two_runs_counts_once_as_the_first_has_it():
    first, later = made_record(metrics={"score": 1.0}), made_record(metrics={"score": 0.0})
    more = made_record(prompt="p1", metrics={"score": 0.0})
    runs = [BenchRun(records, SETTINGS) for records in ([first], [later, more])]
    (group,) = tabulate_records(runs).groups
    assert (group.answers, group.scores) == (2, {"p0": 1.0, "p1": 0.0})


def test_any_two_methods_are_compared_on_the_same_prompts():
    """Also two that are not the best; the interval is that of the differences, prompt by prompt."""
    answers = ["full 1*20", "h2o:4 1*20", "snapkv:4 1*10 0*10", "tova:4 1*8 0*12"]
    interval = interval_of(np.array([0.0] * 8 + [-1.0] * 2 + [0.0] * 10), (-1.0, 1.0))
    (row,) = [row for row in scored(answers, beside="snapkv:4").rows() if row["method"] == "tova:4"]
    assert (row["difference"], row["difference_low"], row["difference_high"]) == (
        interval.mean,
        interval.low,
        interval.high,
    )
    differences = {row["method"]: row.get("difference") for row in scored(answers).rows()}
    assert differences == {"h2o:4": None, "snapkv:4": -0.5, "tova:4": -0.6, "full": 0.0}
    with refused("--beside c: expected full, h2o:4, snapkv:4, tova:4"):
        scored(answers, beside="c")
    with refused(r"measured under other settings \(chat was False, now True\): show them in a table"):
        tabulate_records([BenchRun([], SETTINGS | {"chat": chat}) for chat in (False, True)])


def test_a_table_says_where_generated_tokens_stay_beside_a_budget():
    said = scored(["snapkv:8 1", "pyramid:0.25 1", "h2o:8 1", "full 1", "loopserve 1"]).details()
    assert said == [
        "Every generated token stays beside the budget of snapkv:8 and pyramid:0.25, and counts towards that of h2o:8: "
        "snapkv:8:every=1 makes them alike."
    ]
    for alike in (["snapkv:8", "full", "progressive:8"], ["snapkv:8:every=1", "h2o:8"], ["not_here:Policy", "h2o:8"]):
        assert uneven_budgets(alike) is None
