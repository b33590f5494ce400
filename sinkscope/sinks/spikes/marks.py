"""Step 4, the marks: what makes the writers of a spike fire at its place: components, then heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations
from statistics import median

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.results.notation import Component, Head
from sinkscope.results.row import Mean, Row
from sinkscope.sinks.spikes.asked import Case, measure
from sinkscope.sinks.spikes.controls import random_heads
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.needs import SpikeCircuit
from sinkscope.sinks.spikes.spike import Parts
from sinkscope.sinks.spikes.writers import components
from sinkscope.sinks.thresholds import ENOUGH, REMAINS, REMOVED

MOST = 3  # marks that are kept
PAIRED = 6  # parts that are tried in pairs, strongest effect first

Judge = Callable[[Sequence[Parts]], Float[Tensor, "edit case"]]
"""What is left of a spike without each set of parts, by case; its mean over cases is what is left."""


@torch.no_grad()
def marks_of(circuit: SpikeCircuit, seed: int = 0) -> tuple[Row, ...]:
    """Replace each component before the spike's writers at the place by its mean over ordinary positions.

    If each component alone leaves a quarter of the spike or more, pairs are tried. If an attention layer marks the
    place, the fewest heads are named that together take away nine tenths of what all its heads take, beside random
    heads of the same layer. What is left is that of texts that did not choose these parts.

    Args:
        circuit: The spike, with what it needs.
        seed: Seed of the random heads.
    """
    texts, reported = SpikeTexts.of(circuit.spike), circuit.texts
    left = texts.left([(part,) for part in before_writers(circuit)])
    least = min(map(abs, left.values()), default=1.0)
    if least >= REMOVED:
        of_pairs = texts.left(list(combinations([part for (part,) in left][:PAIRED], 2)))
        if least > REMAINS or min(map(abs, of_pairs.values()), default=1.0) < REMOVED:
            left = of_pairs
    marks: list[Row] = []
    marking = [members for members, share in list(left.items())[:MOST] if abs(share) <= REMAINS]
    for members in marking:
        others = [without for other, without in left.items() if not set(other) & set(members)]
        marks.append(_mark(reported, members, median(others) if others else None, len(others)))
        marks += _heads(texts, reported, members, seed)
    return tuple(marks)


def before_writers(circuit: SpikeCircuit) -> list[Component]:
    """Return the components before the first writer that a spike needs; none if that is the embedding."""
    first, before = circuit.first_writer, list[Component]()
    writers = [part for part in circuit.needs.needed if isinstance(part, Component) and (part.layer or 0) == first]
    for part in components(circuit.spike.survey.target, first):
        if part in (writers or [Component("mlp", first)]):
            break
        before.append(part)
    return before


def _mark(texts: SpikeTexts, members: Parts, others: float | None, sets: int) -> Row:
    """Return the row of a set, in texts that did not choose it.

    Args:
        texts: The texts.
        members: The set.
        others: Share of the spike that is left without others instead. None: there are too few others.
        sets: Number of such others.
    """
    case = Case(table="marks", name=" and ".join(map(str, members)), sets=(members,))
    row = measure(case, texts, texts.spike.reading_layers if texts.whole else (), losses=False)
    if others is None:
        return row
    beside = {"others": Mean(others, kind="share"), "sets": Mean(float(sets), kind="count")}
    return replace(row, numbers=row.numbers | beside)


def _heads(texts: SpikeTexts, reported: SpikeTexts, parts: Parts, seed: int) -> list[Row]:
    """The heads of an attention layer that mark the place as a set, then alone."""
    (part, *others), target = parts, texts.spike.survey.target
    if others or not isinstance(part, Component) or part.kind != "attention" or target.adapter.o is None:
        return []
    heads = [Head(part.layer or 0, head) for head in range(target.n_heads)]
    without = texts.along([(head,) for head in heads])
    order, marking = marking_heads(heads, without, texts.along)
    if not marking:
        return []
    random = random_heads(marking, order, seed)
    left_by_random = float(reported.along(random).mean()) if random else None
    marks = [_mark(reported, marking, left_by_random, len(random))]
    if len(marking) > 1:
        for head in order[:MOST]:
            if abs(float(without[heads.index(head)].mean())) <= REMAINS:
                marks.append(_mark(reported, (head,), None, 0))
    return marks


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
    too_few, enough = 0, len(order)
    while enough - too_few > 1:
        tried = (too_few + enough) // 2
        if 1 - float(judge([order[:tried]]).mean()) >= ENOUGH * (1 - every):
            enough = tried
        else:
            too_few = tried
    return order, order[:enough]
