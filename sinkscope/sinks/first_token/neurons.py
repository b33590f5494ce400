"""Candidate neurons of the sink, each verified by ablation against random neurons of its layer."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.console import Progress, silent
from sinkscope.models.hooks import first_tensor, on_input, on_output
from sinkscope.models.norms import norm_of
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.effects import BATCH_ELEMENTS, Edit, effects
from sinkscope.sinks.first_token.entering import Entering
from sinkscope.sinks.first_token.layer_scan import repeats_until_half
from sinkscope.sinks.first_token.layer_view import (
    LayerView,
    column_norms_behind_the_norm,
    contribution_norms,
    expert_and_neuron,
    lost_without,
    massive_activations,
    neutral_post,
    neutral_up,
    neutral_view,
    view_layer,
)
from sinkscope.sinks.first_token.members import CONTROL_DRAWS, Member, Neuron
from sinkscope.sinks.tokens import TokenRows

CAUSAL_DROP = 0.1  # zeroing a causal neuron removes at least this share of the norm
STAGE_CANDIDATES = 2  # candidates of each stage other than the sink layer
FIRST_LENGTH = 128  # repetitions of the first pass; their number doubles


@dataclass(frozen=True)
class RepeatedSinks:
    """Repeated tokens at the sink layer.

    Attributes:
        repeats: For each token, the first n whose norm reaches half of the spike's. None if never.
        view: The layer at the last repetition of each token that got there. None if no token did.
        entering: For each token that got there, what entered the first stage in the pass that showed it.
    """

    repeats: list[int | None]
    view: LayerView | None
    entering: dict[int, Entering]


@torch.no_grad()
def repeat_until_half(
    context: SinkContext, tokens: list[int], prefixes: list[int], max_repeats: int, progress: Progress = silent
) -> RepeatedSinks:
    """Run a prefix and n repetitions of each token in one causal pass; n doubles until all tokens become sinks.

    Reading layers from disk costs more than long rows, so a streamed model gets all repetitions in the second pass.

    Args:
        context: The model and its sink layer, whose residual stream is read.
        tokens: The ids to repeat, one row each.
        prefixes: The first token of each row (BOS, or a token that stands in for it).
        max_repeats: Largest n.
        progress: Called after each pass.
    """
    target = context.target
    layer = context.layer
    reference = None
    if bool(context.at.any()):  # the spike is not at the first token, which stands before the repetitions
        reference = context.scan.spike_norm[layer]
    first_stage = min([layer, *context.scan.stages])
    repeats: list[int | None] = [None] * len(tokens)
    parts = {}
    entering = {}
    lengths = [min(FIRST_LENGTH, max_repeats)]
    while lengths[-1] < max_repeats:
        lengths.append(min(2 * lengths[-1], max_repeats))
    passes = lengths
    if not target.resident:
        passes = list(dict.fromkeys((lengths[0], lengths[-1])))
    for length in passes:
        waiting = torch.tensor([place for place, count in enumerate(repeats) if count is None])
        ends = lengths[: lengths.index(length) + 1]
        for places in waiting.split(max(1, BATCH_ELEMENTS // ((length + 1) * target.d_mlp))):
            ids = torch.tensor([[prefixes[place], *[tokens[place]] * length] for place in places.tolist()])
            where = torch.zeros_like(ids, dtype=torch.bool)
            where[:, ends] = True
            view, resid, entered = _view_and_stream(context, ids, where, first_stage)
            norms = norm_of(resid, context.scan.shared_dims)
            for row, place in enumerate(places.tolist()):
                count = repeats[place] = repeats_until_half(norms[row, 1:], reference or norms[row, 0])
                if count is not None:
                    at = row * len(ends) + bisect_left(ends, count)
                    parts[place] = [part[at : at + 1] for part in (view.resid, view.mlp, view.post)]
                    entering[place] = entered.part(slice(row, row + 1), length + 1)
        progress("repetitions", length, max_repeats)
        if None not in repeats:
            break
    if not parts:
        return RepeatedSinks(repeats, None, {})
    resid, mlp, post = map(torch.cat, zip(*(parts[place] for place in sorted(parts)), strict=True))
    return RepeatedSinks(repeats, LayerView(layer, resid, mlp, post), entering)


def _view_and_stream(
    context: SinkContext, ids: TokenRows, where: Bool[Tensor, "row pos"], first_stage: int
) -> tuple[LayerView, Float[Tensor, "row pos d_model"], Entering]:
    """The sink layer at some positions, the residual stream after it, and what entered the first stage."""
    target = context.target
    outputs = []
    streams = {}

    def begun(hidden: Tensor) -> None:
        streams[first_stage] = hidden.detach().clone()

    hooks = [(target.layers[context.layer], "post", on_output(outputs.append))]
    if target.skips_layers:
        hooks.append((target.layers[first_stage], "pre", on_input(begun)))
    with target.hooks(*hooks):
        view = view_layer(target, context.layer, ids, where)
    return view, first_tensor(outputs[0]), Entering(streams, isinstance(outputs[0], tuple))


@dataclass(frozen=True)
class VerifiedNeurons:
    """The candidates, and the effect at the sink layer of zeroing all causal ones together.

    Attributes:
        neurons: Neurons of the sink layer, largest contribution first, followed by those of other stages.
        set_drop: Share of the norm that is lost when all causal neurons are zeroed. None if the sink layer has none.
        set_control_drop: Largest drop among random sets of the same number of neurons of the sink layer.
        massive_dims: Massive activations of the place at the sink layer, largest first.
    """

    neurons: tuple[Neuron, ...] = ()
    set_drop: float | None = None
    set_control_drop: float | None = None
    massive_dims: tuple[int, ...] = ()

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)


@torch.no_grad()
def verify_neurons(context: SinkContext, top_k: int, repeated: LayerView | None = None) -> VerifiedNeurons:
    """Candidate neurons of the sink layer and of other stages, and the effect of zeroing them at the sink layer.

    Args:
        context: The model and its spike.
        top_k: Number of candidates in the sink layer.
        repeated: The layer's view at the last repetition of each token that reached half of the spike's norm.
    """
    target = context.target
    layer = context.layer
    scan = context.scan
    verified = verify_sink_layer(context, top_k, repeated)
    others = []
    for stage in scan.stages:
        if stage != layer:
            others += stage_neurons(context, stage, STAGE_CANDIDATES, upto=layer)
    verified = replace(verified, neurons=(*verified.neurons, *others))
    if any(neuron.causal and neuron.layer < layer for neuron in others):
        together = Edit(zero=tuple(neuron.site for neuron in verified.causal))
        ids = context.ids[:, : context.up_to_place]
        entering = context.entering.part(slice(None), context.up_to_place)
        edited = effects(
            target, ids, [together], at=context.at, upto=layer, without=scan.shared_dims, entering=entering
        )
        verified = replace(verified, set_drop=float(edited.drops(layer)))
    return verified


@torch.no_grad()
def stage_neurons(
    context: SinkContext,
    stage: int,
    top_k: int,
    *,
    upto: int | None = None,
) -> tuple[Neuron, ...]:
    """The neurons of a layer that write most at the place, and the effect of zeroing each.

    If an ablation is active, these are the neurons that write most under it.

    Args:
        context: The model and its text.
        stage: The layer.
        top_k: How many neurons to return.
        upto: The layer after which the norm is read, if it is later than `stage`.
    """
    target = context.target
    candidates = _candidates(context, stage, min(top_k, target.d_mlp // 2))
    spare = candidates.others(writing=True)
    drawn = spare[torch.randperm(len(spare), generator=context.generator)[:CONTROL_DRAWS]]
    numbers = [*candidates.top.tolist(), *drawn.tolist()]
    edits = [Edit(zero=(Member(stage, *expert_and_neuron(target, stage, number)).site,)) for number in numbers]
    read_after = stage if upto is None else max(stage, upto)
    at = int(context.at[0])
    entering = context.entering.part(slice(1), at + 1)
    edited = effects(target, context.ids[:1, : at + 1], edits, at=at, upto=read_after, entering=entering)
    drops = edited.drops(read_after).tolist()
    count = len(candidates.top)
    return candidates.verified(context, drops[:count], None, control=max(drops[count:], default=0.0))


@dataclass(frozen=True)
class _Candidates:
    """The neurons of a layer that write most at a position.

    Attributes:
        first: The layer at this position.
        text: The layer on typical text.
        contribution: Norm of what each neuron of the layer writes at the position.
        top: Numbers of the candidates in a `LayerView`.
    """

    first: LayerView
    text: LayerView
    contribution: Float[Tensor, " neuron"]
    top: Int[Tensor, " k"]

    def others(self, *, writing: bool) -> Int[Tensor, " n"]:
        """The neurons that are no candidates; with `writing`, only those that write anything at the position."""
        spare = torch.ones_like(self.contribution, dtype=torch.bool)
        if writing:
            spare = self.contribution > 0
        spare[self.top] = False
        return spare.nonzero().flatten().cpu()

    def verified(
        self, context: SinkContext, drops: list[float], repeat_drops: list[float] | None, control: float
    ) -> tuple[Neuron, ...]:
        """The candidates with the effect of zeroing each, and of the random neurons that had the largest effect."""
        mlp_norm = float(self.first.mlp.norm(dim=-1).median())
        neurons = []
        for place, number in enumerate(self.top.tolist()):
            expert, neuron = expert_and_neuron(context.target, self.first.layer, number)
            contribution = float(self.contribution[number])
            verified = Neuron(
                layer=self.first.layer,
                expert=expert,
                neuron=neuron,
                contribution_norm=contribution,
                share=contribution / mlp_norm,
                ablation_drop=drops[place],
                repeat_drop=None if repeat_drops is None else repeat_drops[place],
                control_drop=control,
                causal=drops[place] > control and drops[place] >= CAUSAL_DROP,
                neutral_post=neutral_post(context.target, self.text, number),
                neutral_up=neutral_up(self.text, number),
            )
            neurons.append(verified)
        return tuple(neurons)


def _candidates(context: SinkContext, layer: int, top_k: int) -> _Candidates:
    target = context.target
    ids = context.ids[:, : context.up_to_place]
    where = torch.zeros_like(ids, dtype=torch.bool)
    where[torch.arange(len(ids)), context.at] = True
    entering = context.entering
    with target.loaded(layer):
        first = view_layer(target, layer, ids, where, entering.part(slice(None), ids.shape[1]).at(layer))
        contribution = contribution_norms(target, first).mean(0)  # a neuron may fire in some of the texts only
        rank = contribution
        if target.has_part(layer, target.adapter.post_mlp_norm):
            # The gain of the norm behind the MLP (Gemma 2, OLMo 2) can pass one residual dimension and suppress
            # others, and a neuron that writes mostly into suppressed dimensions makes no spike.
            rank = first.post.abs().mean(0) * column_norms_behind_the_norm(target, layer)
        writing = int((contribution > 0).sum())
        top = rank.topk(min(top_k, max(writing, 1))).indices
        neutral = neutral_view(target, layer, context.typical_ids, context.typical_entering)
        return _Candidates(first, neutral, contribution, top)


def verify_sink_layer(context: SinkContext, top_k: int, repeated: LayerView | None = None) -> VerifiedNeurons:
    """Candidate neurons of the sink layer alone, without a forward pass for each ablation (see `verify_neurons`)."""
    target = context.target
    layer = context.layer
    shared_dims = context.scan.shared_dims
    candidates = _candidates(context, layer, top_k)
    first = candidates.first
    top = candidates.top
    everywhere = torch.cat([first.resid, candidates.text.resid])
    massive_dims = massive_activations(first.resid.median(0).values, everywhere, shared_dims)
    # An expert that was not chosen gives no valid control.
    spare = candidates.others(writing=first.routing is not None)

    def draw(size: int) -> Int[Tensor, "draw k"]:
        draws = [torch.randperm(len(spare), generator=context.generator)[:size] for _ in range(CONTROL_DRAWS)]
        return spare[torch.stack(draws)].to(top.device)

    def lost(sets: Int[Tensor, "draw k"], view: LayerView = first) -> Float[Tensor, " draw"]:
        return lost_without(target, view, sets, shared_dims)

    with target.loaded(layer):
        drawn = draw(1)
        single = top[:, None]
        repeat_drops = None
        control = float(lost(drawn).max())
        if repeated is not None:
            control = max(control, float(lost(drawn, repeated).max()))
            repeat_drops = lost(single, repeated).tolist()
        neurons = candidates.verified(context, lost(single).tolist(), repeat_drops, control)
        causal = top[torch.tensor([neuron.causal for neuron in neurons], device=top.device)]
        if not len(causal):
            return VerifiedNeurons(neurons, massive_dims=massive_dims)
        set_drop, set_control_drop = float(lost(causal[None])), float(lost(draw(len(causal))).max())
        return VerifiedNeurons(neurons, set_drop, set_control_drop, massive_dims)
