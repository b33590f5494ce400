"""The part of the net that runs in the suite: draws in which all pairs of values meet, and mended causes."""

from __future__ import annotations

from dataclasses import replace

import placed
import pytest

from . import promises
from .__main__ import walk
from .draws import cover, draw_of, text_of
from .edits import EDITS
from .families import LAYERS, model_of
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


@pytest.mark.parametrize("cache", ["reordered", "conversation"])
def test_a_draw_can_be_asked_of_another_device(cache, monkeypatch):
    """The device does not exist, but an operation that mixes its tensors with a CPU's fails, as it would."""

    def moved(family, dtype, ends, device):
        model = model_of(family, dtype, ends)
        placed.spread(model, [device] * LAYERS)
        return model

    monkeypatch.setattr(promises, "model_of", moved)
    rows = 1 if cache == "conversation" else 2
    with placed.places():
        assert check(draw_of(cache=cache, edit="zero", rows=rows, device="ipu:0"), 1) is None


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2])
def test_ten_minutes_of_draws(seed):
    assert walk(300, seed, {}) == 0
