"""Step 3, the writers: what each component and neuron adds along a spike's direction; these shares sum to 1.

Shares only choose candidates for the set that a spike needs. Equal neurons form one unit: their columns are parallel
and their values rise and fall together, as when one neuron is packed as many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.measure.margin import margin_of
from sinkscope.models.arithmetic import product
from sinkscope.models.neurons import (
    HookPoint,
    LayerView,
    columns,
    gain_of,
    heads_point,
    mlp_writers,
    neuron_at,
    neutral_post,
    number_of,
    view_layer,
)
from sinkscope.models.quirks import adds_stream_inside
from sinkscope.models.target import LayerInput, Target
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Component, Head, Neuron
from sinkscope.sinks.spikes.spike import Part, Spike, mean_by_row
from sinkscope.sinks.spikes.survey import MOST_NUMBERS, rows_at_once
from sinkscope.sinks.spikes.tables import Erased, Written
from sinkscope.sinks.thresholds import ERASES, LISTED, NAMED, PARALLEL, TRACE

Unit = tuple[Neuron, ...]
"""Equal neurons of one layer."""


def components_of(spike: Spike) -> tuple[list[Written], list[Erased]]:
    """Return the shares of the embedding, attention and MLPs up to the peak, and those of what erases the spike later.

    The largest share is first.

    Args:
        spike: The spike.
    """
    survey = spike.survey
    mask = spike.place.mask
    peak = spike.peak
    last = spike.layers[1]
    written: list[Written] = []
    erased: list[Erased] = []
    for part in components(survey.target, survey.target.n_layers - 1):
        along = product(survey.added(part), spike.direction)
        layer = part.layer or 0
        beyond = (along[mask] - along[survey.ordinary].mean()) / spike.size
        share = float(beyond.mean())
        mean = Mean(share, margin_of(mean_by_row(beyond, mask)[spike.texts].numpy()), kind="share")
        if layer <= peak and abs(share) >= LISTED:
            written.append(Written(key=part, share=mean))
        if peak < layer <= last + 1 and share <= -ERASES:
            erased.append(Erased(key=part, share=mean))
    return sorted(written, key=by_share), sorted(erased, key=by_share)


def by_share(row: Written) -> float:
    """Return by what components are sorted: the largest share first, for or against a spike."""
    return -abs(row.share.value)


@torch.no_grad()
def writers_of(spike: Spike) -> tuple[dict[Unit, float], dict[Neuron, float]]:
    """Return the candidates: units up to the peak that write 2 % or more of a spike, or against it.

    If passes through the model cannot begin at a later layer, only layers are read whose MLP writes enough.

    Args:
        spike: The spike.

    Returns:
        What each unit writes of the spike, and the median of each neuron at ordinary positions.
    """
    shares = dict[Unit, float]()
    neutral = dict[Neuron, float]()
    target = spike.survey.target
    writing, erasing = components_of(spike)
    large = {row.key for row in (*writing, *erasing) if abs(row.share.value) >= NAMED}
    for layer in target.with_neurons:
        if layer > spike.peak or (not target.skips_layers and Component("mlp", layer) not in large):
            continue
        with target.loaded(layer):
            of_neurons = of_layer(spike, layer, spike.survey.start(layer))
            written = of_neurons.shares.mean(1)
            for numbers in equal_neurons(target, of_neurons, written):
                share = float(written[numbers].sum())
                if abs(share) >= NAMED:
                    unit = list[Neuron]()
                    for number in numbers.tolist():
                        unit.append(neuron_at(target, layer, number))
                        neutral[unit[-1]] = neutral_post(target, of_neurons.view, of_neurons.ordinary, number)
                    shares[tuple(unit)] = share
    return shares, neutral


@dataclass(frozen=True, eq=False)
class LayerShares:
    """What the neurons of a layer add along a spike's direction.

    Attributes:
        shares: At the place, beyond the mean of ordinary positions, as shares of the spike.
        written: What each adds, at all positions that were read.
        view: The layer, at all positions that were read.
        ordinary: Which of these are ordinary.
    """

    shares: Float[Tensor, "neuron case"]
    written: Float[Tensor, "n neuron"]
    view: LayerView
    ordinary: Bool[Tensor, " n"]


def of_layer(spike: Spike, layer: int, start: LayerInput | None = None) -> LayerShares:
    """Return what each neuron of a layer adds along the direction at the place; under an ablation, what it adds then.

    Args:
        spike: The spike.
        layer: The layer.
        start: What the pass starts with.
    """
    survey = spike.survey
    mask = spike.place.mask
    ordinary = survey.ordinary.clone()
    target = survey.target
    width = target.d_mlp * max(1, target.n_experts(layer))
    if int(ordinary.sum()) * width > MOST_NUMBERS:  # ordinary positions of as many texts as memory allows
        ordinary[rows_at_once(ordinary.shape[1], width) :] = False
    where = mask | ordinary
    with target.loaded(layer):
        view = view_layer(target, layer, survey.ids, where, start)
        post = view.post
        gain, scale = writing_of(target, view, survey.mlp[layer][where])
        onto = (spike.direction * gain).to(post.device)
        projection = torch.zeros(post.shape[1], device=post.device)
        for numbers in post.any(0).nonzero().flatten().split(1024):
            projection[numbers] = product(columns(target, layer, numbers), onto).float()
        written = (post * projection).cpu() * scale
    of_place = mask[where]
    beyond = (written[of_place] - written[~of_place].mean(0)) / spike.size
    return LayerShares(beyond.T, written, view, ~of_place)


def equal_neurons(
    target: Target, of_neurons: LayerShares, shares: Float[Tensor, " neuron"]
) -> list[Int[Tensor, " some"]]:
    """Return the numbers of a layer's neurons that write a trace of the spike, equal neurons together (`Unit`).

    Args:
        target: The model.
        of_neurons: What they write.
        shares: What each writes of the spike.
    """
    candidates = (shares.abs() >= TRACE).nonzero().flatten()
    units = list[Tensor]()
    equal = torch.ones(len(candidates), len(candidates), dtype=torch.bool)
    for vectors in (columns(target, of_neurons.view.layer, candidates).cpu(), of_neurons.written.T[candidates]):
        unit = normalize(vectors.float(), dim=1)
        equal &= product(unit, unit.T).abs() >= PARALLEL
    free = torch.ones(len(candidates), dtype=torch.bool)
    for number in range(len(candidates)):
        if free[number]:
            members = equal[number] & free
            members[number] = True
            units.append(candidates[members])
            free &= ~members
    return units


@torch.no_grad()
def shares_on(spike: Spike, neurons: Iterable[Neuron]) -> dict[Neuron, tuple[Mean, float]]:
    """Return what neurons write of a spike in its own texts, and the median of each at ordinary positions.

    Args:
        spike: The spike.
        neurons: The neurons.
    """
    found = dict[Neuron, tuple[Mean, float]]()
    target = spike.survey.target
    for layer, group in groupby(sorted(neurons, key=attrgetter("layer")), attrgetter("layer")):
        of_neurons = of_layer(spike, layer, spike.survey.start(layer))
        for neuron in group:
            number = number_of(target, neuron)
            by_text = mean_by_row(of_neurons.shares[number], spike.place.mask)[spike.texts]
            margin = margin_of(by_text.numpy())
            mean = float(of_neurons.shares[number].mean())
            share = Mean(mean, margin, tuple(by_text.tolist()), "share")
            found[neuron] = share, neutral_post(target, of_neurons.view, of_neurons.ordinary, number)
    return found


def writing_of(
    target: Target, view: LayerView, added: Float[Tensor, "n d_model"]
) -> tuple[Float[Tensor, " d_model"], Float[Tensor, "n 1"]]:
    """Return the factors of each dimension and each position by which what a neuron gives is added.

    A norm behind the MLP is linear once its scale at a position is known.

    Args:
        target: The model.
        view: The layer.
        added: What the MLP adds, after the norm.
    """
    if view.before_norm is None:
        return torch.ones(target.d_model), torch.ones(len(added), 1)
    gain = gain_of(target, target.sub(view.layer, "post_mlp_norm")).cpu()
    raw = view.before_norm.cpu() * (gain * target.adapter.write_factor)
    return gain, ((raw * added).sum(-1) / raw.square().sum(-1).clamp(min=1e-30))[:, None]


# --- components ---


def mixer_of(target: Target, layer: int) -> Any:
    """Return the module of a layer that is neither a norm nor a part of its MLP; None if there is none."""
    paths = [target.paths[layer].get(part) for part in ("mlp", "down", "experts")]
    of_mlp = {path.split(".")[0] for path in paths if path}
    for name, module in target.layers[layer].named_children():
        if name not in of_mlp and any(parameter.dim() > 1 for parameter in module.parameters()):
            return module
    return None


def components(target: Target, last_layer: int) -> list[Component]:
    """Return what writes into the residual stream up to a layer: the embedding, then attention (or mixers) and MLPs."""
    parts = [Component("embedding")]
    for layer in range(last_layer + 1):
        if layer in target.attending:
            parts.append(Component("attention", layer))
        elif mixer_of(target, layer) is not None:
            parts.append(Component("mixer", layer))
        if layer in target.with_neurons:
            parts.append(Component("mlp", layer))
    return parts


def hook_points_of(target: Target, part: Part) -> list[HookPoint]:
    """Return where what a component or a head writes passes; all of these together are what it writes.

    That of an attention layer or an MLP is after a norm behind it.
    """
    layer = part.layer or 0
    if isinstance(part, Head):
        return [heads_point(target, layer, part.head)]
    assert isinstance(part, Component)
    match part.kind:
        case "embedding":  # with the embedding of positions, and scaled, as the first layer gets it
            return [HookPoint(target.layers[0], "pre")]
        case "attention" if "attn_out" in target.paths[layer]:
            modules = [target.sub(layer, "attn_out")]
        case "attention":
            module = target.sub(layer, "attn")
            if adds_stream_inside(module):
                module = target.sub(layer, "o")
            modules = [module]
        case "mixer":
            modules = [mixer_of(target, layer)]
        case _:
            modules = mlp_writers(target, layer)
    return [HookPoint(module) for module in modules]
