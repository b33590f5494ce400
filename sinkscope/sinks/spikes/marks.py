"""Step 5, the marks: what makes the writers of a spike fire at its place: components, then heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.components import components
from sinkscope.sinks.spikes.spike import Mark, Needs, Part, Parts, Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.texts import SpikeTexts, means_of

MARKS = 0.75  # share of a spike that is left at most without a part that marks its place
MOST = 3  # marks that are kept
TAKEN = 0.9  # share of what all heads together take away that the fewest take
PAIRED = 6  # parts that are tried in pairs, those without which least is left

Judge = Callable[[Sequence[Parts]], Float[Tensor, "edit case"]]
"""What is left of a spike without each set of parts, by case; its mean over cases is what is left."""


@torch.no_grad()
def marks_of(survey: Survey, spike: Spike, needs: Needs | None) -> tuple[Mark, ...]:
    """Replace what writes before the spike's writers at the place by its mean over ordinary positions, one part each.

    If no part alone leaves at most three quarters of the spike, pairs are tried. Of an attention layer that marks the
    place, the fewest heads are named that as one set take away nine tenths of what all its heads take.

    Args:
        survey: The survey.
        spike: The spike.
        needs: What it needs; parts up to the first of its writers are tried.
    """
    texts = SpikeTexts.of(survey, spike)
    first = first_writer(spike, needs)
    parts = [part for part in components(survey.target, first) if part != Component("mlp", first)]
    marks = _judged(texts, [(part,) for part in parts])
    if not marks or marks[0].left > MARKS:
        few = [mark.parts[0] for mark in marks[:PAIRED]]
        marks = _judged(texts, list(combinations(few, 2)))
    marking = [mark for mark in marks if mark.left <= MARKS][:MOST]
    named: list[Mark] = []
    for mark in marking:
        named += _with_heads(texts, mark)
    return tuple(named)


def first_writer(spike: Spike, needs: Needs | None) -> int:
    """Return the layer of the first neuron or component that the spike needs; of none the first layer of its run."""
    if needs is None or needs.needed is None:
        return spike.first
    return min(part.layer or 0 for part in needs.needed.parts)


def mark_of(parts: Sequence[Part], left: Float[Tensor, " case"]) -> Mark:
    """Return a set, and what is left without it, with its margin over cases."""
    return Mark(tuple(parts), float(left.mean()), margin_of(left.numpy()))


def _judged(texts: SpikeTexts, sets: Sequence[Parts]) -> list[Mark]:
    """What is left of the spike without each set, the least first, beside sets that share no part with it."""
    if not sets:
        return []
    marks = [mark_of(parts, left) for parts, left in zip(sets, _left(texts, sets), strict=True)]
    beside: list[Mark] = []
    for mark in marks:
        others = [other.left for other in marks if not set(other.parts) & set(mark.parts)]
        beside.append(replace(mark, others=median(others) if others else None))
    return sorted(beside, key=lambda mark: mark.left)


def _left(texts: SpikeTexts, sets: Sequence[Parts]) -> Float[Tensor, "edit text"]:
    """What is left of the spike in each text without each set."""
    means = means_of(texts.survey, texts.spike, {part for parts in sets for part in parts})
    return texts.along(list(sets), means)


def _with_heads(texts: SpikeTexts, mark: Mark) -> list[Mark]:
    """The mark and, where it is an attention layer, the heads that mark the place as a set, then alone."""
    (part, *others), target = mark.parts, texts.survey.target
    if others or not isinstance(part, Component) or part.kind != "attention" or target.adapter.o is None:
        return [mark]
    heads = [Head(part.layer or 0, head) for head in range(target.n_heads)]
    found = marking_heads(heads, _left(texts, [(head,) for head in heads]), partial(_left, texts))
    if found.marking is None:
        return [mark]
    alone: list[Mark] = []
    for head in found.order[:MOST]:
        one = mark_of((head,), found.alone[head])
        if len(found.marking.parts) > 1 and one.left <= MARKS:
            alone.append(one)
    return [mark, found.marking, *alone]


@dataclass(frozen=True)
class MarkingSet:
    """Which of some heads mark places.

    Attributes:
        order: The heads, those first that take most away alone and keep most without the others.
        alone: What is left without each alone, by case.
        all: All of them as one set.
        marking: The fewest, in that order, that together take nine tenths of what all take. None: without all, more
            than three quarters are left.
    """

    order: tuple[Head, ...]
    alone: dict[Head, Float[Tensor, " case"]]
    all: Mark
    marking: Mark | None


def marking_heads(heads: Sequence[Head], without: Float[Tensor, "head case"], judge: Judge) -> MarkingSet:
    """Find the fewest of some heads that mark places, judged as one set over all cases.

    Args:
        heads: The heads.
        without: What is left without each alone.
        judge: Tells what is left without sets of them.
    """
    only = judge([tuple(other for other in heads if other != head) for head in heads])
    order = sorted(heads, key=dict(zip(heads, (without - only).mean(1).tolist(), strict=True)).__getitem__)
    alone, every = dict(zip(heads, without, strict=True)), mark_of(heads, judge([tuple(heads)])[0])
    if every.left > MARKS:
        return MarkingSet(tuple(order), alone, every, None)
    too_few, marking = 0, every
    while len(marking.parts) - too_few > 1:
        number = (too_few + len(marking.parts)) // 2
        tried = mark_of(order[:number], judge([tuple(order[:number])])[0])
        if 1 - tried.left >= TAKEN * (1 - every.left):
            marking = tried
        else:
            too_few = number
    return MarkingSet(tuple(order), alone, every, marking)
