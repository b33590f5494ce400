"""Prompts built from LongBench's files, and tables of what was written: small cases counted by hand."""

from __future__ import annotations

import json

import pytest
import torch
from refusals import refused
from repository import FIGURES, ROOT
from transformers import AutoTokenizer

from experiments.drawn import put_table
from experiments.longbench import LongBenchRecord, read_longbench
from experiments.loopbench import build as loop_build
from experiments.loopset import compare
from experiments.papers.loopguard import real_table, verdicts, why
from experiments.papers.loopguard.real import openings_of
from experiments.papers.loopserve import build as serve_build
from experiments.papers.loopserve import real
from experiments.record import earlier
from sinkscope.sparse.serve import LoopServe

NEWS = ROOT / "experiments/loopbench/news.jsonl"
BUNDLED = ROOT / "sinkscope/models/bundled"


# --- prompts ---


@pytest.mark.parametrize(("bench", "source"), [("dc", NEWS), ("ri", NEWS.with_name("stories.jsonl"))])
def test_loopbench_prompts_reach_the_mean_and_repeat(bench, source):
    def words(text, **_):
        return {"input_ids": text.split()}

    rows = loop_build.build(bench, read_longbench(source), words, 20, 260, 0)
    assert rows == loop_build.build(bench, read_longbench(source), words, 20, 260, 0)
    assert sum(len(row["prompt"].split()) for row in rows) / 20 == pytest.approx(260, rel=0.03)


def test_algorithm_1_loses_no_answer():
    text = "Paper {0}.\nIt was written in the year {0}.\nIt has 3 pages.\nNobody read it twice."
    records = [LongBenchRecord("", text.format(y), "When was it written?", (str(y),), ()) for y in range(1900, 1940)]
    for dialogue in serve_build.build("qasper", records, count=60):
        said = ""
        for prompts, answers in dialogue:
            said += prompts["end"]
            assert f"in the year {answers[0]}." in said


def test_algorithm_3_asks_held_out_examples():
    context = "\n".join(f"Question: what is {i}?\nType: T{i % 3}" for i in range(12))
    record = LongBenchRecord("a", context, "Question: what is x?\nType:", ("T1",), ("T0", "T1", "T2", "T9"))
    (built,) = serve_build.build("trec", [record], turns=3)
    assert len({prompts["end"].splitlines()[-2] for prompts, _ in built}) == 3
    begin, _, _ = serve_build.rows_of("trec", [built], serve_build.classes_of([record]))
    assert sorted(begin["turns"][0]["answers"]) == ["T0", "T1", "T2", "T9"]
    with refused("no record of trec has the 40 examples"):
        serve_build.build("trec", [record], turns=20)


# --- loops ---


class Words:
    """A tokenizer whose tokens are numbers, with a full stop after every fifth."""

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(f"w{token}." if token % 5 == 4 else f"w{token}" for token in tokens)


def output(tokens, **changed):
    return {"tokens": list(tokens), "ended": False, "acts": [], **changed}


LOOP = [*range(50), *list(range(60, 70)) * 4]
SALAD = [*range(40), *[7] * 30, *range(100, 200)]
ACT = {"generated": 60, "taken_back": 20, "period": 5, "bad": []}
JUDGED = [
    (output(LOOP), {"exact": True, "quiet": True, "quiet_unchanged": False}),
    (output(LOOP, ended=True), {"exact": False}),
    (output([*range(50), *[7, 8, 9] * 7]), {"exact": False}),  # fewer than 24 tokens
    (output(SALAD, acts=[ACT]), {"same": True, "stay": 170, "taken_back": 20}),
    (output([*range(40), *range(300, 400)], acts=[ACT]), {"same": False, "behind": 1.0, "quiet": False}),
    (output(range(400)), {"quiet_unchanged": True}),
]


@pytest.mark.parametrize(("told", "said"), JUDGED)
def test_an_output_is_judged_beside_that_of_the_model_alone(told, said):
    assert said.items() <= real_table.judged(told, output(range(400)), Words()).items()


def test_lines_that_differ_in_numbers_and_little_else_nearly_loop():
    told = "".join(f"{first} went home and {first[::-1]} ate {first * 2} there.\n" for first in "abcdefghijklm")
    assert real_table.nearly_loops("".join(f"The year {year} was good for the town.\n" for year in range(1900, 1912)))
    assert not real_table.nearly_loops("One line.\nAnother here.\n" + told[:40])


def test_tables_and_causes_are_of_the_outputs_that_were_written(tmp_path):
    about = {"model": "bundled", "half": "report", "number": 0, "arm": "full"}
    guarded = {"number": 0, "arm": "rewind", **output(range(60), acts=[ACT])}
    rows = [output(range(99)), {"number": 1, **output(LOOP)}, guarded]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(about | row) + "\n" for row in rows))
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"result": {"bundled": {"report": {"full": {"acted": 9}, "before": {"acted": 3}}}}}))
    real_table.main(tmp_path, models=[BUNDLED], out=table)
    told = json.loads(table.read_text())["result"]["bundled"]["report"]
    assert {name: row["acted"] for name, row in told.items()} == {"full": 0, "before": 3, "rewind": 1}
    assert told["rewind"]["cost"] == pytest.approx((60 + 20) / 60) and "cost" not in told["full"]
    (looping,) = why.loops_of(tmp_path, "bundled", "report")
    assert looping["opening"] == openings_of("report")[1][1]


def test_scores_of_detectors_are_counted_as_by_hand():
    places = {"ab": ("a", 10), "ac": ("a", 60), "cd": ("c", 0), "ef": ("e", None), "gh": ("g", None)}
    some = [{"text": text * 50, "class": name, "start": start} for text, (name, start) in places.items()]
    table = {"ab": 50, "ac": 50, "ef": 3}
    found = compare.compare(some, {compare.OURS: lambda _: 20, "mine": lambda text: table.get(text[:2])})
    ours, mine = found["detectors"]
    assert (mine["recall"], mine["lowest"], mine["false_alarms"]) == (round(1 / 3, 4), 0.0, 0.5)
    assert (mine["their_delay"], mine["our_delay"], mine["we_first"]) == (40, 10, 1.0)  # of the one loop that both find
    assert mine["by_class"] == {"a": 0.5, "c": 0.0, "e": 1.0, "g": 0.0} and ours["recall"] == round(2 / 3, 4)


@pytest.mark.parametrize("half", verdicts.HALVES)
def test_honest_texts_are_counted_by_checker_and_guard(half):
    """As they are committed."""
    row = verdicts.of_honest(verdicts.RULES["checker"], {"bundled": AutoTokenizer.from_pretrained(BUNDLED)}, half)
    own = row.pop("bundled")
    assert row.items() <= earlier(FIGURES / "loopguard_verdicts.json")[f"checker, {half}"].items()
    assert {*own} & {*row["checker"]}


# --- prompts along lines ---


def test_the_page_shows_what_prompts_cost_and_they_are_read_along_bands_where_that_is_faster(tmp_path):
    rows, text = earlier(FIGURES / "loopserve_real.json"), (FIGURES / "loopserve.md").read_text()
    page = tmp_path / "page.md"
    page.write_text(text)
    put_table(page, "papers.loopserve.real", real.table(rows))
    assert page.read_text() == text
    for name, row in rows.items():
        length = int(name.split(", ")[2])
        if name.startswith("smollm2"):
            is_read = LoopServe().too_short(length, length, torch.device("cpu")) is None
            assert is_read == (row["0.99"]["time"] < 1), name
