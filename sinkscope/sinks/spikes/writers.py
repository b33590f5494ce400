"""Step 3, the writers: what each component and neuron adds along a spike's direction; these shares sum to 1."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.trace.layer_view import (
    columns,
    expert_and_neuron,
    flat_number,
    gain_of,
    neutral_post,
    view_layer,
)
from sinkscope.measure.margin import margin_of
from sinkscope.models.target import NO_INPUTS, LayerInputs, Target
from sinkscope.results.parts import Component, Neuron
from sinkscope.sinks.spikes.components import mixing
from sinkscope.sinks.spikes.spike import Share, Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.tokens import Mask

NAMED = 0.02  # shares of neurons from which they are listed, if an MLP writes at least so much
MOST = 8  # neurons that are listed
OF_A_LAYER = 4  # ... of one layer
ERASES = 0.05  # share that an eraser takes away
ORDINARY_ELEMENTS = 1 << 24  # most activations of ordinary positions that are compared


def writers_of(survey: Survey, spike: Spike) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """Return the shares of the embedding and of each layer's attention and MLP up to the peak.

    The second part is what erases the spike later.
    """
    target, shares = survey.target, list[Share]()

    def share(part: Component, added: Float[Tensor, "text pos d_model"]) -> None:
        along = added @ spike.direction
        beyond = (along[spike.mask] - along[spike.ordinary].mean()) / spike.size
        by_text = spike.per_text(beyond)
        shares.append(Share(part, float(beyond.mean()), margin_of(by_text.numpy())))

    share(Component("token embedding"), survey.entered[0])
    for layer in range(target.n_layers):
        for part in mixing(target, layer):
            share(part, survey.attention_mix(layer))
        if target.has_neurons(layer):
            share(Component("mlp", layer), survey.mlp[layer])
    before = [one for one in shares if _layer(one) <= spike.peak]
    later = [one for one in shares if spike.peak < _layer(one) <= spike.last + 1 and one.share <= -ERASES]
    before.sort(key=lambda one: -abs(one.share))
    later.sort(key=lambda one: one.share)
    return tuple(before), tuple(later)


def _layer(share: Share) -> int:
    return -1 if share.part.layer is None else share.part.layer  # pyright: ignore[reportAttributeAccessIssue]


@torch.no_grad()
def neurons_of(survey: Survey, spike: Spike, writers: tuple[Share, ...]) -> tuple[Share, ...]:
    """Return the neurons that write most along the direction, as shares of the intact spike.

    Args:
        survey: The survey.
        spike: The spike.
        writers: Its components.
    """
    shares, entering = list[Share](), survey.entering()
    for one in writers:
        if isinstance(one.part, Component) and one.part.kind == "mlp" and abs(one.share) >= NAMED:
            shares += of_layer(survey, spike, one.part.layer or 0, entering)
    shares.sort(key=lambda one: -one.share)
    return tuple(shares[:MOST])


def of_layer(
    survey: Survey, spike: Spike, layer: int, entering: LayerInputs = NO_INPUTS, count: int = OF_A_LAYER
) -> list[Share]:
    """Return the neurons of a layer that write most along the direction; under an ablation, those that do so then."""
    target = survey.target
    where = spike.mask | few_ordinary(target, layer, spike.ordinary)
    with target.loaded(layer):
        view = view_layer(target, layer, survey.ids, where, entering)
        projections = (view.post * _projection(target, layer, spike.direction, view)).cpu()
        projections = projections * _scales(target, layer, survey.mlp[layer][where], view.mlp.cpu())
    of_place = spike.mask[where]
    beyond = (projections[of_place] - projections[~of_place].mean(0)) / spike.size
    total = beyond.mean(0)
    shares: list[Share] = []
    for number in total.topk(min(count, len(total))).indices.tolist():
        if float(total[number]) >= NAMED:
            neuron = Neuron(layer, *expert_and_neuron(target, layer, number))
            by_text = spike.per_text(beyond[:, number])
            shares.append(Share(neuron, float(total[number]), margin_of(by_text.numpy())))
    return shares


@torch.no_grad()
def neutral_values(survey: Survey, ordinary: Mask, neurons: Sequence[Neuron]) -> dict[Neuron, float]:
    """Median value of neurons at ordinary positions, which a patch writes; of a routed expert, where it was chosen.

    Args:
        survey: The survey.
        ordinary: The positions.
        neurons: The neurons.
    """
    target, values = survey.target, dict[Neuron, float]()
    for layer in {neuron.layer for neuron in neurons}:
        view = view_layer(target, layer, survey.ids, few_ordinary(target, layer, ordinary), survey.entering())
        for neuron in neurons:
            if neuron.layer == layer:
                values[neuron] = neutral_post(target, view, flat_number(target, layer, neuron.expert, neuron.neuron))
    return values


def few_ordinary(target: Target, layer: int, ordinary: Mask) -> Mask:
    """Return the ordinary positions of as many texts as memory allows."""
    width = target.d_mlp * max(1, target.n_experts(layer))
    some = ordinary.clone()
    if int(some.sum()) * width > ORDINARY_ELEMENTS:
        some[max(1, ORDINARY_ELEMENTS // (width * some.shape[1])) :] = False
    return some


def _projection(target: Target, layer: int, direction: Tensor, view: object) -> Float[Tensor, " neuron"]:
    """What each neuron adds along a direction per unit of its value, before the scale of a norm behind the MLP."""
    post: Tensor = view.post  # pyright: ignore[reportAttributeAccessIssue]
    onto = direction.to(post.device)
    if target.has_part(layer, "post_mlp_norm"):
        onto = onto * gain_of(target, target.sub(layer, "post_mlp_norm")).to(post.device)
    firing = post.any(0).nonzero().flatten()
    projection = torch.zeros(post.shape[1], device=post.device)
    for some in firing.split(1024):
        projection[some] = (columns(target, layer, some) @ onto).float()  # under autocast it is not
    return projection


def _scales(
    target: Target, layer: int, added: Float[Tensor, "n d_model"], mlp: Float[Tensor, "n d_model"]
) -> Float[Tensor, "n 1"]:
    """What the norm behind an MLP multiplies each position with: it is linear once that is known; 1 without a norm.

    Args:
        target: The model.
        layer: The layer.
        added: What the layer adds, after the norm.
        mlp: What the MLP gives, before the norm.
    """
    if not target.has_part(layer, "post_mlp_norm"):
        return torch.ones(len(mlp), 1)
    raw = mlp * gain_of(target, target.sub(layer, "post_mlp_norm")).cpu()
    return ((raw * added).sum(-1) / raw.square().sum(-1).clamp(min=1e-30))[:, None]
