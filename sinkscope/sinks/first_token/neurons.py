"""Candidate neurons of the sink, each verified by ablation against random neurons of its layer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.models.hooks import first_tensor, on_input, on_output
from sinkscope.models.norms import norm_of
from sinkscope.models.target import LayerInput
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.effects import BATCH_ELEMENTS, Edit
from sinkscope.sinks.first_token.entering import Entering
from sinkscope.sinks.first_token.layer_scan import repeats_until_half
from sinkscope.sinks.first_token.layer_view import (
    LayerView,
    contribution_norms,
    expert_and_neuron,
    lost_without,
    massive_activations,
    neutral_post,
    neutral_up,
    neutral_view,
    ranks,
    view_layer,
)
from sinkscope.sinks.first_token.members import CONTROL_DRAWS, Member, Neuron, sites_of

CAUSAL_DROP = 0.1  # zeroing a causal neuron removes at least this share of the norm
STAGE_CANDIDATES = 2  # candidates of each stage other than the sink layer
FIRST_LENGTH = 128  # repetitions of the first pass; their number doubles


LastRepetition = tuple[LayerView, int]
"""A layer at some positions, and the number of the one that is looked at."""


# --- repeated tokens -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RepeatedSinks:
    """Repeated tokens at the sink layer.

    Attributes:
        repeats: For each token, the first n whose norm reaches half of the spike's. None if never.
        views: The layer at some repetitions, and which is the last of them, for each token that got there.
        entering: For each token that got there, what entered the first stage in the pass that showed it.
    """

    repeats: list[int | None]
    views: list[LastRepetition]
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
    first_stage = min([layer, *context.scan.stages])
    lengths = [min(FIRST_LENGTH, max_repeats)]
    while lengths[-1] < max_repeats:
        lengths.append(min(2 * lengths[-1], max_repeats))
    repeats: list[int | None] = [None] * len(tokens)
    views = {}
    entering = {}
    outputs = []
    entered = []
    hooks = [(target.layers[layer], "post", on_output(outputs.append))]
    if target.skips_layers:
        hooks.append((target.layers[first_stage], "pre", on_input(lambda hidden: entered.append(hidden.clone()))))
    for length in lengths:
        if not target.resident and length not in (lengths[0], lengths[-1]):
            continue
        waiting = torch.tensor([place for place, count in enumerate(repeats) if count is None])
        ends = lengths[: lengths.index(length) + 1]
        for places in waiting.split(max(1, BATCH_ELEMENTS // ((length + 1) * target.d_mlp))):
            ids = torch.tensor([[prefixes[place], *[tokens[place]] * length] for place in places.tolist()])
            where = torch.zeros_like(ids, dtype=torch.bool)
            where[:, ends] = True
            with target.hooks(*hooks):
                view = view_layer(target, layer, ids, where)
            output = outputs.pop()
            norms = norm_of(first_tensor(output), context.scan.shared_dims)
            inputs = Entering()
            if entered:
                inputs = Entering({first_stage: LayerInput(first_stage, entered.pop(), isinstance(output, tuple))})
            for row, place in enumerate(places.tolist()):
                half_of = norms[row, 0]
                if bool(context.at.any()):  # the spike is not at the first token, which stands before the repetitions
                    half_of = context.scan.spike_norm[layer]
                count = repeats[place] = repeats_until_half(norms[row, 1:], half_of)
                if count is not None:
                    views[place] = (view, row * len(ends) + bisect_left(ends, count))
                    entering[place] = inputs.part(slice(row, row + 1), length + 1)
        progress("repetitions", length, max_repeats)
        if None not in repeats:
            break
    return RepeatedSinks(repeats, [views[place] for place in sorted(views)], entering)


# --- candidates ------------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True)
class _Candidates:
    """The neurons of a layer that write most at the place.

    Attributes:
        context: The model and its text.
        place: The layer at the place.
        text: The layer on typical text.
        contribution: Norm of what each neuron of the layer writes at the place.
        top: Numbers of the candidates in a `LayerView`.
    """

    context: SinkContext
    place: LayerView
    text: LayerView
    contribution: Float[Tensor, " neuron"]
    top: Int[Tensor, " k"]

    @classmethod
    def of(cls, context: SinkContext, layer: int, top_k: int) -> _Candidates:
        target = context.target
        ids = context.ids[:, : context.up_to_place]
        where = torch.zeros_like(ids, dtype=torch.bool)
        where[torch.arange(len(ids)), context.at] = True
        entering = context.entering.part(slice(None), ids.shape[1])
        typical = context.typical
        with target.loaded(layer):
            place = view_layer(target, layer, ids, where, entering.at(layer))
            contribution = contribution_norms(target, place).mean(0)  # a neuron may fire in some of the texts only
            rank = ranks(target, place).mean(0)
            writing = int((contribution > 0).sum())
            top = rank.topk(min(top_k, max(writing, 1))).indices
            return cls(context, place, neutral_view(target, layer, typical.ids, typical.entering), contribution, top)

    def draw(self, size: int) -> Int[Tensor, "draw k"]:
        """Random sets of other neurons; those of an expert that was not chosen give no valid control."""
        spare = torch.ones_like(self.contribution, dtype=torch.bool)
        if self.place.routing is not None:
            spare = self.contribution > 0
        spare[self.top] = False
        spare = spare.nonzero().flatten()
        draws = [torch.randperm(len(spare), generator=self.context.generator)[:size] for _ in range(CONTROL_DRAWS)]
        return spare[torch.stack(draws).to(spare.device)]

    def lost(self, sets: Int[Tensor, "draw k"], upto: int | None = None) -> Float[Tensor, " draw"]:
        """Share of the norm that is lost without each set, after the layer or a later one."""
        target = self.context.target
        layer = self.place.layer
        if upto is None or upto <= layer:
            return lost_without(target, self.place, sets, self.context.scan.shared_dims).mean(1)
        edits = []
        for numbers in sets.tolist():
            edits.append(
                Edit(zero=sites_of([Member(layer, *expert_and_neuron(target, layer, one)) for one in numbers]))
            )
        return self.context.drops(edits, upto)

    def verified(self, upto: int | None = None, repeated: Sequence[LastRepetition] = ()) -> tuple[Neuron, ...]:
        """The candidates with the effect of zeroing each, and of the random neuron that had the largest effect.

        Args:
            upto: The layer after which the norm is read, if it is a later one.
            repeated: The layer at repeated tokens, where the effect is read as well.
        """
        target = self.context.target
        layer = self.place.layer
        without = self.context.scan.shared_dims
        count = len(self.top)
        single = torch.cat([self.top[:, None], self.draw(1)])
        drops = self.lost(single, upto).tolist()
        control = max(drops[count:], default=0.0)
        repeat_drops = [None] * count
        if repeated:
            lost = [lost_without(target, view, single, without)[:, at] for view, at in repeated]
            repeat_drops = torch.stack(lost).mean(0).tolist()
            control = max(control, *repeat_drops[count:])
        mlp_norm = float(self.place.mlp.norm(dim=-1).median())
        neurons = []
        for rank, number in enumerate(self.top.tolist()):
            contribution = float(self.contribution[number])
            expert, neuron = expert_and_neuron(target, layer, number)
            verified = Neuron(
                layer=layer,
                expert=expert,
                neuron=neuron,
                contribution_norm=contribution,
                share=contribution / mlp_norm,
                ablation_drop=drops[rank],
                repeat_drop=repeat_drops[rank],
                control_drop=control,
                causal=drops[rank] > control and drops[rank] >= CAUSAL_DROP,
                neutral_post=neutral_post(target, self.text, number),
                neutral_up=neutral_up(self.text, number),
            )
            neurons.append(verified)
        return tuple(neurons)


@torch.no_grad()
def verify_neurons(context: SinkContext, top_k: int, repeated: Sequence[LastRepetition] = ()) -> VerifiedNeurons:
    """Candidate neurons of the sink layer and of other stages, and the effect of zeroing them at the sink layer.

    Neurons of the sink layer need no forward pass for each ablation.

    Args:
        context: The model and its spike.
        top_k: Number of candidates in the sink layer.
        repeated: The layer at the last repetition of each token that reached half of the spike's norm.
    """
    target = context.target
    layer = context.layer
    shared_dims = context.scan.shared_dims
    candidates = _Candidates.of(context, layer, top_k)
    place = candidates.place
    everywhere = torch.cat([place.resid, candidates.text.resid])
    massive_dims = massive_activations(place.resid.median(0).values, everywhere, shared_dims)
    with target.loaded(layer):
        neurons = candidates.verified(repeated=repeated)
        verified = VerifiedNeurons(neurons, massive_dims=massive_dims)
        causal = candidates.top[[neuron.causal for neuron in neurons]]
        if len(causal):
            control = float(candidates.lost(candidates.draw(len(causal))).max())
            verified = replace(verified, set_drop=float(candidates.lost(causal[None])), set_control_drop=control)
    others = []
    for stage in context.scan.stages:
        if stage != layer:
            others += stage_neurons(context, stage, STAGE_CANDIDATES, upto=layer)
    verified = replace(verified, neurons=(*neurons, *others))
    if any(neuron.causal and neuron.layer < layer for neuron in others):
        together = Edit(zero=sites_of(verified.causal))
        verified = replace(verified, set_drop=float(context.drops([together], layer)))
    return verified


@torch.no_grad()
def stage_neurons(context: SinkContext, stage: int, top_k: int, *, upto: int | None = None) -> tuple[Neuron, ...]:
    """The neurons of a layer that write most at the place, and the effect of zeroing each.

    If an ablation is active, these are the neurons that write most under it.

    Args:
        context: The model and its text.
        stage: The layer.
        top_k: How many neurons to return.
        upto: The layer after which the norm is read, if it is later than `stage`.
    """
    candidates = _Candidates.of(context, stage, min(top_k, context.target.d_mlp // 2))
    with context.target.loaded(stage):
        return candidates.verified(upto)
