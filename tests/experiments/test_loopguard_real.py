"""What counts as a loop in the tables of real models."""

from __future__ import annotations

import json

import pytest
from repository import ROOT

from experiments.loopguard import real_table, why
from experiments.loopguard.real import openings_of
from experiments.loopguard.real_table import different, judged, nearly_loops


class Words:
    """A tokenizer whose tokens are numbers, with a full stop after every fifth."""

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(f"w{token}." if token % 5 == 4 else f"w{token}" for token in tokens)


def output(tokens, **changed):
    return {"tokens": list(tokens), "ended": False, "acts": [], **changed}


def said(tokens, **changed):
    """What is said of an output, beside 400 different tokens of the model alone."""
    return judged(output(tokens, **changed), output(range(400)), Words())


LOOP = [*range(50), *list(range(60, 70)) * 4]
ACT = {"generated": 60, "taken_back": 20, "period": 5, "bad": []}


def test_three_copies_at_the_end_are_a_loop_and_one_that_ended_is_none():
    assert said(LOOP)["exact"] and not said(LOOP, ended=True)["exact"]
    assert not said([*range(50), *[7, 8, 9] * 7])["exact"], "fewer than 24 tokens"


def test_lines_that_differ_in_numbers_and_little_else_nearly_loop():
    told = "".join(f"{first} went home and {first[::-1]} ate {first * 2} there.\n" for first in "abcdefghijklm")
    assert nearly_loops("".join(f"The year {year} was good for the town.\n" for year in range(1900, 1912)))
    assert not nearly_loops("One line.\nAnother here.\n" + told[:40])


def test_what_is_behind_the_first_act():
    salad = [*range(40), *[7] * 30, *range(100, 200)]
    row = said(salad, acts=[ACT])
    assert (row["same"], row["stay"], row["taken_back"]) == (True, 170, 20)
    assert row["behind"] == pytest.approx(different(salad[40:]))
    row = said([*range(40), *range(300, 400)], acts=[ACT])
    assert (row["same"], row["behind"], row["quiet"]) == (False, 1.0, False)
    assert said(range(400))["quiet_unchanged"]


def test_halves_share_no_opening():
    choose, report = (openings_of(half) for half in ("choose", "report"))
    assert not {*choose} & {*report} and len(choose) == len(report) == 48


def write_runs(folder, about, *changes):
    (folder / "runs.jsonl").write_text("".join(json.dumps({**about, **change}) + "\n" for change in changes))


def test_a_table_has_what_the_outputs_are_and_keeps_other_rows(tmp_path):
    guarded = {"arm": "rewind", **output(range(60), acts=[ACT])}
    write_runs(tmp_path, {"model": "bundled", "half": "choose", "number": 0, "arm": "full"}, output(range(99)), guarded)
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"result": {"bundled": {"choose": {"full": {"acted": 9}, "before": {"acted": 3}}}}}))
    real_table.main(tmp_path, models=[ROOT / "sinkscope/models/bundled"], out=table)
    told = json.loads(table.read_text())["result"]["bundled"]["choose"]
    assert {name: row["acted"] for name, row in told.items()} == {"full": 0, "before": 3, "rewind": 1}
    assert told["rewind"]["cost"] == pytest.approx((60 + 20) / 60) and "cost" not in told["full"]


def test_why_is_asked_of_the_outputs_that_end_in_a_loop_without_a_remedy(tmp_path):
    about = {"model": "m", "arm": "full", "half": "report", "number": 1, "tokens": LOOP}
    write_runs(tmp_path, about, {}, {"tokens": [*range(100)], "number": 2}, {"arm": "rewind"}, {"model": "n"})
    assert why.loops_of(tmp_path, "m", "report") == [{**about, "opening": openings_of("report")[1][1]}]
