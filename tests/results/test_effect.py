"""Effects: when one stands, and how it is said."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sinkscope.results.effect import Effect

SHARES = st.floats(-0.2, 1.2) | st.sampled_from([0.0, 0.4999, 0.5, 0.5001, 1.0])


@pytest.mark.parametrize(
    ("value", "margin", "controls", "stands"),
    [
        (0.9, 0.1, (0.1,), True),
        (0.9, 0.31, (0.1,), False),  # the margin reaches a half
        (0.9, 0.0, (0.1, 0.5), False),  # one control does nearly as much
        (0.45, 0.0, (-0.3,), False),  # a control that does the opposite makes an effect no larger
        (0.9, None, (0.0,), False),  # too few samples
        (-575.0, 0.0, (0.0,), False),  # more is left than the intact model has
    ],
)
def test_an_effect_stands_beyond_its_margin_and_every_control(value, margin, controls, stands):
    assert Effect(value, margin, {f"control {n}": one for n, one in enumerate(controls)}).stands == stands


@given(SHARES, SHARES, SHARES)
def test_a_sentence_has_the_nearest_control_and_tells_shares_apart(value, one, two):
    said = Effect(value, 0.0, {"one copy": one, "other tokens": two}).sentence("It takes {value} ({control}).")
    shown, name, control = re.fullmatch(r"It takes (\S+) \((.*): (\S+)\)\.", said).groups()
    nearest = one if name == "one copy" else two
    assert abs(nearest - value) == min(abs(one - value), abs(two - value))
    assert shown != control or abs(nearest - value) < 2e-3
    assert float(shown[:-1]) / 100 == pytest.approx(value, abs=0.0051) and "-0%" not in said.split()


def test_a_margin_stands_before_the_control():
    said = Effect(0.8, 0.062, {"random places": 0.1}).sentence("It takes {value} ({control}).")
    assert said == "It takes 80% (± 6%; random places: 10%)."
