"""The places that heads attend to, how much they do, and what they need: the spike, components, or the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, compress, zip_longest

import torch

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.parts import POSITION, Component, Head, Part, Parts
from sinkscope.sinks.find.layer_scan import ordinary_position
from sinkscope.sinks.find.left import INTACT, beside, by_chance
from sinkscope.sinks.find.places import Place, texts_with
from sinkscope.sinks.find.records import RATE_EPS, SHORT, Readers, Sink
from sinkscope.sinks.find.sentences import when
from sinkscope.sinks.find.sets import FoundSet
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.components import Heads, Neurons, one_by_one
from sinkscope.sinks.removal.effects import Trial, side_by_side
from sinkscope.sinks.removal.position_effect import PositionEffect, needed

READER_TEXTS = 4  # texts in which the attention without what heads need is read
COMPONENT_TEXTS, RANDOM_TEXTS = 2, 1  # of these: in which components are replaced one by one, and random parts
READER_LENGTH = 48


def attention_sinks(setup: Setup, survey: Survey, made: Sequence[MadeSpike]) -> tuple[Sink, ...]:
    """The places that receive attention, and what the heads need; the last may be the learned sink logits.

    Args:
        setup: The model and its text.
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    sinks: list[Sink] = []
    for place in survey.sinks:
        sinks.append(_sink(setup, survey, made, place, received.readers(place.there(received.ids))))
    if received.learned_heads:
        sinks.append(_sink(setup, survey, made, None, received.learned_heads))
    return tuple(sinks)


def _sink(setup: Setup, survey: Survey, made: Sequence[MadeSpike], place: Place | None, heads: Heads) -> Sink:
    """A place, or the learned sink logits, with the heads that attend to it.

    The attention to several places of a text is their sum.
    """
    received = survey.received
    attention, rates = received.learned, (received.learned > RATE_EPS).float()
    spike, groups, window = None, (), None
    if place is not None:
        there = place.there(received.judged)
        texts = there.any(1)
        attention = received.given(there)[:, :, texts]
        rates = (received.above & there)[:, :, texts].sum(-1) / there[texts].sum(1)
        standing = [one for one in made if survey.stands_at(one.spike.place, place)]
        spike = made.index(standing[0]) if standing else None
        windows = [received.windows[layer] for layer, _ in heads]
        window = None if None in windows else min(filter(None, windows))
        groups = _readers(setup, survey, place, heads, standing, when(place, received.ids.shape[1], window))
    layer, head = torch.tensor(heads).T
    each, of_all = attention[layer, head], rates[received.attending].flatten(0, 1)
    return Sink(
        place=place,
        rate=float(of_all.mean()),
        n_heads=len(of_all),
        readers=len(heads),
        attention=float(each.mean()),
        rate_margin=margin_of(of_all.mean(0).numpy()),
        attention_margin=margin_of(each.mean(0).numpy()),
        groups=groups,
        spike=spike,
        length=received.ids.shape[1],
        window=window,
    )


