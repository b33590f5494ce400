"""What counts as a loop in the tables of real models."""

from __future__ import annotations

import json
from typing import Any

import pytest
from repository import ROOT

from experiments.loopguard import real, real_table, why
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


@pytest.mark.slow
def test_outputs_without_an_alarm_need_not_be_made_again(tmp_path):
    """What is taken from the model alone is what the guard would have written; the others are written."""
    setting: Any = {"model": str(ROOT / "sinkscope/models/bundled"), "halves": ["choose"], "count": 2, "new": 100}
    real.main(tmp_path / "taken", **setting, only=["full", "rewind"], alarmed=True)
    real.main(tmp_path / "made", **setting, only=["rewind"])
    taken, made = (real.outputs_of([tmp_path / work], arm="rewind") for work in ("taken", "made"))
    made = {row["number"]: row for row in made}
    for row in taken:
        other = made[row["number"]]
        assert (row["tokens"], row["acts"], row.get("taken", False)) == (
            other["tokens"],
            other["acts"],
            not other["acts"],
        )
    acted = [row for row in taken if row["acts"]]
    assert len(taken) == 8 and 0 < len(acted) < 8
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"result": {"bundled": {"choose": {"full": {"acted": 9}, "before": {"acted": 3}}}}}))
    real_table.main(tmp_path / "taken", models=[ROOT / "sinkscope/models/bundled"], out=table)
    told = json.loads(table.read_text())["result"]["bundled"]["choose"]
    assert {name: row["acted"] for name, row in told.items()} == {"full": 0, "before": 3, "rewind": len(acted)}
    stay = sum(len(row["tokens"]) for row in acted)
    back = sum(act["taken_back"] for row in acted for act in row["acts"])
    assert told["rewind"]["cost"] == pytest.approx((stay + back) / stay) and "cost" not in told["full"]


def test_why_is_asked_of_the_outputs_that_end_in_a_loop_without_a_remedy(tmp_path):
    about = {"model": "m", "arm": "full", "half": "report", "number": 1}
    loop, walk = [*range(40), *[7, 8, 9] * 20], [*range(100)]
    changes = [{"tokens": loop}, {"tokens": walk, "number": 2}]
    changes += [{"tokens": loop, "arm": "rewind"}, {"tokens": loop, "model": "n"}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps({**about, **change}) + "\n" for change in changes))
    assert why.loops_of(tmp_path, "m", "report") == [{**about, "tokens": loop, "opening": openings_of("report")[1][1]}]
