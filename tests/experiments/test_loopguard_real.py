"""What counts as a loop in the tables of real models."""

from __future__ import annotations

import json

import pytest
from repository import ROOT

from experiments.loopguard import real_table, why
from experiments.loopguard.real import KINDS, openings_of
from experiments.loopguard.real_table import different, judged, nearly_loops


class Words:
    """A tokenizer whose tokens are numbers, with a full stop after every fifth."""

    def decode(self, tokens, skip_special_tokens=True):
        return " ".join(f"w{token}." if token % 5 == 4 else f"w{token}" for token in tokens)


def output(tokens, **changed):
    return {"tokens": list(tokens), "ended": False, "acts": [], **changed}


def test_three_copies_at_the_end_are_a_loop_and_one_that_ended_is_none():
    loop = output([*range(50), *list(range(60, 70)) * 4])
    assert judged(loop, loop, Words())["exact"]
    assert not judged({**loop, "ended": True}, loop, Words())["exact"]
    short = output([*range(50), *[7, 8, 9] * 7])
    assert not judged(short, short, Words())["exact"], "fewer than 24 tokens"


def test_lines_that_differ_in_numbers_and_little_else_nearly_loop():
    counted = "".join(f"The year {year} was good for the town.\n" for year in range(1900, 1912))
    told = "".join(f"{first} went home and {first[::-1]} ate {first * 2} there.\n" for first in "abcdefghijklm")
    assert nearly_loops(counted)
    assert not nearly_loops("One line.\nAnother here.\n" + told[:40])
    assert not nearly_loops(
        "The cat sat. " * 3 + " ".join(f"{w} is {w * 3}." for w in "quick brown foxes jump over".split())
    )


def test_what_is_behind_the_first_act():
    act = {"generated": 60, "taken_back": 20, "period": 5}
    stock = output(range(400))
    salad = output([*range(40), *[7] * 30, *range(100, 200)], acts=[act])
    row = judged(salad, stock, Words())
    assert row["same"] and (row["stay"], row["taken_back"]) == (170, 20)
    assert row["behind"] == pytest.approx(different(salad["tokens"][40:]))
    sense = output([*range(40), *range(300, 400)], acts=[act])
    row = judged(sense, stock, Words())
    assert not row["same"] and row["behind"] == 1.0 and not row["quiet"]
    assert judged(stock, stock, Words())["quiet_unchanged"]


def test_halves_share_no_opening_and_have_as_many_of_each_kind():
    choose, report = openings_of("choose"), openings_of("report")
    assert not {text for _, text in choose} & {text for _, text in report}
    for half in (choose, report):
        assert [sum(kind == one for kind, _ in half) for one in KINDS] == [12] * 4


def test_a_table_has_what_the_outputs_are_and_keeps_other_rows(tmp_path):
    acts = [{"generated": 60, "taken_back": 20, "period": 5, "bad": []}]
    about = {"model": "bundled", "half": "choose", "number": 0}
    rows = [{**about, "arm": "full", **output(range(99))}, {**about, "arm": "rewind", **output(range(60), acts=acts)}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"result": {"bundled": {"choose": {"full": {"acted": 9}, "before": {"acted": 3}}}}}))
    real_table.main(tmp_path, models=[ROOT / "sinkscope/models/bundled"], out=table)
    told = json.loads(table.read_text())["result"]["bundled"]["choose"]
    assert {name: row["acted"] for name, row in told.items()} == {"full": 0, "before": 3, "rewind": 1}
    assert told["rewind"]["cost"] == pytest.approx((60 + 20) / 60) and "cost" not in told["full"]


def test_why_is_asked_of_the_outputs_that_end_in_a_loop_without_a_remedy(tmp_path):
    about = {"model": "m", "arm": "full", "half": "report", "number": 1}
    loop, walk = [*range(40), *[7, 8, 9] * 20], [*range(100)]
    changes = [{"tokens": loop}, {"tokens": walk, "number": 2}]
    changes += [{"tokens": loop, "arm": "rewind"}, {"tokens": loop, "model": "n"}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps({**about, **change}) + "\n" for change in changes))
    assert why.loops_of(tmp_path, "m", "report") == [{**about, "tokens": loop, "opening": openings_of("report")[1][1]}]
