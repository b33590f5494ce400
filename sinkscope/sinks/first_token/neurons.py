"""Candidate neurons of the sink, each verified by ablation against random neurons of its layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.models.hooks import on_input
from sinkscope.models.norms import norm_of
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import repeats_until_half
from sinkscope.sinks.first_token.members import Member, Neuron
from sinkscope.sinks.removal.effects import BATCH_ELEMENTS, Edit
from sinkscope.sinks.removal.search import CONTROL_DRAWS
from sinkscope.trace.entering import Entering
from sinkscope.trace.layer_view import (
    LayerView,
    contributions,
    expert_and_neuron,
    neutral_post,
    neutral_up,
    neutral_view,
    view_layer,
)
from sinkscope.trace.run import trace

CAUSAL_DROP = 0.1  # zeroing a causal neuron removes at least this share of the norm
STAGE_CANDIDATES = 2  # candidates of each stage other than the sink layer
FIRST_LENGTH = 128  # repetitions of the first pass; their number doubles


@torch.no_grad()
def repeat_until_half(
    context: SinkContext, tokens: list[int], prefixes: list[int], max_repeats: int, progress: Progress = silent
) -> tuple[list[int | None], dict[int, Entering]]:
    """Run a prefix and n repetitions of each token in one causal pass; n doubles until all tokens become sinks.

    Reading layers from disk costs more than long rows, so a streamed model gets all repetitions in the second pass.

    Args:
        context: The model and its sink layer, whose residual stream is read.
        tokens: The ids to repeat, one row each.
        prefixes: The first token of each row (BOS, or a token that stands in for it).
        max_repeats: Largest n.
        progress: Called after each pass.

    Returns:
        For each token, the first n whose norm reaches half of the spike's, None if never; and what enters the first
        stage up to there, by the place of the token, so that later passes over such a row can begin at this layer.
    """
    target = context.target
    first = min(context.scan.stages)
    begin = context.typical.entering.at(first)
    hidden: list[Tensor] = []
    hooks = []
    if begin is not None:  # else no pass over this model can begin there
        hooks.append((target.layers[first], "pre", on_input(lambda entered: hidden.append(entered.detach().clone()))))
    entering: dict[int, Entering] = {}
    site = f"blocks.{context.layer}.hook_resid_post"
    lengths = [min(FIRST_LENGTH, max_repeats)]
    while lengths[-1] < max_repeats:
        lengths.append(min(2 * lengths[-1], max_repeats))
    if not target.resident:
        lengths = list(dict.fromkeys([lengths[0], lengths[-1]]))
    repeats: list[int | None] = [None] * len(tokens)
    for length in lengths:
        waiting = torch.tensor([place for place, count in enumerate(repeats) if count is None])
        for places in waiting.split(max(1, BATCH_ELEMENTS // ((length + 1) * target.d_mlp))):
            ids = torch.tensor([[prefixes[place], *[tokens[place]] * length] for place in places.tolist()])
            with target.hooks(*hooks):
                norms = trace(target, ids, [site], lambda resid: norm_of(resid, context.scan.shared_dims))[site]
            for row, place in enumerate(places.tolist()):
                half_of = norms[row, 0]
                if bool(context.at.any()):  # the spike is not at the first token, which stands before the repetitions
                    half_of = context.scan.spike_norm[context.layer]
                count = repeats_until_half(norms[row, 1:], half_of)
                repeats[place] = count
                if count is not None and begin is not None:
                    up_to_count = hidden[-1][row : row + 1, : count + 1].clone()  # the rest need not be kept
                    entering[place] = Entering({first: replace(begin, hidden=up_to_count)})
            hidden.clear()
        progress("repetitions", length, max_repeats)
        if None not in repeats:
            break
    return repeats, entering


@torch.no_grad()
def verify_neurons(context: SinkContext, top_k: int) -> tuple[Neuron, ...]:
    """Candidate neurons of the sink layer and of other stages, and the effect of zeroing each at the sink layer.

    Args:
        context: The model and its spike.
        top_k: Number of candidates in the sink layer.

    Returns:
        The neurons of the sink layer, largest contribution first, followed by those of other stages.
    """
    neurons = stage_neurons(context, context.layer, top_k)
    for stage in context.scan.stages:
        if stage != context.layer:
            neurons += stage_neurons(context, stage, STAGE_CANDIDATES, upto=context.layer)
    return neurons


@torch.no_grad()
def stage_neurons(context: SinkContext, stage: int, top_k: int, upto: int = 0) -> tuple[Neuron, ...]:
    """The neurons of a layer that write most at the place, and the effect of zeroing each, beside random ones.

    If an ablation is active, these are the neurons that write most under it.

    Args:
        context: The model and its text.
        stage: The layer.
        top_k: How many neurons to return.
        upto: The layer after which the norm is read, if it is later than `stage`.
    """
    target = context.target
    ids = context.ids[:, : context.up_to_place]
    where = torch.zeros_like(ids, dtype=torch.bool)
    where[torch.arange(len(ids)), context.at] = True
    typical = context.typical
    with target.loaded(stage):
        place = view_layer(target, stage, ids, where, context.entering)
        text = neutral_view(target, stage, typical.ids, typical.entering)
        contribution, rank = contributions(target, place).mean(1)  # a neuron may fire in some of the texts only
        writing = int((contribution > 0).sum())
        top = rank.topk(min(top_k, max(writing, 1))).indices.tolist()
        members = []
        for number in top + _others(context, place, contribution, top):
            members.append(Member(stage, *expert_and_neuron(target, stage, number)))
        drops = context.drops([Edit(zero=(member.site,)) for member in members], max(stage, upto)).tolist()
    control = max(drops[len(top) :], default=0.0)
    mlp_norm = float(place.mlp.norm(dim=-1).median())
    neurons = []
    for number, member, drop in zip(top, members, drops, strict=False):
        norm = float(contribution[number])
        verified = Neuron(
            layer=stage,
            expert=member.expert,
            neuron=member.neuron,
            contribution_norm=norm,
            share=norm / mlp_norm,
            ablation_drop=drop,
            control_drop=control,
            causal=drop > control and drop >= CAUSAL_DROP,
            neutral_post=neutral_post(target, text, number),
            neutral_up=neutral_up(text, number),
        )
        neurons.append(verified)
    return tuple(neurons)


def _others(
    context: SinkContext, place: LayerView, contribution: Float[Tensor, " neuron"], top: list[int]
) -> list[int]:
    """Random neurons that are no candidates; those of an expert that was not chosen give no valid control."""
    spare = torch.ones_like(contribution, dtype=torch.bool)
    if place.routing is not None:
        spare = contribution > 0
    spare[top] = False
    others = spare.nonzero().flatten()
    drawn = [torch.randperm(len(others), generator=context.generator)[:1] for _ in range(CONTROL_DRAWS)]
    return others[torch.cat(drawn).to(others.device)].tolist()
