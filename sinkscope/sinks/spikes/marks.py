"""Step 4, the marks: what makes the writers of a spike fire at its place: components, and heads at many tokens.

Heads are asked at tokens that stand first, each alone, so that it sees nothing but itself (Yona et al. 2025, section
4.3). A replaced head gives its mean output at ordinary positions of typical text.

1. Many tokens are put first. Of those that have the spike it is read what is left without each head.
2. The fewest heads are searched that as one set take away nine tenths of what all heads take.
3. Control: as many random heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations, takewhile
from statistics import median

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Mean, Setup, mean_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.target import Target
from sinkscope.results.notation import Component, Head
from sinkscope.results.table import whole
from sinkscope.sinks.spikes.edited import Batch, left_at_place, left_of, read, share_left
from sinkscope.sinks.spikes.effects import SpikeCircuit
from sinkscope.sinks.spikes.needs import RANDOM_SETS
from sinkscope.sinks.spikes.row_edits import PartMeans, Replaced, means_of
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.why_tables import Mark, Marking, MarkingKey, MarkingKind
from sinkscope.sinks.spikes.writers import components
from sinkscope.sinks.thresholds import ENOUGH, HALF, REMAINS, REMOVED
from sinkscope.sinks.tokens import sample_tokens, token_texts, tokens_of_text

MOST = 3  # marks that are kept
PAIRED = 6  # components that are tried in pairs, strongest effect first
FIRST_TOKENS = 32  # tokens that are put first

Judge = Callable[[Sequence[Parts]], Float[Tensor, "edit case"]]
"""What is left of a spike without each set of parts, by case; its mean over cases is what is left."""


@torch.no_grad()
def marks_of(circuit: SpikeCircuit) -> list[Mark]:
    """Replace each component before the spike's writers at the place by its mean over ordinary positions.

    If each component alone leaves a quarter of the spike or more, pairs are tried. What is left is that of texts that
    did not choose these components, beside the median of what others leave in those that did.

    Args:
        circuit: The spike, with what it needs.
    """
    spike = circuit.spike
    reported = circuit.reported
    first = circuit.first_writer
    rows = list[Mark]()
    writers = [part for part in circuit.needs.needed if isinstance(part, Component) and (part.layer or 0) == first]
    stops = writers or [Component("mlp", first)]
    before = list(takewhile(lambda part: part not in stops, components(spike.survey.target, first)))
    left = left_of(spike, [(part,) for part in before])
    (least,), *_ = [*left.values(), [1.0]]  # the strongest effect is the first
    if abs(least) >= REMOVED:
        of_pairs = left_of(spike, [*combinations([*chain(*left)][:PAIRED], 2)])
        (of_pair,), *_ = [*of_pairs.values(), [1.0]]
        if abs(least) > REMAINS or abs(of_pair) < REMOVED:
            left = of_pairs
    for members, (share,) in [*left.items()][:MOST]:
        if abs(share) > REMAINS:
            continue
        others = list[float]()
        for other, (without,) in left.items():
            if not {*other} & {*members}:
                others.append(without)
        along = left_at_place(reported, [members])[0, 0].expand(len(reported.texts))  # of texts that begin alike, once
        beside = Mean(median(others), kind="share") if others else None
        without = mean_of(along, "share")
        assert without is not None
        rows.append(Mark(key=members, left=without, others=beside))
    return rows


# --- heads, at many tokens ---


def heads_that_mark(setup: Setup, circuit: SpikeCircuit) -> tuple[list[Marking], tuple[str, ...]]:
    """Find the attention heads that mark the first token, by what is left of a spike without their output.

    Different heads may mark different tokens, so many tokens are put first, each alone and without BOS, in addition to
    BOS itself. Heads are judged as one set over all of these tokens.

    Args:
        setup: The model and its text.
        circuit: The spike of the first token, with the neurons that it needs.

    Returns:
        How many tokens have the spike, and what is left of it without all heads before the neurons, without the fewest
        that mark, without as many others, and without each head that takes half of it from a token; and the tokens that
        have it.
    """
    spike = circuit.spike
    target = setup.target
    words = sample_tokens(tokens_of_text(setup), FIRST_TOKENS, setup.seed)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    heads = heads_up_to(target, circuit.first_writer)
    tried = torch.tensor(words)
    means = means_of(spike, heads)
    has = along_first(spike, tried, [], means)[0] >= HALF
    having = token_texts(target, tried[has].tolist())

    def judge(sets: Sequence[Parts]) -> Float[Tensor, "edit token"]:
        along = along_first(spike, tried[has], sets, means)
        return share_left(along[1:], along[:1])

    rows = [Marking(key=MarkingKey(MarkingKind.NONE), have=whole(len(having)), tried=whole(len(words)))]
    if not having or not heads:
        return rows, having
    along = along_first(spike, tried[has], [(head,) for head in heads], means)
    order, marking = marking_heads(heads, share_left(along[1:], along[:1]), judge)
    rows.append(
        Marking(key=MarkingKey(MarkingKind.ALL), left=mean_of(judge([heads])[0], "share"), count=whole(len(heads)))
    )
    marks = tuple(head for head in heads if head in marking)
    if marks:
        left = mean_of(judge([marks])[0], "share")
        rows.append(Marking(key=MarkingKey(MarkingKind.FEWEST), marking=marks, left=left, count=whole(len(marks))))
        others = [head for head in order if head not in marks]
        if len(others) >= len(marks):
            generator = draws(setup.seed, "heads beside those that mark")
            left = judge([tuple(some_of(others, len(marks), generator)) for _ in range(RANDOM_SETS)])
            rows.append(Marking(key=MarkingKey(MarkingKind.RANDOM), left=mean_of(left[left.mean(1).argmin()], "share")))
    for head, left in zip(heads, along[1:] / along[0], strict=True):
        if bool((left < HALF).any()):
            rows.append(Marking(key=MarkingKey(MarkingKind.HEAD, head), left=mean_of(left, "share")))
    return rows, having


def marking_heads(
    heads: Sequence[Head], without: Float[Tensor, "head case"], judge: Judge
) -> tuple[tuple[Head, ...], tuple[Head, ...]]:
    """Find the fewest heads that mark places, judged as one set over all cases.

    Args:
        heads: The heads.
        without: What is left without each alone.
        judge: Tells what is left without sets of them.

    Returns:
        All heads, first those that take most away alone and keep most without the others; and the fewest, in that
        order, that together take nine tenths of what all take. None if without all more than three quarters are left.
    """
    only = judge([tuple(other for other in heads if other != head) for head in heads])
    order = tuple(heads[number] for number in (without - only).mean(1).argsort(stable=True).tolist())
    every = float(judge([order]).mean())
    if every > REMAINS:
        return order, ()
    too_few = 0
    enough = len(order)
    while enough - too_few > 1:
        tried = (too_few + enough) // 2
        if 1 - float(judge([order[:tried]]).mean()) >= ENOUGH * (1 - every):
            enough = tried
        else:
            too_few = tried
    return order, order[:enough]


def heads_up_to(target: Target, last_layer: int) -> tuple[Head, ...]:
    """Return all heads of the layers with softmax attention up to a layer."""
    layers = [layer for layer in target.attending if layer <= last_layer]
    return tuple(Head(layer, head) for layer in layers for head in range(target.n_heads))


def along_first(
    spike: Spike, tokens: Int[Tensor, " token"], sets: Sequence[Parts], means: PartMeans
) -> Float[Tensor, "state token"]:
    """Project each token, which stands alone, on a spike's direction, as a share of the spike: intact, then edited.

    Args:
        spike: The spike of the first token.
        tokens: The tokens.
        sets: Sets of heads that are replaced in turn.
        means: What replaced heads write instead.
    """
    with_intact: list[Parts] = [(), *sets]
    set_of = torch.arange(len(with_intact)).repeat_interleave(len(tokens))
    ids = tokens.repeat(len(with_intact))[:, None]
    places = torch.ones_like(ids, dtype=torch.bool)[:, None]
    batch = Batch((spike,), ids, places)
    if any(sets):
        batch = batch.under(Replaced(with_intact, set_of, means))
    return read(batch).along[:, 0].reshape(len(with_intact), -1)
