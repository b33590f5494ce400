"""Claims: their verdict follows from every contrast, and no sentence says more than the verdict."""

from __future__ import annotations

import re

import pytest
from conclusion_kit import contradictions
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.results.claims import NEEDED, NO_DIFFERENCE, Claim, Contrast, Outcome, SearchSpace, percent_pair
from sinkscope.results.parts import Component, Head, Neuron, Tokens

SHARES = st.floats(0, 1.2) | st.sampled_from([0.0, 0.2, 0.4999, 0.5, 0.5001, 0.8, 1.0])
SUBJECTS = ((Neuron(1, None, 3),), (Head(0, 1), Component("token embedding")), (Tokens("copies", 24),))


def claim(value: float, *contrasts: float, subject=SUBJECTS[0], margin: float | None = 0.0, place="'.'") -> Claim:
    kinds = ("intact", "random", "elsewhere")
    made = tuple(Contrast(kind, share) for kind, share in zip(kinds, contrasts, strict=False))
    return Claim("makes", subject, Outcome("spike"), place, value, made, 4, SearchSpace("sets", 9), margin)


@given(SHARES, SHARES, SHARES, st.sampled_from(SUBJECTS), st.none() | st.floats(0, 0.3))
def test_claim_verdict_against_every_contrast(value, intact, random, subject, margin):
    one = claim(value, intact, random, subject=subject, margin=margin)
    said = one.sentence()
    if one.verdict == "needed":
        assert min(intact, random) - value - (margin or 0) >= NEEDED
    if one.verdict == "sufficient":
        assert value - max(intact, random) - (margin or 0) >= NEEDED
    if margin is None:
        assert one.verdict == "undecided"
    elif min(abs(intact - value), abs(random - value)) <= NO_DIFFERENCE:
        assert one.verdict == "not shown"
    assert (" is gone (" in said) == (one.verdict == "needed")
    of_intact = re.search(r"\d% of the spike at .* (is gone|stays) \(", said) is not None
    assert of_intact == (intact >= NEEDED)  # else it is asked what an edit brings
    assert said.endswith(").") and len(one.shortest().split()) <= 30
    assert one.verdict == one.row()["verdict"] and not re.search(r"-0%|nan|\bNone\b", said)


@given(SHARES, SHARES, SHARES)
def test_what_copies_bring_is_said_beside_its_control(value, single, others):
    beside = Contrast("one copy", single), Contrast("other tokens", others)
    outcome = Outcome("norm", gives="reach {} of the norm")
    copies = Claim("repeats", (Tokens("copies", 24),), outcome, "'.'", value, beside, 4, SearchSpace("tokens", 9), 0.0)
    said = copies.sentence()
    assert said.startswith("24 copies of a token reach ") and len(copies.shortest().split()) <= 30
    assert not re.search(r"is gone|stays|is there|It is|-0%", said)
    assert ("9 tokens tried" in said) == (copies.verdict == "not shown")


def test_a_part_without_which_there_is_more_is_not_enough():
    """The norm that later neurons read is divided by what this one writes, so without it they write more."""
    assert claim(576.0, 1.0, 1.0).verdict == "undecided"
    assert claim(0.9, 0.0, 0.1).verdict == "sufficient"  # an intact model without it


def test_opposite_verdicts_about_the_same_are_contradictions():
    needed, nothing = claim(0.0, 1.0, 0.98), claim(0.97, 1.0, 0.98)
    assert contradictions([needed, nothing]) == [(needed, nothing)]
    assert contradictions([needed, claim(0.97, 1.0, 0.98, place="'a'")]) == []
    assert contradictions([needed, claim(0.5, 1.0, 0.98)]) == []


@given(st.floats(-0.2, 1.2), st.floats(-0.2, 1.2))
def test_shares_that_differ_print_differently(share, control):
    texts = percent_pair(share, control)
    assert texts[0] != texts[1] or abs(share - control) < 2e-3


@pytest.mark.parametrize("change", [{"subject": ()}, {"contrasts": (Contrast("intact", 1.0),)}, {"draws": 0}])
def test_a_claim_needs_a_subject_draws_and_two_contrasts(change):
    whole = vars(claim(0.1, 1.0, 0.9))
    with pytest.raises(ValueError, match="needs a subject"):
        Claim(**{**whole, **change})
