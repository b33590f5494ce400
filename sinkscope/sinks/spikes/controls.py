"""What removals are held against: the intact model, and random neurons, heads and components."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sinkscope.models.draws import draws, some_of
from sinkscope.models.target import Target
from sinkscope.results.claims import Contrast
from sinkscope.results.parts import Component, Head, Neuron, sites_of
from sinkscope.sinks.spikes.records import Chance
from sinkscope.sinks.spikes.removal import Removal
from sinkscope.sinks.spikes.spike import Parts

INTACT = Contrast("intact", 1.0)
RANDOM_SETS = 3  # random sets beside one that is removed


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


def random_heads(heads: Sequence[Head], among: Sequence[Head], seed: int) -> list[Parts]:
    """As many other heads, three draws; none if there are not as many others.

    Args:
        heads: The heads that are compared with the random ones.
        among: Heads from which is drawn.
        seed: Seed of the measurement.
    """
    others, generator = [head for head in among if head not in heads], draws(seed, "heads beside those that mark")
    if len(others) < len(heads):
        return []
    return [tuple(some_of(others, len(heads), generator)) for _ in range(RANDOM_SETS)]


def random_components(parts: Sequence[Component], needed: Parts) -> list[Parts]:
    """Other components, each alone: of the same kinds as those that are needed, if there are such.

    Everything is computed from the embedding, so it is none of them.
    """
    others = [part for part in parts if part not in needed and part.layer is not None]
    kinds = {part.kind for part in needed if isinstance(part, Component)}
    alike = [part for part in others if part.kind in kinds] or others
    return [(part,) for part in alike[:: max(1, len(alike) // RANDOM_SETS)][:RANDOM_SETS]]


def chance_of(random: Sequence[Removal], removal: Removal) -> Chance | None:
    """Return what is left without random sets, of each outcome the one nearest to that of the set itself."""
    if not random:
        return None
    ratios = [one.perplexity for one in random if one.perplexity is not None]
    nearest = min(ratios, key=lambda ratio: abs(ratio - (removal.perplexity or 1)), default=None)
    heads = min((one.heads for one in random), key=lambda count: abs(count - removal.heads))
    return Chance(min(one.left for one in random), heads, nearest)
