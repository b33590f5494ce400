"""After how many repetitions a token becomes a sink, and what makes its spike then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.hooks.trace.run import trace
from sinkscope.measure.evidence import NEEDED
from sinkscope.models.hooks import on_input
from sinkscope.models.norms import norm_of
from sinkscope.models.target import NOT_READ, Entering
from sinkscope.sinks.find.context import SinkContext
from sinkscope.sinks.find.records import RepeatedToken, RepeatsNeeded, RepetitionSpike
from sinkscope.sinks.find.sets import CausalSets, causal_sets
from sinkscope.sinks.removal.components import Edit, Sites
from sinkscope.sinks.removal.effects import effects
from sinkscope.sinks.removal.rows import BATCH_ELEMENTS

FIRST_LENGTH = 128  # repetitions of the first pass; their number doubles


def repeats_until_half(norms: Float[Tensor, " repetition"], first: float | Tensor) -> int | None:
    """The first number of repetitions whose norm reaches half of the first token's; None if it never does."""
    reached = (norms >= first / 2).nonzero().flatten()
    if not len(reached):
        return None
    return int(reached[0]) + 1


@torch.no_grad()
def repeat_until_half(
    context: SinkContext, tokens: Sequence[int], prefixes: Sequence[int], limit: int, progress: Progress = silent
) -> tuple[RepeatsNeeded, dict[int, Entering]]:
    """Run a prefix and n repetitions of each token in one causal pass; n doubles until all tokens become sinks.

    Reading layers from disk costs more than long rows, so a streamed model gets all repetitions in the second pass.

    Args:
        context: The model and its sink layer, whose residual stream is read.
        tokens: The ids to repeat, one row each.
        prefixes: The first token of each row (BOS, or a token that stands in for it).
        limit: Largest n.
        progress: Called after each pass.

    Returns:
        For each token, the first n whose norm reaches half of the spike's; and what enters the first stage up to there,
        by the place of the token, so that later passes over such a row can begin at this layer.
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
    lengths = [min(FIRST_LENGTH, limit)]
    while lengths[-1] < limit:
        lengths.append(min(2 * lengths[-1], limit))
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
        progress("repetitions", length, limit)
        if None not in repeats:
            break
    rows = []
    for token, count in zip(tokens, repeats, strict=True):
        rows.append(RepeatedToken(target.tokenizer.decode([token]), token, count))
    by_repetition = [count for count in repeats if count is not None and count > 1]  # the others are sinks already
    middle = float(median(by_repetition)) if by_repetition else None
    return RepeatsNeeded(tuple(rows), middle, repeats.count(None), limit), entering


@torch.no_grad()
def repetition_spike(
    context: SinkContext,
    needed: RepeatsNeeded,
    prefixes: Sequence[int],
    entering: Mapping[int, Entering],
    sites: Sites,
) -> RepetitionSpike | None:
    """Whether the neurons that make a spike make that of a repeated token, too, or which others do.

    Args:
        context: The model at the places of the spike.
        needed: The repeated tokens, and when the norm of each reaches half of the spike's at the sink layer.
        prefixes: The token before each.
        entering: What entered the first stage up to there, by the place of the token.
        sites: The neurons that make the spike, all its parts.

    Returns:
        None if no repeated token's norm stands out.
    """
    repeats = [token.repeats for token in needed.tokens]
    places = [place for place, count in enumerate(repeats) if count != 1]  # others need no repetition
    reached = [place for place in places if repeats[place] is not None][:1]
    rows = []
    for place in reached or places:
        rows.append([prefixes[place], *[needed.tokens[place].id] * (repeats[place] or needed.max_repeats)])
    if not rows:
        return None
    ids = torch.tensor(rows)
    last = torch.full((len(ids),), ids.shape[1] - 1)
    layers = context.scan.spike_layers  # perhaps the repeated token's norm stands out after the sink layer
    begun = NOT_READ
    if reached:
        layers = [max(context.layer, *(site[0] for site in sites))]
        begun = entering.get(reached[0], NOT_READ)
    reading = {"upto": layers[-1], "without": context.scan.shared_dims, "entering": begun}
    edited = effects(context.target, ids, [Edit(zero=sites)], at=last, **reading)
    heights = edited.intact_norms[:, layers] / torch.tensor(context.scan.spike_norm)[layers]
    if float(heights.max()) < NEEDED:
        return None
    row = int(heights.max(1).values.argmax())
    layer = layers[int(heights[row].argmax())]
    drop = float(1 - edited.norms[0, row, layer] / edited.intact_norms[row, layer])
    token = context.target.tokenizer.decode([int(ids[row, -1])])
    own = CausalSets()
    if drop < NEEDED:
        own = causal_sets(context.elsewhere(ids[row : row + 1], last[:1], layers[-1]))
    return RepetitionSpike(token, int(last[0]), drop, own.minimal, own.members)
