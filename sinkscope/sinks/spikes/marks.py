"""Step 5, the marks: what makes the writers of a spike fire at its place: components, then heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.components import components
from sinkscope.sinks.spikes.records import MarkLeft, part_name
from sinkscope.sinks.spikes.spike import Measured, Parts
from sinkscope.sinks.spikes.texts import SpikeTexts, means_of

MARKS = 0.75  # share of a spike that is left at most without a part that marks its place
MOST = 3  # marks that are kept
TAKEN = 0.9  # share of what all heads together take away that the fewest take
PAIRED = 6  # parts that are tried in pairs, those without which least is left

Judge = Callable[[Sequence[Parts]], Float[Tensor, "edit case"]]
"""What is left of a spike without each set of parts, by case; its mean over cases is what is left."""


@torch.no_grad()
def marks_of(one: Measured) -> tuple[MarkLeft, ...]:
    """Replace what writes before the spike's writers at the place by its mean over ordinary positions, one part each.

    If no part alone leaves at most three quarters of the spike, pairs are tried. Of an attention layer that marks the
    place, the fewest heads are named that as one set take away nine tenths of what all its heads take.

    Args:
        one: The spike, with what it needs: parts up to the first of its writers are tried.
    """
    texts, first = SpikeTexts.of(one.survey, one.spike), one.first_writer
    parts = [part for part in components(one.survey.target, first) if part != Component("mlp", first)]
    sets = _judged(texts, [(part,) for part in parts])
    if not sets or next(iter(sets.values())).left > MARKS:
        few = [part for part, *_ in sets][:PAIRED]
        sets = _judged(texts, list(combinations(few, 2)))
    marks: list[MarkLeft] = []
    for members, mark in list(sets.items())[:MOST]:
        if mark.left <= MARKS:
            marks += [mark, *_heads(texts, members)]
    return tuple(marks)


def mark_of(parts: Parts, left: Float[Tensor, " case"], others: float | None = None) -> MarkLeft:
    """Return the record of a set, with what is left without it."""
    return MarkLeft(" and ".join(map(part_name, parts)), float(left.mean()), margin_of(left.numpy()), others)


def _judged(texts: SpikeTexts, sets: Sequence[Parts]) -> dict[Parts, MarkLeft]:
    """What is left of the spike without each set, the least first, beside sets that share no part with it."""
    if not sets:
        return {}
    left = dict(zip(sets, _left(texts, sets), strict=True))
    marks: dict[Parts, MarkLeft] = {}
    for parts in sorted(sets, key=lambda parts: float(left[parts].mean())):
        others = [float(without.mean()) for other, without in left.items() if not set(other) & set(parts)]
        marks[parts] = mark_of(parts, left[parts], median(others) if others else None)
    return marks


def _left(texts: SpikeTexts, sets: Sequence[Parts]) -> Float[Tensor, "edit text"]:
    """What is left of the spike in each text without each set."""
    return texts.along(sets, means_of(texts.survey, texts.spike, {part for parts in sets for part in parts}))


def _heads(texts: SpikeTexts, parts: Parts) -> list[MarkLeft]:
    """Of an attention layer, the heads that mark the place as a set, then alone."""
    (part, *others), target = parts, texts.survey.target
    if others or not isinstance(part, Component) or part.kind != "attention" or target.adapter.o is None:
        return []
    heads = [Head(part.layer or 0, head) for head in range(target.n_heads)]
    without = _left(texts, [(head,) for head in heads])
    found = marking_heads(heads, without, partial(_left, texts))
    if found.marking is None:
        return []
    marks = [MarkLeft(" and ".join(map(str, found.marking.heads)), found.marking.left, found.marking.margin)]
    alone = [mark_of((head,), without[heads.index(head)]) for head in found.order[:MOST]]
    if len(found.marking.heads) > 1:
        marks += [mark for mark in alone if mark.left <= MARKS]
    return marks


@dataclass(frozen=True)
class Without:
    """Some heads as one set, and what is left of a spike with them replaced.

    Attributes:
        heads: The heads.
        left: What is left, mean over cases.
        margin: Two standard errors over cases. None: fewer than three.
    """

    heads: tuple[Head, ...]
    left: float
    margin: float | None


@dataclass(frozen=True)
class MarkingSet:
    """Which of some heads mark places.

    Attributes:
        order: The heads, those first that take most away alone and keep most without the others.
        every: All of them as one set.
        marking: The fewest, in that order, that together take nine tenths of what all take. None: without all, more
            than three quarters are left.
    """

    order: tuple[Head, ...]
    every: Without
    marking: Without | None


def marking_heads(heads: Sequence[Head], without: Float[Tensor, "head case"], judge: Judge) -> MarkingSet:
    """Find the fewest of some heads that mark places, judged as one set over all cases.

    Args:
        heads: The heads.
        without: What is left without each alone.
        judge: Tells what is left without sets of them.
    """

    def first(count: int) -> Without:
        left = judge([order[:count]])[0]
        return Without(order[:count], float(left.mean()), margin_of(left.numpy()))

    only = judge([tuple(other for other in heads if other != head) for head in heads])
    order = tuple(heads[number] for number in (without - only).mean(1).argsort(stable=True).tolist())
    every = first(len(order))
    if every.left > MARKS:
        return MarkingSet(order, every, None)
    too_few, marking = 0, every
    while len(marking.heads) - too_few > 1:
        tried = first((too_few + len(marking.heads)) // 2)
        if 1 - tried.left >= TAKEN * (1 - every.left):
            marking = tried
        else:
            too_few = len(tried.heads)
    return MarkingSet(order, every, marking)
