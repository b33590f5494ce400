"""The heads that attend to a place, by what they need: the neurons of its spike, components, or the position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress

import torch

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.parts import POSITION, Component, Head, Part, Parts
from sinkscope.sinks.find.left import INTACT, beside, by_chance, readers_of
from sinkscope.sinks.find.records import Readers
from sinkscope.sinks.removal.components import Neurons, one_by_one
from sinkscope.sinks.removal.position_effect import PositionEffect


@dataclass(frozen=True)
class Need:
    """What a head needs.

    Attributes:
        parts: The parts; empty if nothing was found.
        by_spike: Whether they are what makes the spike of the place.
    """

    parts: Parts = ()
    by_spike: bool = False


@dataclass(frozen=True, eq=False)
class HeadByHead:
    """What each head that attends to a place needs.

    Attributes:
        setup: The model.
        place: The words for the place.
        effect: The attention of these heads, in some texts.
        neurons: The neurons that make the spike of the place; none if it has none, or components make it.
        makers: Components that make the spike.
    """

    setup: Setup
    place: str
    effect: PositionEffect
    neurons: Neurons = ()
    makers: Parts = ()

    def edit(self, parts: Parts) -> Parts:
        """What removes all of these parts."""
        if POSITION in parts:
            return tuple(self.effect.written)
        return parts

    def needs(self) -> list[Need]:
        """What each head needs: the one neuron of the spike without which it loses the place, or all; or else
        components, or the position.
        """
        needs = [Need()] * len(self.effect.heads)
        spike = self.neurons or self.makers
        if spike:
            sets: list[Parts] = [spike]
            if len(self.neurons) > 1:
                sets += one_by_one(self.neurons)
            lost = self.effect.lost([self.edit(parts) for parts in sets]) >= NEEDED
            for head in lost[0].nonzero().flatten().tolist():
                alone = lost[1:, head].nonzero().flatten().tolist()
                needs[head] = Need(sets[1 + alone[0]] if len(alone) == 1 else spike, by_spike=True)
        others = [head for head, need in enumerate(needs) if not need.parts]
        if others:
            for head, need in zip(others, self._needs_of_components(others), strict=True):
                needs[head] = need
        return needs

    def _needs_of_components(self, heads: Sequence[int]) -> list[Need]:
        """What each of some heads needs that do not need the spike: components, or the position."""
        effect, components = self.effect.only(heads), self.effect.components
        lost = effect.lost([*one_by_one(components), self.edit((POSITION,))])
        needed = effect.needed(components, lost[:-1]).T.tolist()
        made: set[Part] = {*self.makers}
        made |= {Component("attention", maker.layer) for maker in self.makers if isinstance(maker, Head)}
        needs = [Need()] * len(heads)
        for number in range(len(heads)):
            found = tuple(compress(components, needed[number]))
            if found:
                needs[number] = Need(found, by_spike=not made.isdisjoint(found))
            elif float(lost[-1, number]) < NEEDED:
                needs[number] = Need((POSITION,))
        return needs

    def groups(self) -> tuple[Readers, ...]:
        """The heads by what they need, the largest group first."""
        by_need: dict[Need, list[int]] = {}
        for head, need in enumerate(self.needs()):
            by_need.setdefault(need, []).append(head)
        by_size = sorted(by_need.items(), key=lambda group: -len(group[1]))
        return tuple(self._group(need, numbers) for need, numbers in by_size)

    def _group(self, need: Need, numbers: Sequence[int]) -> Readers:
        """The heads that need the same parts, without these and under the controls of that."""
        effect = self.effect.only(numbers)
        parts = need.parts
        swap = tuple(part for part in parts if isinstance(part, Component | Head))
        if not need.by_spike and swap and POSITION not in parts:
            parts = tuple(effect.with_heads(swap, alone=True))
        others, name = [], ""
        if parts and POSITION not in parts:
            others, name = beside(self.setup, parts, self.neurons, self.effect.depth - 1, self.effect.components)
        edits = [self.edit(parts), *others]
        intact, edited, *random = effect.values(edits)
        attention = float(intact.mean())
        tried = Search("components and neurons, alone and in sets", len(effect.components) + len(self.neurons))
        if not parts:
            return readers_of(effect.heads, intact, intact, (), tried)
        contrasts = [INTACT]
        if POSITION in parts:
            typical, given = (effect.values(edits, reverse=True).mean(1) / attention).tolist()
            contrasts = [Contrast("other", typical, 1, "an ordinary position")]
            contrasts.append(Contrast("other", given, 1, "an ordinary position with all that is written there"))
        elif random:
            contrasts.append(by_chance(parts, torch.stack(random).mean(1) / attention, name))
        readers = readers_of(effect.heads, intact, edited, parts, tried)
        if len(contrasts) < 2:
            return readers
        claim = Claim(
            role="carries",
            subject=parts,
            outcome=Outcome("attention", heads=readers.heads),
            place=self.place,
            value=float(edited.mean()) / attention,
            contrasts=tuple(contrasts),
            draws=len(effect.ids),
            search=tried,
            margin=margin_of((edited / intact).numpy()) if len(effect.ids) > 1 else None,
        )
        return replace(readers, by_spike=need.by_spike, claim=claim)
