"""The places that heads attend to, how much they do, and what they need: what makes the spike, or components."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import torch

from sinkscope.measure import Setup
from sinkscope.results.claims import NEEDED, Outcome, Search
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.parts import Head, Neuron, Parts
from sinkscope.sinks.find.layer_scan import ordinary_position
from sinkscope.sinks.find.left import INTACT, beside, by_chance, claim_of
from sinkscope.sinks.find.places import ENOUGH, Place, texts_with
from sinkscope.sinks.find.records import Readers, Sink
from sinkscope.sinks.find.sentences import when
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.components import Heads, one_by_one
from sinkscope.sinks.removal.effects import Trial, side_by_side
from sinkscope.sinks.removal.position_effect import PositionEffect
from sinkscope.sinks.removal.search import random_sets

COMPONENT_TEXTS, RANDOM_TEXTS = 2, 1  # texts in which what heads need is looked for, and random parts are removed
READER_LENGTH = 48


def attention_sinks(setup: Setup, survey: Survey, made: Sequence[MadeSpike]) -> tuple[Sink, ...]:
    """The places that receive attention, and what the heads need; the last may be the learned sink logits.

    Args:
        setup: The model and its text.
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    n_heads = int(received.attending.sum()) * setup.target.n_heads
    sinks: list[Sink] = []
    for place in survey.sinks:
        heads = received.readers(place.there(received.judged))
        sinks.append(Sink(place, n_heads, _readers(setup, survey, place, heads, _makers(made, survey, place))))
    if received.learned_heads:
        layer, head = torch.tensor(received.learned_heads).T
        attention = tuple(received.learned[layer, head].mean(1).tolist())
        heads = tuple(Head(*pair) for pair in received.learned_heads)
        sinks.append(Sink(None, n_heads, (Readers(heads, attention, attention, Search("heads", n_heads)),)))
    return tuple(sinks)


def _makers(made: Sequence[MadeSpike], survey: Survey, place: Place) -> Parts:
    """What makes the spike that stands at nearly all of a place that heads attend to; nothing if there is none."""
    ids = survey.received.ids
    for one in made:
        if float(one.spike.place.there(ids)[place.there(ids)].float().mean()) >= ENOUGH:
            return one.spike.makers
    return ()


def _readers(setup: Setup, survey: Survey, place: Place, heads: Heads, makers: Parts) -> tuple[Readers, ...]:
    """The heads that attend to a place, by what they need, the largest group first.

    Args:
        setup: The model.
        survey: Where the sinks are.
        place: The place.
        heads: The heads.
        makers: What makes the spike of the place.
    """
    received = survey.received
    rows, at = texts_with(place.cases, received.ids)
    length = max(READER_LENGTH, int(at.max()) + READER_LENGTH // 3)
    ids, there = received.ids[rows, :length], place.there(received.ids)[rows, :length]
    barred = there | (torch.arange(ids.shape[1]) <= at[:, None])
    source = ordinary_position(received.norms[max(heads)[0], rows, : ids.shape[1]], barred)
    effect = PositionEffect(setup.target, Trial(ids, (), at=at, source=source, places=there), heads)
    by_need: dict[Parts, list[int]] = {}
    for head, need in enumerate(_needs(effect, makers)):
        by_need.setdefault(need, []).append(head)
    groups = sorted(by_need.items(), key=lambda group: -len(group[1]))
    return tuple(_group(setup, effect, numbers, parts, makers, place) for parts, numbers in groups)


def _needs(effect: PositionEffect, makers: Parts) -> list[Parts]:
    """What each head needs: the one maker of a spike that it needs alone, or all; or else components; or nothing."""
    needs: list[Parts] = [()] * len(effect.heads)
    few = effect.in_texts(COMPONENT_TEXTS)
    if makers:
        members = one_by_one(makers) if len(makers) > 1 else []
        lost = few.lost([makers, *members]) >= NEEDED
        for head in lost[0].nonzero().flatten().tolist():
            alone = lost[1:, head].nonzero().flatten().tolist()
            needs[head] = (makers[alone[0]],) if len(alone) == 1 else makers
    others = [head for head, need in enumerate(needs) if not need]
    if others:
        components = effect.components
        for head, own in zip(others, few.only(others).needed_by_heads(components).T.tolist(), strict=True):
            needs[head] = tuple(compress(components, own))
    return needs


def _group(
    setup: Setup, every: PositionEffect, numbers: Sequence[int], parts: Parts, makers: Parts, place: Place
) -> Readers:
    """The heads that need the same parts, without these and under the controls of that."""
    effect, count = every.only(numbers), count_of(len(every.heads), "head")
    some = count if len(numbers) == len(every.heads) else f"{len(numbers)} of {count}"
    by_spike = bool(parts) and set(parts) <= set(makers)
    neurons = tuple(part for part in parts if isinstance(part, Neuron))
    others: list[Parts] = []
    if neurons:
        others += random_sets(setup.target, neurons, setup.seed)
    elif parts:
        if not by_spike:
            parts = effect.in_texts(COMPONENT_TEXTS).with_heads(parts)
        others += beside(setup, parts, effect.components)
    trials = [effect.trial([parts])]
    if others:
        trials.append(effect.in_texts(RANDOM_TEXTS).trial(others))
    by_text, *beside_it = (read.attention_from(effect.heads) for read in side_by_side(effect.target, trials))
    attention, left = (tuple(means.tolist()) for means in by_text.mean(1))
    tried = Search("components and makers of a spike", len(effect.components) + len(makers))
    heads = tuple(Head(*head) for head in effect.heads)
    if not others:  # nothing was found, or there are no other parts to compare with
        return Readers(heads, attention, attention, tried)
    chance = beside_it[0].mean((1, 2))
    words, their = f"the attention sink at {{}}{when(place)} for {some}", word_form(len(heads), "its", "their")
    outcome = Outcome("attention", heads=heads, effect=words, lost_of=f"{their} attention")
    by_text = by_text.mean(2)
    contrasts = [INTACT, by_chance(parts, chance[1:] / chance[0])]
    claim = claim_of("carries", parts, outcome, place.words, by_text[1] / by_text[0], contrasts, tried)
    return Readers(heads, attention, left, tried, by_spike, claim)
