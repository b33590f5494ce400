"""Step 3, the writers: what each component and neuron adds along a spike's direction; these shares sum to 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.measure.margin import margin_of
from sinkscope.measure.setup import MOST_NUMBERS, rows_at_once
from sinkscope.models.hooks import LayerInput
from sinkscope.models.neurons import (
    HookPoint,
    LayerView,
    columns,
    expert_and_neuron,
    flat_number,
    gain_of,
    heads_point,
    mlp_writers,
    neutral_post,
    view_layer,
)
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.places import per_text
from sinkscope.sinks.spikes.records import NeuronShare, PartShare
from sinkscope.sinks.spikes.spike import Part, Spike
from sinkscope.sinks.thresholds import ERASES, LISTED, NAMED, PARALLEL, TRACE

Sizes = Mapping[int, Float[Tensor, " neuron"]]
"""What each neuron of a layer writes, by the numbers of a `LayerView`."""


def with_writers(spike: Spike) -> Spike:
    """Add the components and neurons that write a spike, and the components that erase it."""
    writers, erasers = writers_of(spike)
    neurons, written = neurons_of(spike, writers)
    return replace(spike.adding(writers=writers, neurons=neurons, erasers=erasers), written=written)


def writers_of(spike: Spike) -> tuple[tuple[PartShare, ...], tuple[PartShare, ...]]:
    """Return the shares of the embedding, attention and MLPs up to the peak, and those of what erases the spike later.

    Args:
        spike: The spike.
    """
    survey, mask, peak, last = spike.survey, spike.place.mask, spike.result.peak, spike.result.layers[1]
    before, later = list[PartShare](), list[PartShare]()
    for part in components(survey.target, survey.target.n_layers - 1):
        along, layer = survey.added(part) @ spike.direction, part.layer or 0
        beyond = (along[mask] - along[spike.ordinary].mean()) / spike.size
        share = float(beyond.mean())
        writes = layer <= peak and abs(share) >= LISTED
        if writes or (peak < layer <= last + 1 and share <= -ERASES):
            one = PartShare(str(part), share, margin_of(per_text(beyond, mask).numpy()))
            (before if writes else later).append(one)
    before.sort(key=lambda one: -abs(one.share))
    later.sort(key=lambda one: one.share)
    return tuple(before), tuple(later)


@torch.no_grad()
def neurons_of(spike: Spike, writers: Sequence[PartShare]) -> tuple[tuple[NeuronShare, ...], Sizes]:
    """Return every neuron up to the peak that writes along the direction, or against it, and what each neuron writes.

    The largest share comes first. Neurons of a layer whose columns are parallel count together, because one neuron can
    be packed as many. If passes through the model cannot begin at a later layer, only layers are read whose MLP writes
    enough.

    Args:
        spike: The spike.
        writers: Its components.
    """
    found, written, target = list[NeuronShare](), dict[int, Tensor](), spike.survey.target
    of_mlp, skips = {one.part: abs(one.share) for one in writers}, target.skips_layers
    for layer in target.with_neurons:
        if layer > spike.result.peak or (not skips and of_mlp.get(f"mlp {layer}", 0.0) < NAMED):
            continue
        with target.loaded(layer):
            shares, view = of_layer(spike, layer, spike.survey.start(layer))
            written[layer] = shares.mean(1)
            sizes = written[layer].abs()
            some = (sizes >= TRACE).nonzero().flatten()
            beside = normalize(columns(target, layer, some).cpu(), dim=1)
        parallel = (beside @ beside.T).abs() >= PARALLEL
        for number in some[(parallel.float() @ sizes[some]) >= NAMED].tolist():
            found.append(_share_of(spike, layer, number, shares[number], view))
    return tuple(sorted(found, key=lambda one: -one.share)), written


def of_layer(
    spike: Spike, layer: int, start: LayerInput | None = None
) -> tuple[Float[Tensor, "neuron case"], LayerView]:
    """Return what each neuron of a layer adds along the direction at the place, and the layer at ordinary positions.

    Under an ablation, it is what each neuron adds then.

    Args:
        spike: The spike.
        layer: The layer.
        start: What the pass starts with.
    """
    survey, mask, few = spike.survey, spike.place.mask, spike.ordinary.clone()
    target = survey.target
    width = target.d_mlp * max(1, target.n_experts(layer))
    if int(few.sum()) * width > MOST_NUMBERS:  # ordinary positions of as many texts as memory allows
        few[rows_at_once(few.shape[1], width) :] = False
    where = mask | few
    with target.loaded(layer):
        view = view_layer(target, layer, survey.ids, where, start)
        written = _written(target, view, spike.direction, survey.mlp[layer][where])
    of_place = mask[where]
    beyond = (written[of_place] - written[~of_place].mean(0)) / spike.size
    return beyond.T, view.at(~of_place)


def _share_of(
    spike: Spike, layer: int, number: int, shares: Float[Tensor, " case"], ordinary: LayerView
) -> NeuronShare:
    """The record of a neuron."""
    target = spike.survey.target
    margin = margin_of(per_text(shares, spike.place.mask).numpy())
    expert, neuron = expert_and_neuron(target, layer, number)
    neutral = neutral_post(target, ordinary, number)
    return NeuronShare(layer, expert, neuron, float(shares.mean()), margin, neutral)


@torch.no_grad()
def with_backups(spike: Spike, neurons: Sequence[Neuron]) -> Spike:
    """Add neurons that write only when the writers are gone, with what they write while these stand."""
    found, written = list[NeuronShare](), dict(spike.written)
    for layer in sorted({neuron.layer for neuron in neurons}):
        shares, view = of_layer(spike, layer, spike.survey.start(layer))
        written[layer] = shares.mean(1)
        for one in neurons:
            if one.layer == layer:
                number = flat_number(spike.survey.target, layer, one.expert, one.neuron)
                found.append(_share_of(spike, layer, number, shares[number], view))
    return replace(spike.adding(neurons=(*spike.result.neurons, *found), backups=tuple(neurons)), written=written)


def _written(
    target: Target, view: LayerView, direction: Float[Tensor, " d_model"], added: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n neuron"]:
    """What each neuron adds along a direction. A norm behind the MLP is linear once its scale at a position is known.

    Args:
        target: The model.
        view: The layer.
        direction: The direction.
        added: What the MLP adds, after the norm.
    """
    post, onto, scale = view.post, direction.to(view.post.device), torch.ones(len(added), 1)
    if "post_mlp_norm" in target.paths[view.layer]:
        gain = gain_of(target, target.sub(view.layer, "post_mlp_norm")).to(post.device)
        onto, raw = onto * gain, (view.mlp.to(post.device) * gain).cpu()
        scale = ((raw * added).sum(-1) / raw.square().sum(-1).clamp(min=1e-30))[:, None]
    projection = torch.zeros(post.shape[1], device=post.device)
    for some in post.any(0).nonzero().flatten().split(1024):
        projection[some] = (columns(target, view.layer, some) @ onto).float()  # under autocast it is not
    return (post * projection).cpu() * scale


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
        return [heads_point(target, layer, target.head_columns(layer, part.head))]
    assert isinstance(part, Component)
    match part.kind:
        case "embedding":  # with the embedding of positions, and scaled, as the first layer gets it
            return [HookPoint(target.layers[0], "pre")]
        case "attention" if "attn_out" in target.paths[layer]:
            modules = [target.sub(layer, "attn_out")]
        case "attention":
            module = target.sub(layer, "attn")
            original = getattr(module, "original_component", module)  # also below a bridge's wrapper
            if "residual" in signature(original.forward).parameters:  # BLOOM adds the residual stream inside
                module = target.sub(layer, "o")
            modules = [module]
        case "mixer":
            modules = [mixer_of(target, layer)]
        case "mlp" if "post_mlp_norm" in target.paths[layer]:
            modules = [target.sub(layer, "post_mlp_norm")]
        case _:
            modules = mlp_writers(target, layer)
    return [HookPoint(module, "post") for module in modules]
