"""Candidate neurons of the sink, each verified by ablation against random neurons of its layer."""

from __future__ import annotations

import torch

from sinkscope.hooks.trace.layer_view import (
    LayerView,
    contributions,
    expert_and_neuron,
    neutral_post,
    neutral_view,
    view_layer,
)
from sinkscope.results.parts import Neuron
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.records import Candidate, Candidates
from sinkscope.sinks.removal.components import one_by_one
from sinkscope.sinks.removal.effects import side_by_side
from sinkscope.sinks.removal.search import random_sets

CAUSAL_DROP = 0.1  # zeroing a causal neuron removes at least this share of the norm
STAGE_CANDIDATES = 2  # candidates of each stage other than the sink layer


def verify_neurons(scan: LayerScan, top_k: int, seed: int) -> Candidates:
    """Candidate neurons of the spike, and the effect of zeroing each after the sink layer.

    Args:
        scan: The model and its spike.
        top_k: Number of candidates of the sink layer.
        seed: Seed of the random neurons.

    Returns:
        The neurons of the sink layer, largest contribution first, followed by those of other stages.
    """
    neurons = stage_neurons(scan, scan.layer, top_k, seed)
    for stage in scan.stages:
        if stage != scan.layer:
            neurons += stage_neurons(scan, stage, STAGE_CANDIDATES, seed, upto=scan.layer)
    return neurons


@torch.no_grad()
def stage_neurons(scan: LayerScan, stage: int, top_k: int, seed: int, upto: int = 0) -> Candidates:
    """The neurons of a layer that write most at the place, and the effect of zeroing each, beside random ones.

    If an ablation is active, these are the neurons that write most under it.

    Args:
        scan: The model and its spike.
        stage: The layer.
        top_k: How many neurons to return.
        seed: Seed of the random neurons.
        upto: The layer after which the norm is read, if it is later than `stage`.
    """
    target, typical = scan.target, scan.typical
    with target.loaded(stage):
        place = _at_places(scan, stage)
        text = neutral_view(target, stage, typical.ids, typical.entering)
        contribution, rank = contributions(target, place).mean(1)  # a neuron may fire in some of the texts only
        writing = int((contribution > 0).sum())
        top = rank.topk(min(top_k, max(writing, 1))).indices.tolist()
        members = tuple(Neuron(stage, *expert_and_neuron(target, stage, number)) for number in top)
        beside = random_sets(target, members[:1], seed, members)
        neutral = [neutral_post(target, text, number) for number in top]
        read = max(stage, upto)
        (edited,) = side_by_side(target, [scan.trial([*one_by_one(members), *beside], upto=read)])
        drops = edited.drops(read).tolist()
    control = max(drops[len(top) :])
    mlp_norm = float(place.mlp.norm(dim=-1).median())
    neurons = []
    for number, member, drop, post in zip(top, members, drops, neutral, strict=False):
        norm = float(contribution[number])
        verified = Candidate(
            layer=stage,
            expert=member.expert,
            neuron=member.neuron,
            contribution_norm=norm,
            share=norm / mlp_norm,
            ablation_drop=drop,
            control_drop=control,
            causal=drop > control and drop >= CAUSAL_DROP,
            neutral_post=post,
        )
        neurons.append(verified)
    return tuple(neurons)


def largest_writer(scan: LayerScan, layer: int) -> Neuron:
    """The neuron of a layer that writes most at the place, of a model in memory; it is not verified."""
    _, rank = contributions(scan.target, _at_places(scan, layer)).mean(1)
    return Neuron(layer, *expert_and_neuron(scan.target, layer, int(rank.argmax())))


def _at_places(scan: LayerScan, layer: int) -> LayerView:
    ids = scan.ids[:, : scan.up_to_place]
    where = torch.zeros_like(ids, dtype=torch.bool)
    where[torch.arange(len(ids)), scan.at] = True
    return view_layer(scan.target, layer, ids, where, scan.entering)
