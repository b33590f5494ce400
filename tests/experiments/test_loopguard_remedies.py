"""What remedies did: the counts of outputs written by hand, the other rules, and the page beside the figure's JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from experiments.loopguard import outcome, text
from experiments.loopguard.openings import CHOOSING, FORMS, WORDS, openings
from experiments.loopguard.remedies import METHODS, guard_of
from experiments.loopguard.rules import Dry, Ends, Ladder, Longest

ROOT = Path(__file__).parents[2]
FRESH, LOOP = list(range(40)), [*range(10), *[7] * 30]


def output(number: int, tokens: list[int], acts: list[list[int]], nll: float, counted: int, **more):
    place = {"family": "scenes", "number": number}
    return {
        "tokens": tokens,
        "acts": acts,
        "nll": nll,
        "counted": counted,
        "alarm": None,
        "ended": False,
        **place,
        **more,
    }


def test_a_row_counts_what_was_planted():
    """Two outputs alarm without a guard; one of them still loops. The healthy one is changed."""
    full = {
        ("scenes", 0): output(0, FRESH, [], 8.0, 8),
        ("scenes", 1): output(1, LOOP, [], 9.0, 9, alarm=20),
        ("scenes", 2): output(2, LOOP, [], 9.0, 9, alarm=20),
    }
    guarded = [
        output(0, FRESH[:-1], [], 8.0, 8),
        output(1, FRESH, [[20, 5], [31, 3]], 20.0, 10, ended=True),
        output(2, LOOP, [[20, 6]], 1.0, 10),
    ]
    row = outcome.summary("LoopGuard", guarded, full)
    assert (row["loops"], row["outputs"], row["healthy"], row["changed"]) == (1, 3, 1, 1)
    assert (row["acted"], row["acts"], row["most"], row["taken_back"]) == (2, 1.5, 2, 7)
    assert row["at_once"] == 1, "9 tokens after its last act; the other one has not ended"
    assert row["own_at_once"] == 0
    assert outcome.ending_after([{"tokens": FRESH, "ended": True}, {"tokens": LOOP, "ended": False}], [30, 40]) == 0.5
    assert row["perplexity"] == pytest.approx(math.exp(2)), "without the output that loops"
    assert row["own"] == pytest.approx(math.e) and row["ratio"] == pytest.approx(math.e)
    assert outcome.summary("full", list(full.values()), full)["perplexity"] is None


def test_openings_differ_and_no_family_is_in_both_parts():
    texts = [one for family in FORMS for one in openings(family, 12)]
    assert len(set(texts)) == 12 * len(FORMS) and openings("lists", 12) == openings("lists", 12)
    assert set(CHOOSING) < set(FORMS) and len(FORMS) >= 5


def test_the_other_rules_lower_what_they_say():
    ids = [7, 8, 9, 6] * 3
    logits = torch.zeros(12)
    ladder = Ladder(0.3)
    ladder.act(ids, 0, 12, 20)
    ladder.steer(logits, ids, [2])
    assert not logits.any(), "the first alarm only cuts"
    ladder.act(ids, 0, 20, 20)
    ladder.steer(logits, ids, [2])
    assert logits.nonzero().flatten().tolist() == [7] and logits[7] == -5
    for rule, losses in ((Longest(0.5), {6: 1.5}), (Dry(0.5), {6: 0.8 * 1.75**9})):
        rule.act(ids, 0, 12, 20)
        assert rule.losses([*ids, 7, 8, 9]) == pytest.approx(losses)
    for rule, lost in ((Longest(0.5), -1.5), (Ends(0.5), 0.0)):
        rule.since = 12
        logits = torch.nn.functional.one_hot(torch.tensor(6), 12).float()
        rule.steer(logits, [*ids, 7, 8, 9], [2])
        assert logits[2] == lost
    for method in METHODS:
        if "LoopGuard" in method:
            assert guard_of(method).rewind == (method == "LoopGuard")


def test_the_page_has_the_tables_and_the_examples_of_the_figure():
    result = json.loads((ROOT / "figures/loopguard_remedies.json").read_text())["result"]
    page = (ROOT / "docs/what_to_try.md").read_text()
    assert outcome.pages(result["settings"]) in page and outcome.example_table(result["examples"]) in page
    assert len(result["examples"]) == 10 and result["choosing"] == list(CHOOSING)


class Spelling:
    """A tokenizer whose ids are places in a list of pieces."""

    PIECES = ("the ", "dog ", "c", "at ", "ran. ", "ution ", "I", "'m ")

    def decode(self, ids, skip_special_tokens=False):
        return "".join(self.PIECES[i] for i in ids)


def test_wrong_words_are_counted_at_seams_and_after_the_first_act():
    known = {"", "the", "dog", "cat", "ran", "i'm"}
    full = {
        ("scenes", 0): output(0, [0, 1, 4] * 30, [], 1.0, 1),
        ("scenes", 1): output(1, [0] * 90, [], 1.0, 1, alarm=9),
    }
    wrong = output(0, [0, 1, 2, 5, 4, 0, 1], [[3, 1], [5, 1]], 1.0, 1)
    right = output(1, [6, 7, 4, 0, 2, 3, 4], [[1, 2]], 1.0, 1)
    row = text.summary("LoopGuard", [wrong, right], full, known, Spelling())
    assert (row["seams"], row["wrong_seams"]) == (3, 1), "c|ution is one word; I|'m is right; dog and ran are, too"
    assert (row["unknown"], row["unknown_in"], row["texts"]) == (1, 1, 2)
    own = text.summary("full", list(full.values()), full, known, Spelling())
    assert own["texts"] == 1 and own["distinct"] == pytest.approx(3 / 39), "of the output without an alarm, from 48 on"
    assert text.beside('said, "I', "'m sorry") == ["i'm", "sorry"] and text.beside("a dog. ", "The end") == [
        "dog",
        "the",
    ]
    assert text.distinct([1, 2, 3, 4, 1, 2, 3, 4]) == (4, 5)


def test_the_guards_page_has_the_table_of_openings_that_were_not_chosen_on():
    found = json.loads(text.RESULT.read_text())
    assert found["part"] == "held-out" and text.table(found["rows"]) in (ROOT / "docs/guard.md").read_text()
    forms = [form for forms in (FORMS | WORDS).values() for form in forms]
    assert len(set(forms)) == len(forms), "no form is in two sets"
