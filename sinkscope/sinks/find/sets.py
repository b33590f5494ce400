"""The smallest set of neurons that together make a spike, on texts that have it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sinkscope.results.claims import Claims, Outcome, Search
from sinkscope.sinks.find.layer_scan import AS_BEFORE, LayerScan
from sinkscope.sinks.find.left import INTACT, by_chance, claim_of
from sinkscope.sinks.find.places import SPIKE_RATIO
from sinkscope.sinks.removal.components import Neurons, one_by_one
from sinkscope.sinks.removal.effects import side_by_side
from sinkscope.sinks.removal.search import random_sets, smallest_set

NEARLY_ALL = 0.9  # share of the texts in which the spike has to be gone


def causal_set(scan: LayerScan, place: str, candidates: Neurons, seed: int) -> Claims:
    """Claims about the smallest set of neurons that makes a spike, and each of it; none if no set that was tried does.

    Args:
        scan: The model at the places of the spike, which an MLP makes.
        place: The words for these places.
        candidates: The neurons, the most promising first.
        seed: Seed of the random neurons.
    """
    chosen = smallest_set(candidates, partial(removals, scan))
    if chosen is None:
        return ()
    layer = max(scan.layer, *(neuron.layer for neuron in chosen))
    alone = one_by_one(chosen) if len(chosen) > 1 else []
    sets = [chosen, *alone, *random_sets(scan.target, chosen, seed, candidates)]
    (read,) = side_by_side(scan.target, [scan.trial(sets, upto=layer, directions=scan.directions)])
    along = read.along[..., layer]
    left = (along[1:] / along[0]).clamp(min=0)
    contrasts = [INTACT, by_chance(chosen, left[1 + len(alone) :].mean(1))]
    search = Search("neurons", len(candidates))
    outcome, same = Outcome("spike", layers=(layer,)), left.shape[1] < len(scan.ids)  # all texts are one to the place
    claims = [claim_of("makes", chosen, outcome, place, left[0], contrasts, search, exact=same)]
    if claims[0].value >= claims[0].control.value:
        return ()
    for one, kept in zip(alone, left[1:], strict=False):
        claims.append(claim_of("makes alone", one, outcome, place, kept, contrasts, search, exact=same))
    return tuple(claims)


def removals(scan: LayerScan, sets: Sequence[Neurons]) -> list[float | None]:
    """The share of the norm that each set takes where the spike ends; None: the spike is not gone.

    It is gone if, in nearly all texts that have it, the norm is as before it or stands out no more, and half of the
    rise is gone, after the sink layer and after the last layer where the norm stands out.
    """
    layers = [scan.layer, max(scan.spike_layers[-1], scan.stages[-1])]
    typical, before = torch.tensor(scan.typical_norm)[layers], torch.tensor(scan.norm_before)
    (read,) = side_by_side(scan.target, [scan.trial(sets, upto=layers[1])])
    intact, norms = read.norms[0][:, layers], read.norms[1:][..., layers]
    lowest = torch.maximum(SPIKE_RATIO * typical, AS_BEFORE * before)
    stood_out = intact > lowest  # where it did not, nothing can be taken away
    gone = stood_out & (norms <= torch.minimum(lowest, (intact + torch.maximum(typical, before)) / 2))
    enough = gone.sum((1, 2)) >= NEARLY_ALL * stood_out.sum().clamp(min=1)
    drops = (1 - norms / intact)[..., -1].mean(1)
    return [drop if removed else None for drop, removed in zip(drops.tolist(), enough, strict=True)]
