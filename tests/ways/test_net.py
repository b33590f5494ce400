"""The part of the net that runs in the suite: draws in which all pairs of values meet, and mended causes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from .__main__ import walk
from .draws import cover, draw_of, text_of
from .edits import EDITS
from .known import MENDED
from .promises import check

pytestmark = pytest.mark.filterwarnings("ignore")
COVER = list(enumerate(cover({})))


@pytest.mark.parametrize(("seed", "draw"), COVER, ids=[text_of(draw) for _, draw in COVER])
def test_all_pairs(seed, draw):
    said = check(draw, seed)
    assert said is None, f"{said} | {text_of(draw)}"


@pytest.mark.parametrize("name", MENDED)
def test_a_mended_cause_stays_mended(name):
    assert check(MENDED[name], 1) is None


def test_what_rounding_excuses_can_still_fail(monkeypatch):
    """Beams of equal scores may be ranked in two ways."""
    draw = draw_of(family="neox", edit="knock first", cache="generate", options="beams", mode="autocast")
    monkeypatch.setitem(EDITS, draw["edit"], replace(EDITS[draw["edit"]], make=list))
    assert (check(draw, 2) or "").startswith("right: o")


def test_experts_that_rounding_ranks_in_two_ways_are_excused_and_an_edit_that_does_nothing_is_not(monkeypatch):
    draw = draw_of(family="mixtral", length=600, edit="knock first|guard")
    assert check(draw, 1581) is None
    monkeypatch.setitem(EDITS, draw["edit"], replace(EDITS[draw["edit"]], make=list))
    assert (check(draw, 1581) or "").startswith("right: o")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_minutes_of_draws(seed):
    assert walk(300, seed, {}) == 0
