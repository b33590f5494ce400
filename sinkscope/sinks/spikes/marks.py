"""Step 4, the marks: what makes the writers of a spike fire at its place: components, and heads at many tokens.

Heads are asked at tokens that stand first, each alone, so that it sees nothing but itself (Yona et al. 2025, section
4.3). A replaced head gives its mean output at ordinary positions of typical text.

1. Many tokens are put first. Of those that have the spike it is read what is left without each head.
2. The fewest heads are searched that as one set take away nine tenths of what all heads take.
3. Control: as many random heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from sinkscope.sinks.spikes.controls import RANDOM_SETS
from sinkscope.sinks.spikes.edited import Batch, left_at_place, left_of, read, share_left
from sinkscope.sinks.spikes.effects import SpikeCircuit
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
LeftOfComponents = Mapping[tuple[Component, ...], Sequence[float]]
"""What is left of a spike without each set of components, strongest effect first."""


@torch.no_grad()
def marks_of(circuit: SpikeCircuit) -> list[Mark]:
    """Replace each component before the spike's writers at the place by its mean over ordinary positions.

    If each component alone leaves a quarter of the spike or more, pairs are tried. What is left is that of texts that
    did not choose these components, beside the median of what others leave in those that did.

    Args:
        circuit: The spike, with what it needs.
    """
    before = components_before(circuit)
    left = left_of_components(circuit.spike, before)
    rows: list[Mark] = []
    for members, (share,) in [*left.items()][:MOST]:
        if abs(share) <= REMAINS:
            others = [without for other, (without,) in left.items() if not {*other} & {*members}]
            rows.append(mark_of(circuit.reported, members, others))
    return rows


def components_before(circuit: SpikeCircuit) -> list[Component]:
    """Return the components before the first that writes a spike."""
    first = circuit.first_writer
    writers: list[Component] = []
    for part in circuit.needs.needed:
        if isinstance(part, Component) and (part.layer or 0) == first:
            writers.append(part)
    stops = writers or [Component("mlp", first)]
    return list(takewhile(lambda part: part not in stops, components(circuit.spike.survey.target, first)))


def left_of_components(spike: Spike, before: Sequence[Component]) -> LeftOfComponents:
    """Return what is left of a spike without each component, or without pairs if none alone does enough."""
    left: LeftOfComponents = left_of(spike, [(part,) for part in before])
    least = strongest(left)
    if least < REMOVED:
        return left
    pairs = [*combinations([*chain(*left)][:PAIRED], 2)]
    left_of_pairs: LeftOfComponents = left_of(spike, pairs)
    if least > REMAINS or strongest(left_of_pairs) < REMOVED:
        return left_of_pairs
    return left


def strongest(left: LeftOfComponents) -> float:
    """Return how little the strongest effect leaves, which is the first; all is left without any."""
    for shares in left.values():
        return abs(shares[0])
    return 1.0


def mark_of(reported: Spike, members: tuple[Component, ...], others: Sequence[float]) -> Mark:
    """Return the row of a mark.

    Args:
        reported: The spike, in texts that did not choose the mark.
        members: The components.
        others: What others leave of the spike.
    """
    left = left_at_place(reported, [members])[0, 0]
    by_text = left.expand(len(reported.texts))  # texts that begin alike are read once
    without = mean_of(by_text, "share")
    assert without is not None
    beside = Mean(median(others), kind="share") if others else None
    return Mark(key=members, left=without, others=beside)


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
    words = sample_tokens(tokens_of_text(setup), FIRST_TOKENS, setup.seed)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    tried = torch.tensor(words)
    heads = heads_up_to(setup.target, circuit.first_writer)
    means = means_of(circuit.spike, heads)
    has_spike = along_first(circuit.spike, tried, [], means)[0] >= HALF
    at_tokens = AtTokens(circuit.spike, tried[has_spike], means)
    having = token_texts(setup.target, at_tokens.tokens.tolist())
    rows = [Marking(key=MarkingKey(MarkingKind.NONE), have=whole(len(having)), tried=whole(len(words)))]
    if having and heads:
        rows += marking_rows(at_tokens, heads, setup.seed)
    return rows, having


@dataclass(frozen=True, eq=False)
class AtTokens:
    """A spike at tokens that stand first, each alone.

    Attributes:
        spike: The spike.
        tokens: The tokens, all of which have it.
        means: What replaced heads write instead.
    """

    spike: Spike
    tokens: Int[Tensor, " token"]
    means: PartMeans

    def along(self, sets: Sequence[Parts]) -> Float[Tensor, "state token"]:
        """Return the projection of each token on the spike's direction: intact, then without each set of heads."""
        return along_first(self.spike, self.tokens, sets, self.means)

    def left(self, sets: Sequence[Parts]) -> Float[Tensor, "set token"]:
        """Return what is left of the spike without each set of heads."""
        along = self.along(sets)
        return share_left(along[1:], along[:1])


def marking_rows(at_tokens: AtTokens, heads: tuple[Head, ...], seed: int) -> list[Marking]:
    """Return what is left without all heads, without the fewest that mark, without as many others, and without each.

    Args:
        at_tokens: The spike at tokens that have it.
        heads: The heads before the neurons that write it.
        seed: Seed of the other heads.
    """
    along = at_tokens.along([(head,) for head in heads])
    order, marking = marking_heads(heads, share_left(along[1:], along[:1]), at_tokens.left)
    rows = [marking_row(MarkingKind.ALL, at_tokens.left([heads])[0], len(heads))]
    marks = tuple(head for head in heads if head in marking)
    if marks:
        fewest = marking_row(MarkingKind.FEWEST, at_tokens.left([marks])[0], len(marks))
        rows.append(replace(fewest, marking=marks))
    others = [head for head in order if head not in marks]
    if marks and len(others) >= len(marks):
        generator = draws(seed, "heads beside those that mark")
        sets = [tuple(some_of(others, len(marks), generator)) for _ in range(RANDOM_SETS)]
        left = at_tokens.left(sets)
        rows.append(marking_row(MarkingKind.RANDOM, left[left.mean(1).argmin()]))
    for head, left in zip(heads, along[1:] / along[0], strict=True):
        if bool((left < HALF).any()):
            rows.append(Marking(key=MarkingKey(MarkingKind.HEAD, head), left=mean_of(left, "share")))
    return rows


def marking_row(kind: MarkingKind, left: Float[Tensor, " token"], count: int | None = None) -> Marking:
    """Return the row of a set of heads: what is left without them, and how many they are."""
    return Marking(key=MarkingKey(kind), left=mean_of(left, "share"), count=None if count is None else whole(count))


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
