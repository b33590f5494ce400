"""Step 4, the marks: what makes the writers of a spike fire at its place: components, then heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.records import MarkLeft
from sinkscope.sinks.spikes.removal import chance_of, random_heads, removals_of
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.writers import components
from sinkscope.sinks.thresholds import ENOUGH, REMAINS, REMOVED

MOST = 3  # marks that are kept
PAIRED = 6  # parts that are tried in pairs, strongest effect first

Judge = Callable[[Sequence[Parts]], Float[Tensor, "edit case"]]
"""What is left of a spike without each set of parts, by case; its mean over cases is what is left."""


@torch.no_grad()
def marks_of(spike: Spike, seed: int = 0) -> tuple[MarkLeft, ...]:
    """Replace each component before the spike's writers at the place by its mean over ordinary positions.

    If each component alone leaves a quarter of the spike or more, pairs are tried. If an attention layer marks the
    place, the fewest heads are named that together take away nine tenths of what all its heads take, beside random
    heads of the same layer.

    Args:
        spike: The spike, with what it needs.
        seed: Seed of the random heads.
    """
    texts = SpikeTexts.of(spike)
    left = texts.left([(part,) for part in before_writers(spike)])
    least = min(map(abs, left.values()), default=1.0)
    if least >= REMOVED:
        of_pairs = texts.left(list(combinations([part for (part,) in left][:PAIRED], 2)))
        if least > REMAINS or min(map(abs, of_pairs.values()), default=1.0) < REMOVED:
            left = of_pairs
    marks: list[MarkLeft] = []
    kept = [members for members, share in list(left.items())[:MOST] if abs(share) <= REMAINS]
    for members, mark in zip(kept, _marks(texts, kept), strict=True):
        others = [without for other, without in left.items() if not set(other) & set(members)]
        marks.append(replace(mark, others=median(others) if others else None))
        marks += _heads(texts, members, seed)
    return tuple(marks)


def before_writers(spike: Spike) -> list[Component]:
    """Return the components before the first writer that a spike needs; none if that is the embedding."""
    first = spike.first_writer
    parts = components(spike.survey.target, first)
    writers = [part for part in spike.needed if isinstance(part, Component) and (part.layer or 0) == first]
    before: list[Component] = []
    for part in parts:
        if part in (writers or [Component("mlp", first)]):
            break
        before.append(part)
    return before


def _marks(texts: SpikeTexts, sets: Sequence[Parts], random: Sequence[Parts] = ()) -> list[MarkLeft]:
    """Return the records of some sets; the first is compared with random sets."""
    marks: list[MarkLeft] = []
    for removal in removals_of(texts, sets, every_loss=None):
        beside = None if marks else chance_of(texts, random, removal)
        name = " and ".join(removal.parts)
        marks.append(MarkLeft(name, removal.left, removal.left_margin, removal.heads, random=beside))
    return marks


def _heads(texts: SpikeTexts, parts: Parts, seed: int) -> list[MarkLeft]:
    """The heads of an attention layer that mark the place as a set, then alone."""
    (part, *others), target = parts, texts.spike.survey.target
    if others or not isinstance(part, Component) or part.kind != "attention" or target.adapter.o is None:
        return []
    heads = [Head(part.layer or 0, head) for head in range(target.n_heads)]
    without = texts.along([(head,) for head in heads])
    every, marking = marking_heads(heads, without, texts.along)
    if marking is None:
        return []
    sets: list[Parts] = [marking.heads]
    if len(marking.heads) > 1:
        for head in every.heads[:MOST]:
            if abs(float(without[heads.index(head)].mean())) <= REMAINS:
                sets.append((head,))
    return _marks(texts, sets, random_heads(marking.heads, every.heads, seed))


@dataclass(frozen=True)
class Without:
    """A set of heads, and what is left of a spike with all of them replaced.

    Attributes:
        heads: The heads.
        left: What is left, mean over cases.
        margin: Two standard errors over cases. None: fewer than three.
    """

    heads: tuple[Head, ...]
    left: float
    margin: float | None


def marking_heads(
    heads: Sequence[Head], without: Float[Tensor, "head case"], judge: Judge
) -> tuple[Without, Without | None]:
    """Find the fewest heads that mark places, judged as one set over all cases.

    Args:
        heads: The heads.
        without: What is left without each alone.
        judge: Tells what is left without sets of them.

    Returns:
        All heads, first those that take most away alone and keep most without the others; and the fewest, in that
        order, that together take nine tenths of what all take. None: without all, more than three quarters are left.
    """

    def first(count: int) -> Without:
        left = judge([order[:count]])[0]
        return Without(order[:count], float(left.mean()), margin_of(left.numpy()))

    only = judge([tuple(other for other in heads if other != head) for head in heads])
    order = tuple(heads[number] for number in (without - only).mean(1).argsort(stable=True).tolist())
    every = first(len(order))
    if every.left > REMAINS:
        return every, None
    too_few, marking = 0, every
    while len(marking.heads) - too_few > 1:
        tried = first((too_few + len(marking.heads)) // 2)
        if 1 - tried.left >= ENOUGH * (1 - every.left):
            marking = tried
        else:
            too_few = len(tried.heads)
    return every, marking
