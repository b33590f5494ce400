"""The search for the smallest set of components whose removal ends an effect, and random sets to compare one with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

import torch

from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.results.parts import Neuron, sites_of
from sinkscope.sinks.removal.components import Neurons

CONTROL_DRAWS = 20  # random control sets of the same size for every ablation


Members = tuple[Any, ...]
"""A set of components, neurons or parts of a model."""
Remove = Callable[[list[Members]], list[float | None]]
"""Removes each of several sets and says which share of the effect is lost; None: it is not gone."""


def smallest_set(candidates: Sequence[Any], remove: Remove) -> Members | None:
    """Search for the smallest set of candidates whose removal ends an effect; None if no set that was tried does.

    Each candidate, and the first two, three and so on, are removed in one question, because each is a walk through the
    model; from the smallest of these sets that ends the effect, unneeded members are left out.

    Args:
        candidates: Components that may be removed, the most promising first.
        remove: Removes sets.
    """
    sets = [(one,) for one in candidates]
    sets += [tuple(candidates[:size]) for size in range(2, len(candidates) + 1)]
    best, most = None, -inf
    for members, lost in zip(sets, remove(sets), strict=True):
        if lost is not None and (best is None or (len(members) == len(best) and lost > most)):
            best, most = members, lost
    if best is None:
        return None
    return without_unneeded(best, remove)


def without_unneeded(members: Members, remove: Remove) -> Members:
    """Leave out members of a set, one after another, while the removal of the others ends the effect."""
    while len(members) > 1:
        fewer = [members[:i] + members[i + 1 :] for i in range(len(members))]
        most = -inf
        for others, lost in zip(fewer, remove(fewer), strict=True):
            if lost is not None and lost > most:
                members, most = others, lost
        if most == -inf:
            break
    return members


def random_neurons(target: Target, neurons: Neurons, seed: int, number: int = 0, excluded: Neurons = ()) -> Neurons:
    """As many other neurons of the same layers (and experts), none of these or `excluded` if there are enough others.

    Args:
        target: The model.
        neurons: The neurons that are compared with the random ones.
        seed: Seed of the measurement.
        number: Number of the draw, of several beside the same neurons.
        excluded: Other neurons that are not drawn.
    """
    generator = draws(seed, f"neurons beside {sites_of(neurons)}, draw {number}")
    drawn: Neurons = ()
    for one in neurons:
        barred = {
            other.neuron
            for other in (*excluded, *neurons, *drawn)
            if (other.layer, other.expert) == (one.layer, one.expert)
        }
        width = target.width(one.layer, one.expert)
        others = [number for number in range(width) if number not in barred] or range(width)
        chosen = others[int(torch.randint(len(others), (1,), generator=generator))]
        drawn += (Neuron(one.layer, one.expert, chosen),)
    return drawn


def random_sets(target: Target, neurons: Neurons, seed: int, excluded: Neurons = ()) -> list[Neurons]:
    """The random sets that a set is compared with; the arguments are those of `random_neurons`."""
    return [random_neurons(target, neurons, seed, number, excluded) for number in range(CONTROL_DRAWS)]
