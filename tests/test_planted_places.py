"""Planted places are where they are said to be: plain hooks on the plain model, and nothing of the package."""

from __future__ import annotations

import pytest
from covering import covering
from organisms.places import untrue
from organisms.planted_places import PLACES, places

FAST = (("alibi", "falcon"), ("half_of_the_heads_each", "gpt2"), ("convolution_marks", "lfm2"))
CASES = covering([(name, family) for name, families in PLACES.items() for family in families], FAST)


@pytest.mark.parametrize(("name", "family"), CASES)
def test_a_planted_model_is_what_it_is_said_to_be(name, family):
    assert untrue(places(name, family)) == []