def _readers(
    setup: Setup, survey: Survey, place: Place, heads: Heads, standing: Sequence[MadeSpike], when: str
) -> tuple[Readers, ...]:
    """The heads that attend to a place, by what they need."""
    made = standing[0].found if len(standing) == 1 else FoundSet()
    received = survey.received
    rows, at = texts_with(place.cases, received.ids)
    whole = received.ids.shape[1] > SHORT  # a sink of long texts shows in the whole text only
    number = 1 if whole else READER_TEXTS
    tokens = received.ids[rows, at].tolist()
    served = [[text for text, token in enumerate(tokens) if token in those][:number] for those in made.served]
    turns = list(chain(*zip_longest(*served)))  # each neuron has a text in the first turn
    chosen = [text for text in turns if text is not None] or list(range(len(tokens)))[:number]
    rows, at = rows[chosen], at[chosen]
    length = received.ids.shape[1]
    if not whole:
        length = max(READER_LENGTH, int(at.max()) + READER_LENGTH // 3)
    ids, there = received.ids[rows, :length], place.there(received.ids)[rows, :length]
    barred = there | (torch.arange(ids.shape[1]) <= at[:, None])
    source = ordinary_position(received.norms[max(heads)[0], rows, : ids.shape[1]], barred)
    effect = PositionEffect(setup.target, Trial(ids, (), at=at, source=source, places=there), heads)
    neurons, makers = (), ()
    for one in standing:
        neurons += one.found.set or tuple(neuron.address for neuron in one.found.adding)
        makers += one.spike.makers
    return HeadByHead(setup, place.words, when, effect, neurons, makers, max(1, len(served))).groups()


@dataclass(frozen=True, eq=False)
class HeadByHead:
    """What each head that attends to a place needs.

    Attributes:
        setup: The model.
        place: The words for the place.
        when: In which texts and windows they attend, as part of a sentence.
        effect: The attention of these heads, in some texts.
        neurons: The neurons that make the spike of the place; none if it has none, or components make it.
        makers: Components that make the spike.
        turn: The number of texts in which each neuron of a set serves one, if they serve different tokens; else 1.
    """

    setup: Setup
    place: str
    when: str
    effect: PositionEffect
    neurons: Neurons = ()
    makers: Parts = ()
    turn: int = 1

    @property
    def short(self) -> PositionEffect:
        """The attention in the few texts in which components are replaced one by one."""
        return self.effect.in_texts(max(COMPONENT_TEXTS, self.turn))

    @property
    def made(self) -> set[Part]:
        """What makes the spike of the place; with a head, its layer's attention does."""
        makers: set[Part] = {*self.neurons, *self.makers}
        return makers | {Component("attention", maker.layer) for maker in self.makers if isinstance(maker, Head)}

    def needs(self) -> list[Parts]:
        """What each head needs, nothing if nothing was found: the one neuron of the spike without which it loses the
        place, or all; or else components, or the position.
        """
        needs: list[Parts] = [()] * len(self.effect.heads)
        spike = self.neurons or self.makers
        if spike:
            sets: list[Parts] = [spike]
            if len(self.neurons) > 1:
                sets += one_by_one(self.neurons)
            lost = self.effect.lost(sets) >= NEEDED
            for head in lost[0].nonzero().flatten().tolist():
                alone = lost[1:, head].nonzero().flatten().tolist()
                needs[head] = sets[1 + alone[0]] if len(alone) == 1 else spike
        others = [head for head, need in enumerate(needs) if not need]
        if others:
            for head, need in zip(others, self._needs_of_components(others), strict=True):
                needs[head] = need
        return needs

    def _needs_of_components(self, heads: Sequence[int]) -> list[Parts]:
        """What each of some heads needs that do not need the spike: components, or the position."""
        effect, components = self.short.only(heads), self.effect.components
        lost = effect.lost([*one_by_one(components), tuple(self.effect.written)])
        needs: list[Parts] = []
        for alone, all_lost in zip(needed(lost[:-1]).T.tolist(), lost[-1].tolist(), strict=True):
            found = tuple(compress(components, alone))
            if not found and all_lost < NEEDED:
                found = (POSITION,)
            needs.append(found)
        return needs

    def groups(self) -> tuple[Readers, ...]:
        """The heads by what they need, the largest group first."""
        by_need: dict[Parts, list[int]] = {}
        for head, need in enumerate(self.needs()):
            by_need.setdefault(need, []).append(head)
        by_size = sorted(by_need.items(), key=lambda group: -len(group[1]))
        return tuple(self._group(need, numbers) for need, numbers in by_size)

    def _group(self, parts: Parts, numbers: Sequence[int]) -> Readers:
        """The heads that need the same parts, without these and under the controls of that."""
        effect = self.effect.only(numbers)
        by_spike = not self.made.isdisjoint(parts)
        if not by_spike:
            parts = self.short.only(numbers).with_heads(parts)
        others, name = [], ""
        if parts and POSITION not in parts:
            others, name = beside(self.setup, parts, self.neurons, self.effect.depth - 1, self.effect.components)
        edits = [tuple(self.effect.written) if POSITION in parts else parts]
        trials = [effect.trial(edits)]
        if others:
            trials.append(effect.in_texts(max(RANDOM_TEXTS, self.turn)).trial(others))
        by_text, *beside_it = (read.attention_from(effect.heads) for read in side_by_side(effect.target, trials))
        (intact, edited), in_texts = by_text.mean(1), by_text.mean(2)
        attention = float(intact.mean())
        tried = Search("components and neurons, alone and in sets", len(effect.components) + len(self.neurons))
        contrasts = [INTACT]
        if POSITION in parts:
            typical, given = (effect.values(edits, reverse=True).mean(1) / attention).tolist()
            contrasts = [Contrast("other", typical, 1, "an ordinary position")]
            contrasts.append(Contrast("other", given, 1, "an ordinary position with all that is written there"))
        elif others:
            left = beside_it[0].mean((1, 2))
            contrasts.append(by_chance(parts, left[1:] / left[0], name))
        ranked = intact.argsort(descending=True, stable=True).tolist()
        heads = tuple(Head(*effect.heads[number]) for number in ranked)
        if len(contrasts) < 2:  # nothing was found, or there are too few other parts to compare with
            intact = tuple(intact[ranked].tolist())
            return Readers(heads, intact, intact, tried)
        count, every = len(heads), len(self.effect.heads)
        some = count_of(count, "head") if count == every else f"{count} of {count_of(every, 'head')}"
        their = word_form(count, "its attention", "their attention")
        effect_at = f"the attention sink at {{}}{self.when} for {some}"
        claim = Claim(
            role="carries",
            subject=parts,
            outcome=Outcome("attention", heads=heads, effect=effect_at, lost_of=their),
            place=self.place,
            value=float(edited.mean()) / attention,
            contrasts=tuple(contrasts),
            draws=len(effect.base.ids),
            search=tried,
            margin=margin_of((in_texts[1] / in_texts[0]).numpy()),
        )
        return Readers(
            heads, tuple(intact[ranked].tolist()), tuple(edited[ranked].tolist()), tried, by_spike=by_spike, claim=claim
        )
