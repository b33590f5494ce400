"""What removals are held against: the intact model, and random neurons of the same layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.results.claims import Contrast
from sinkscope.results.parts import Neuron, sites_of

INTACT = Contrast("intact", 1.0)


def random_neurons(
    target: Target, neurons: Sequence[Neuron], seed: int, number: int = 0, excluded: Sequence[Neuron] = ()
) -> tuple[Neuron, ...]:
    """As many other neurons of the same layers (and experts), none of these or `excluded` if there are enough others.

    Args:
        target: The model.
        neurons: The neurons that are compared with the random ones.
        seed: Seed of the measurement.
        number: Number of the draw, of several beside the same neurons.
        excluded: Other neurons that are not drawn.
    """
    generator = draws(seed, f"neurons beside {sites_of(neurons)}, draw {number}")
    drawn: list[Neuron] = []
    for one in neurons:
        barred, width = {*excluded, *neurons, *drawn}, target.width(one.layer, one.expert)
        beside = [Neuron(one.layer, one.expert, number) for number in range(width)]
        others = [neuron for neuron in beside if neuron not in barred] or beside
        drawn.append(others[int(torch.randint(len(others), (1,), generator=generator))])
    return tuple(drawn)
