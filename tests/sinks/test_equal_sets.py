"""Controls that write as much: their order bears the last digits of norms, and none is most of its layer."""

from __future__ import annotations

import pytest
import torch
from test_spikes import bundled  # noqa: F401  (a fixture)

from sinkscope.sinks.spikes import controls
from sinkscope.sinks.spikes.controls import MOST, by_norm, equal_sets
from sinkscope.sinks.spikes.find import sinks_of


def test_the_last_digits_of_norms_decide_no_order():
    """Two machines give norms that differ in the last digits, and one draw of random sets."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.rand(200, generator=generator).sort().values.repeat_interleave(2) + 0.5
    exact = pairs[torch.randperm(400, generator=generator)]  # each norm twice
    noise = 1 + 2e-7 * (torch.rand(400, generator=generator) - 0.5)
    numbers = torch.arange(400)
    order = by_norm(numbers, exact)
    assert torch.equal(by_norm(numbers, exact * noise), order)
    assert not torch.equal((exact * noise).argsort(descending=True, stable=True), order)  # else nothing was asked
    falling = exact[order]
    assert bool((falling[1:] <= falling[:-1] * (1 + controls.DIGITS)).all())


@pytest.mark.parametrize(("most", "enough"), [(MOST, False), (1.0, True)])
def test_two_thirds_of_a_layer_are_the_most_that_is_a_control(bundled, monkeypatch, most, enough):  # noqa: F811
    """The neuron of the model in the package writes more than two thirds of the others."""
    monkeypatch.setattr(controls, "MOST", most)
    sinks, width = sinks_of(bundled), bundled.target.d_mlp
    equal = equal_sets(sinks.survey, sinks.spikes[0].needs.units, set(sinks.spikes[0].needed_neurons), 0)
    assert equal.enough == enough
    busiest, *random = equal.sets
    assert len(busiest) == (int(MOST * width) if not enough else width - 1)
    assert all(len(members) <= most * width for members in random)
    assert not {*sinks.spikes[0].needed_neurons} & {*busiest}
