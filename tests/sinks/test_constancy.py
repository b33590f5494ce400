"""Why heads read a place: states, values and scores are those of plain hooks, masks and attention."""

from __future__ import annotations

import pytest
import torch
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.sinks.spikes.asked import ordinary_positions
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.find import sinks_of

CAUSES = ("alone",)


@pytest.fixture(scope="module")
def spike(bundled):  # noqa: F811
    return sinks_of(bundled).spikes[0].reported


@pytest.fixture(scope="module")
def found(spike):
    return constancy_of(spike, spike.layers[0], CAUSES, 0)


def positions(spike) -> torch.Tensor:
    """Where an ordinary position was drawn in each text."""
    return ordinary_positions([spike], 0).places[0].int().argmax(1)


def test_where_nothing_makes_another_such_place_nothing_is_said(spike):
    assert constancy_of(spike, spike.layers[0], (), 0) == []
