"""Step 3, the writers: what each component and neuron adds along a spike's direction; these shares sum to 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from sinkscope.measure.batch import MOST_NUMBERS, rows_at_once
from sinkscope.measure.margin import margin_of
from sinkscope.models.neurons import (
    LayerView,
    columns,
    expert_and_neuron,
    flat_number,
    gain_of,
    neutral_post,
    view_layer,
)
from sinkscope.models.target import LayerInput, Target
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.components import components
from sinkscope.sinks.spikes.controls import Sizes
from sinkscope.sinks.spikes.places import per_text
from sinkscope.sinks.spikes.records import NeuronShare, PartShare, part_name
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import ERASES, LISTED, NAMED, PARALLEL, TRACE
from sinkscope.sinks.tokens import Mask


def writers_of(survey: Survey, spike: Spike) -> tuple[tuple[PartShare, ...], tuple[PartShare, ...]]:
    """Return the shares of the embedding and of each layer's attention and MLP up to the peak.

    The second part is what erases the spike later.
    """
    before, later = list[PartShare](), list[PartShare]()
    for part in components(survey.target, survey.target.n_layers - 1):
        along = survey.added(part) @ spike.direction
        beyond = (along[spike.mask] - along[spike.ordinary].mean()) / spike.size
        margin = margin_of(per_text(beyond, spike.mask).numpy())
        share, layer = PartShare(part_name(part), float(beyond.mean()), margin), part.layer or 0
        if layer <= spike.peak and abs(share.share) >= LISTED:
            before.append(share)
        elif spike.peak < layer <= spike.last + 1 and share.share <= -ERASES:
            later.append(share)
    before.sort(key=lambda one: -abs(one.share))
    later.sort(key=lambda one: one.share)
    return tuple(before), tuple(later)


@torch.no_grad()
def neurons_of(survey: Survey, spike: Spike, writers: Sequence[PartShare]) -> tuple[tuple[NeuronShare, ...], Sizes]:
    """Return every neuron up to the peak that writes along the direction, or against it, the largest share first.

    Neurons of a layer whose columns are parallel count together, because one neuron can be packed as many. The second
    part is what all neurons write. Of a model of which no pass can begin at a later layer, only the layers
    whose MLP writes as much as a neuron has to are read.

    Args:
        survey: The survey.
        spike: The spike.
        writers: Its components.
    """
    found, written = list[NeuronShare](), dict[int, Tensor]()
    of_mlp = {one.part: abs(one.share) for one in writers}
    for layer in filter(survey.target.has_neurons, range(spike.peak + 1)):
        if survey.target.skips_layers or of_mlp.get(f"mlp {layer}", 0.0) >= NAMED:
            with survey.target.loaded(layer):
                shares, view = of_layer(survey, spike, layer, survey.start(layer))
                written[layer] = shares.mean(1)
                numbers = writing(survey.target, layer, written[layer].abs())
            for number in numbers:
                found.append(_share_of(survey, spike, layer, number, shares[number], view))
    return tuple(sorted(found, key=lambda one: -one.share)), written


def writing(target: Target, layer: int, sizes: Float[Tensor, " neuron"]) -> list[int]:
    """Return the neurons of a layer that write enough, alone or together with those whose columns are parallel.

    Args:
        target: The model.
        layer: The layer.
        sizes: What each neuron writes along the direction or against it.
    """
    some = (sizes >= TRACE).nonzero().flatten()
    if not len(some):
        return []
    beside = normalize(columns(target, layer, some).cpu(), dim=1)
    parallel = (beside @ beside.T).abs() >= PARALLEL
    return some[(parallel.float() @ sizes[some]) >= NAMED].tolist()


def of_layer(
    survey: Survey, spike: Spike, layer: int, start: LayerInput | None = None
) -> tuple[Float[Tensor, "neuron case"], LayerView]:
    """Return what each neuron of a layer adds along the direction at the place; under an ablation, what it adds then.

    The second part is the layer at ordinary positions.

    Args:
        survey: The survey.
        spike: The spike.
        layer: The layer.
        start: What the pass starts with.
    """
    target = survey.target
    where = spike.mask | few_ordinary(target, layer, spike.ordinary)
    with target.loaded(layer):
        view = view_layer(target, layer, survey.ids, where, start)
        written = _written(target, view, spike.direction, survey.mlp[layer][where])
    of_place = spike.mask[where]
    beyond = (written[of_place] - written[~of_place].mean(0)) / spike.size
    return beyond.T, view.at(~of_place)


def _share_of(
    survey: Survey, spike: Spike, layer: int, number: int, shares: Float[Tensor, " case"], ordinary: LayerView
) -> NeuronShare:
    """The record of a neuron."""
    margin = margin_of(per_text(shares, spike.mask).numpy())
    expert, neuron = expert_and_neuron(survey.target, layer, number)
    neutral = neutral_post(survey.target, ordinary, number)
    return NeuronShare(layer, expert, neuron, float(shares.mean()), margin, neutral)


@torch.no_grad()
def backups_of(survey: Survey, spike: Spike, neurons: Sequence[Neuron]) -> tuple[NeuronShare, ...]:
    """Return the records of neurons that write when others are gone, with what they write while these stand."""
    found: list[NeuronShare] = []
    for layer in sorted({neuron.layer for neuron in neurons}):
        shares, view = of_layer(survey, spike, layer, survey.start(layer))
        for one in neurons:
            if one.layer == layer:
                number = flat_number(survey.target, layer, one.expert, one.neuron)
                found.append(_share_of(survey, spike, layer, number, shares[number], view))
    return tuple(found)


def few_ordinary(target: Target, layer: int, ordinary: Mask) -> Mask:
    """Return the ordinary positions of as many texts as memory allows."""
    width = target.d_mlp * max(1, target.n_experts(layer))
    some = ordinary.clone()
    if int(some.sum()) * width > MOST_NUMBERS:
        some[rows_at_once(some.shape[1], width) :] = False
    return some


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
    if target.has_part(view.layer, "post_mlp_norm"):
        gain = gain_of(target, target.sub(view.layer, "post_mlp_norm")).to(post.device)
        onto, raw = onto * gain, (view.mlp.to(post.device) * gain).cpu()
        scale = ((raw * added).sum(-1) / raw.square().sum(-1).clamp(min=1e-30))[:, None]
    projection = torch.zeros(post.shape[1], device=post.device)
    for some in post.any(0).nonzero().flatten().split(1024):
        projection[some] = (columns(target, view.layer, some) @ onto).float()  # under autocast it is not
    return (post * projection).cpu() * scale
