"""Step 5, the marks: what makes the writers of a spike fire at its place: components, then heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch

from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.components import components
from sinkscope.sinks.spikes.spike import Mark, Needs, Parts, Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.texts import SpikeTexts, means_of

MARKS = 0.75  # share of a spike that is left at most without a part that marks its place
MOST = 3  # marks that are kept
PAIRED = 6  # parts that are tried in pairs, those without which least is left


@torch.no_grad()
def marks_of(survey: Survey, spike: Spike, needs: Needs | None) -> tuple[Mark, ...]:
    """Replace what writes before the spike's writers at the place by its mean over ordinary positions, one part each.

    If no part alone leaves at most three quarters of the spike, pairs are tried. Of an attention layer that marks the
    place, heads are named if the set of those that mark it alone, judged as one, leaves about as little.

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
    """The layer of the first neuron or component that the spike needs; of none the first layer of its run."""
    if needs is None or needs.needed is None:
        return spike.first
    return min(part.layer or 0 for part in needs.needed.parts)


def _judged(texts: SpikeTexts, sets: Sequence[Parts]) -> list[Mark]:
    """What is left of the spike without each set, the least first."""
    if not sets:
        return []
    means = means_of(texts.survey, texts.spike, {part for parts in sets for part in parts})
    left = texts.along(list(sets), means)
    marks: list[Mark] = []
    for parts, by_text in zip(sets, left, strict=True):
        marks.append(Mark(parts, float(by_text.mean()), margin_of(by_text.numpy())))
    return sorted(marks, key=lambda mark: mark.left)


def _with_heads(texts: SpikeTexts, mark: Mark) -> list[Mark]:
    """The mark and, where it is an attention layer of which some heads leave about as little, these heads as a set."""
    (part, *others), target = mark.parts, texts.survey.target
    if others or not isinstance(part, Component) or part.kind != "attention" or target.adapter.o is None:
        return [mark]
    alone = _judged(texts, [(Head(part.layer or 0, head),) for head in range(target.n_heads)])
    marking = [one for one in alone if one.left <= MARKS] or alone[:2]
    (together,) = _judged(texts, [tuple(one.parts[0] for one in marking)])
    if together.left > MARKS:
        return [mark]
    return [mark, together, *(one for one in marking[:MOST] if len(marking) > 1 and one.left <= MARKS)]
