"""After how many repetitions a token becomes a sink, and what makes its spike then."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.progress import Progress, silent
from sinkscope.hooks.trace.run import trace
from sinkscope.models.draws import draws
from sinkscope.models.norms import norm_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.parts import Tokens, neurons_of
from sinkscope.sinks.find.records import RepeatedToken, RepeatsNeeded, RepetitionSpike
from sinkscope.sinks.find.sets import CausalSets, causal_sets
from sinkscope.sinks.find.survey import SinkContext
from sinkscope.sinks.removal.components import Sites, silencing
from sinkscope.sinks.removal.effects import side_by_side
from sinkscope.sinks.removal.rows import BATCH_ELEMENTS, Trial
from sinkscope.sinks.removal.search import random_sites

RANDOM = 3  # sets of random neurons beside those that make the spike
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
) -> RepeatsNeeded:
    """Run a prefix and n repetitions of each token in one causal pass; n doubles until all tokens become sinks.

    Reading layers from disk costs more than long rows, so a streamed model gets all repetitions in the second pass.

    Args:
        context: The model and its sink layer, whose residual stream is read.
        tokens: The ids to repeat, one row each.
        prefixes: The first token of each row (BOS, or a token that stands in for it).
        limit: Largest n.
        progress: Called after each pass.

    Returns:
        For each token, the first n whose norm reaches half of the spike's.
    """
    target = context.target
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
            norms = trace(target, ids, [site], lambda resid: norm_of(resid, context.scan.shared_dims))[site]
            for row, place in enumerate(places.tolist()):
                half_of = norms[row, 0]
                if bool(context.at.any()):  # the spike is not at the first token, which stands before the repetitions
                    half_of = context.scan.spike_norm[context.layer]
                repeats[place] = repeats_until_half(norms[row, 1:], half_of)
        progress("repetitions", length, limit)
        if None not in repeats:
            break
    rows = []
    for token, count in zip(tokens, repeats, strict=True):
        rows.append(RepeatedToken(target.tokenizer.decode([token]), token, count))
    by_repetition = [count for count in repeats if count is not None and count > 1]  # the others are sinks already
    middle = float(median(by_repetition)) if by_repetition else None
    return RepeatsNeeded(tuple(rows), middle, repeats.count(None), limit)


@torch.no_grad()
def repetition_spike(
    context: SinkContext,
    needed: RepeatsNeeded,
    prefixes: Sequence[int],
    sites: Sites,
    times: int = 2,
) -> RepetitionSpike | None:
    """Whether the neurons that make a spike make that of a repeated token, too, or which others do.

    Args:
        context: The model at the places of the spike.
        needed: The repeated tokens, and when the norm of each reaches half of the spike's at the sink layer.
        prefixes: The token before each.
        sites: The neurons that make the spike, all its parts.
        times: How many times as many copies as the token needs are looked at: more than 1 is well inside the sink.

    Returns:
        None if no repeated token's norm stands out.
    """
    repeats = [token.repeats for token in needed.tokens]
    places = [place for place, count in enumerate(repeats) if count != 1]  # others need no repetition
    reached = [place for place in places if repeats[place] is not None][:1]
    rows = []
    for place in reached or places:
        copies = min(times * (repeats[place] or needed.max_repeats), needed.max_repeats)
        rows.append([prefixes[place], *[needed.tokens[place].id] * copies])
    if not rows:
        return None
    ids, beside = torch.tensor(rows), torch.tensor(_contrasts(context, rows))
    last = ids.shape[1] - 1
    layers = context.scan.spike_layers  # perhaps the repeated token's norm stands out after the sink layer
    if reached:
        layers = [max(context.layer, *(site[0] for site in sites))]
    reading: dict[str, Any] = {"at": last, "upto": layers[-1], "without": context.scan.shared_dims}
    drawn = [
        random_sites(context.target, sites, sites, context.seed, number) for number in range(RANDOM if sites else 0)
    ]
    trials = [Trial(ids, silencing([sites, *drawn]), **reading), Trial(beside, [], **reading)]
    edited, contrasts = side_by_side(context.target, trials)
    spike = torch.tensor(context.scan.spike_norm)[layers]
    heights = edited.intact_norms[:, layers] / spike
    if float(heights.max()) < NEEDED and reached and times > 1:  # it is no sink any more
        return repetition_spike(context, needed, prefixes, sites, times=1)
    if float(heights.max()) < NEEDED:
        return None
    row = int(heights.max(1).values.argmax())
    place = int(heights[row].argmax())
    layer = layers[place]
    token = context.target.tokenizer.decode([int(ids[row, -1])])
    copies, outcome = len(rows[row]) - 1, Outcome("norm", layers=(layer,))
    single, others = (contrasts.intact_norms[:, layer] / spike[place])[2 * row : 2 * row + 2].tolist()
    height = float(heights[row, place])
    by_copies = Claim(
        role="repeats",
        subject=(Tokens("copies", copies),),
        outcome=outcome,
        place=repr(token),
        value=height,
        contrasts=(Contrast("one copy", single), Contrast("other tokens", others)),
        draws=1,
        search=Search("repeated tokens", len(needed.tokens)),
    )
    if not sites:
        return RepetitionSpike(token, last, by_copies, None, None, ())
    left, *by_chance = (edited.norms[:, row, layer] / edited.intact_norms[row, layer]).tolist()
    same = Claim(
        role="repeats",
        subject=neurons_of(sites),
        outcome=outcome,
        place=f"the last of {copies} copies of {token!r}",
        value=left,
        contrasts=(Contrast("intact", 1.0), Contrast("random", min(by_chance), RANDOM)),
        draws=1,
        search=Search("repeated tokens", len(needed.tokens)),
    )
    own = CausalSets()
    if same.verdict != "needed" and by_copies.verdict == "sufficient":
        own = causal_sets(context.elsewhere(ids[row : row + 1], torch.tensor([last]), layers[-1]), by_copies.place)
    return RepetitionSpike(token, last, by_copies, same, own.minimal, own.members)


def _contrasts(context: SinkContext, rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each row of copies, one copy behind other tokens at the same position, and only other tokens."""
    ids = context.typical.ids[:, 1:].unique()
    generator = draws(context.seed, "tokens beside copies")
    contrasts = []
    for first, *copies in rows:
        others = ids[ids != copies[0]]
        filler = others[torch.randint(len(others), (len(copies),), generator=generator)].tolist()
        contrasts += [[first, *filler[:-1], copies[-1]], [first, *filler]]
    return contrasts
