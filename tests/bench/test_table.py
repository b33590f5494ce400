"""Tables recomputed by hand, and what a table says, keeps and draws."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from bench_kit import SETTINGS, made_record
from refusals import refused

from sinkscope.bench.record import BenchRecord, BenchRun
from sinkscope.bench.table import BenchTable, tabulate_records
from sinkscope.bench.task import task_class
from sinkscope.measure.margin import SCORES, interval_of
from sinkscope.results.result import Result


def table(*records) -> BenchTable:
    return tabulate_records([BenchRun(list(records), SETTINGS)])  # type: ignore[arg-type]


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
    full, h2o = table(*FULL, *H2O).groups
    assert (str(full.method), full.score) == ("full", 1.0)
    assert (full.metrics["time"], full.metrics["cells"]) == (1.0, None)
    rate = interval_of(np.array([0.0, 1.0, 0.0, 0.0]), SCORES)
    assert rate is not None and (h2o.score, h2o.low, h2o.high, h2o.answers) == (0.25, rate.low, rate.high, 4)
    assert h2o.parts == {"a": 0.0, "b": 0.5}
    costs = h2o.metrics
    assert (costs["read"], costs["cells"], costs["cached_peak"], costs["chance"]) == (5.5, 0.5, 10.0, 0.25)
    assert costs["time"] == pytest.approx((12 / 10) / (4 / 8))  # seconds of a token: 12 s of 10 tokens, 4 s of 8


def test_details_of_a_table():
    result = table(*FULL, *H2O)
    assert Result.from_dict(json.loads(result.to_json())) == result
    assert list(result.to_frame()["score"]) == [1.0, 0.25]
    drawn = result.figure().data
    assert [list(drawn[0][name]) for name in ("x", "text")] == [["full", "h2o:8"], [9.0, 5.5]]


def test_who_keeps_generated_tokens_is_said_beside_those_that_evict_them():
    """A selection evicts nothing, and `every` in the settings of a method counts."""
    records = [made_record(name, "p") for name in ("full", "progressive:8", "snapkv:8", "snapkv:8:every=1")]
    (said,) = (line for line in table(*records).details() if "every generated token" in line)
    assert "snapkv:8 (10 cached at most) keeps" in said and "snapkv:8:every=1 (10 cached at most) evicts" in said
    assert "progressive" not in said and "full" not in said


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
        about = {"set": of_set}
        records.append(made_record(method, f"{of_set}{number}", task=task, settings=about, metrics=metrics))
    return records


@pytest.mark.parametrize(
    ("task", "answers", "said"),
    [
        ("file", ["h2o:8 1"], "h2o:8 has 100% in file s (score); full was not run."),
        ("file", ["full 1"], "In file s, control full has 100%; no other method was run."),
        ("loops", ["loopguard:64 0*3", "full 1 1 0", "h2o:8 0 1"],
         "3 prompts are too few to rank methods: loopguard:64 0, h2o:8 1 and full 2 in loops s (answers that loop)."),
        ("file", ["full 1*20", "snapkv:4 1*19 0 read=3", "loopserve:4 1*18 0*2 read=8.1 cells=1.32"],
         "snapkv:4 has 95% (78%-100%, reads 33%) in file s (score), 5±17 points from loopserve:4: "
         "too close to rank; control full has 100%."),
        # One is ahead only where the interval of the paired differences leaves zero out.
        ("file", ["full 1*20", "snapkv:4 1*20 read=3", "h2o:4 0*20 read=3"],
         "snapkv:4 has 100% (86%-100%, reads 33%) in file s (score), 100±28 points ahead of h2o:4; "
         "control full has 100%."),
        ("file", ["full 1*20", "h2o:4 1*10 0*10"],
         "h2o:4 has 50% (27%-73%, reads 100%) in file s (score), 50±31 points behind full; control full has 100%."),
        # A floor: what no method can do tells none of them apart.
        ("file", ["full 1*20", "h2o:4 0*20", "snapkv:4 1 0*19"],
         "Nothing can be told of methods in file s (score): the best, snapkv:4, has 5% (0%-22%), like chance; control "
         "full has 100%; give larger budgets or easier prompts."),
        ("file", ["full 0*20", "h2o:4 0*20"],
         "h2o:4 has 0% (0%-14%, reads 100%) in file s (score), 0±14 points from full: too close to rank; control full "
         "has 0%."),
        # Prompts differ more than methods do: the difference is small of each pair.
        ("text", ["h2o:8 .1 1.1 3.1 9.12", "snapkv:8 .2 1.2 3.2 9.3"],
         "h2o:8 has 3.4 nats (±6.4) in text s (KL to full), 0.12±0.064 ahead of snapkv:8; random was not run."),
        # Of several random parts, the one that has the budget of the best method stands beside it.
        ("text", ["random:0.5 8*20", "random:0.25 4*20", "h2o:0.25 1*20"],
         "h2o:0.25 has 1 nats (±0) in text s (KL to full), 3±0 ahead of random:0.25; control random:0.25 has 4 nats."),
    ],
)  # fmt: skip
def test_the_conclusion_of_a_table(task: str, answers: list[str], said: str):
    conclusion = table(*[record for some in answers for record in scored(task, some)]).conclusion()
    assert conclusion == said and len(said.split()) <= 30


def test_any_two_methods_are_compared_on_the_same_prompts():
    """Also two that are not the best; the interval is that of the differences, prompt by prompt."""
    answers = ["full 1*20", "h2o:4 1*20", "snapkv:4 1*10 0*10", "tova:4 1*8 0*12"]
    runs = [BenchRun([record for some in answers for record in scored("file", some)], SETTINGS)]
    found = tabulate_records(runs, beside="snapkv:4")
    interval = interval_of(np.array([0.0] * 8 + [-1.0] * 2 + [0.0] * 10), (-1.0, 1.0))
    (row,) = [row for row in found.rows() if row["method"] == "tova:4"]
    assert (row["difference"], row["from"], row["to"]) == (interval.mean, interval.low, interval.high)
    assert [row["difference"] for row in tabulate_records(runs).rows()] == [0.0, None, -0.5, -0.6]
    with refused("--beside c: expected full, h2o:4, snapkv:4, tova:4"):
        tabulate_records(runs, beside="c")


def test_the_best_method_stands_first_beside_the_control():
    row, *_ = table(*scored("text", "random:8 9"), *scored("text", "h2o:8 1"), *scored("text", "tova:8 2")).findings()
    assert (row.name, row.get("value")) == ("text s, h2o:8: KL to full", 1.0)
    assert (row.note, row.get("control")) == ("random:8", 9.0)
    row, *_ = table(*scored("loops", "full 1*3 0"), *scored("loops", "loopguard:64 0*4")).findings()
    assert (row.get("share"), row.note, row.get("control")) == (0.0, "full", 0.75)
    assert row.numbers["share"].margin is not None


def run_of(*records: BenchRecord, **changes) -> BenchRun:
    model = SETTINGS["model"] | changes.pop("model", {})
    return BenchRun(records, SETTINGS | {"task": "file"} | changes | {"model": model})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": {"fingerprint": "f01"}}, "model is 'f00' and 'f01'"),
        ({"chat": True}, "chat is False and True"),
    ],
)
def test_runs_under_other_conditions_stand_in_no_table_together(changes, said):
    whole = {"max_new_tokens": 6, "chat": False, "prompts": "123", "model": {"fingerprint": "f00"}}
    runs = [run_of(*scored("file", "h2o:8 1*4"), **some) for some in (whole, whole | changes)]
    with refused(re.escape(f"tiny: measured under other settings ({said}): show them in a table each")):
        tabulate_records(runs)
