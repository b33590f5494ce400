"""The heads that attend to a place, by what they need: the neurons of its spike, components, or two of these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, compress

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws
from sinkscope.results.claims import NEEDED, Claim, Contrast, Outcome, Search
from sinkscope.results.notation import head_name
from sinkscope.results.parts import Component, Head, Neuron, Part, Parts, neurons_of
from sinkscope.sinks.find.records import Readers
from sinkscope.sinks.removal.components import Edit, Heads, Sites, edit_of, heads_of, one_by_one, silencing
from sinkscope.sinks.removal.position_effect import PositionEffect
from sinkscope.sinks.removal.search import CONTROL_DRAWS, random_sets

PAIRED = 6  # components that are removed in pairs for heads that need none alone
POSITION = Component("position")


@dataclass(frozen=True)
class Need:
    """What a head needs.

    Attributes:
        parts: The parts; empty if nothing was found.
        alone: Whether it needs each of these alone, and not only all together.
        by_spike: Whether they are what makes the spike of the place.
    """

    parts: Parts = ()
    alone: bool = True
    by_spike: bool = False


@dataclass(frozen=True, eq=False)
class HeadByHead:
    """What each head that attends to a place needs.

    Attributes:
        setup: The model.
        place: The words for the place.
        effect: The attention of these heads, in some texts.
        sets: The neurons that make each part of the spike of the place; none if it has none, or components make it.
        further: Neurons that add to it, but are in no such set.
        makers: Components that make the spike.
    """

    setup: Setup
    place: str
    effect: PositionEffect
    sets: tuple[Sites, ...] = ()
    further: Sites = ()
    makers: Parts = ()

    def edit(self, parts: Parts) -> Edit:
        """What removes all of these parts."""
        if POSITION in parts:
            return Edit(swap=tuple(self.effect.written))
        return edit_of(parts)

    @cached_property
    def sites(self) -> Sites:
        """The neurons of all parts of the spike."""
        return tuple(dict.fromkeys(site for each in self.sets for site in each))

    @cached_property
    def spike(self) -> Parts:
        """What makes the spike of the place."""
        return neurons_of(self.sites) or self.makers

    @cached_property
    def elsewhere(self) -> Bool[Tensor, "text pos"]:
        """As many other positions after the place, drawn."""
        ids, places = self.effect.ids, self.effect.places
        if places is None:
            places = torch.arange(ids.shape[1]) == torch.as_tensor(self.effect.at).expand(len(ids))[:, None]
        generator = draws(self.setup.seed, f"positions beside {self.place}")
        order = torch.rand(ids.shape, generator=generator).masked_fill(places, 2.0).argsort(1).argsort(1)
        return (order < places.sum(1, keepdim=True)) & ~places

    def needs(self) -> list[Need]:
        """What each head needs: the spike and neurons of it, or else components, or two of both."""
        each = self.parts_of_spike
        needs = [Need()] * len(self.effect.heads)
        if each:
            of_parts = (self.effect.lost([self.edit(parts) for parts in each]) >= NEEDED).T.tolist()
            several = len({tuple(of_head) for of_head in of_parts if of_head[0]}) > 1
            for head, of_head in enumerate(of_parts):
                if of_head[0]:
                    own = [part for parts in compress(each[1:], of_head[1:]) for part in parts]
                    needs[head] = self._need_of_spike(own, several=several)
        others = [head for head, need in enumerate(needs) if not need.parts]
        if others:
            for head, need in zip(others, self._needs_of_components(others), strict=True):
                needs[head] = need
        return needs

    def _needs_of_components(self, heads: Sequence[int]) -> list[Need]:
        """What each of some heads needs that do not need the spike: components, the position, or two parts."""
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
        without = [number for number, need in enumerate(needs) if not need.parts]
        if without:
            order = lost[:-1, without].mean(1).nan_to_num().argsort(descending=True, stable=True)[:PAIRED]
            promising: list[Parts] = [(components[index],) for index in order.tolist()]
            pairs = self._pairs([heads[number] for number in without], [*promising, *self.parts_of_spike[:1]])
            for number, need in zip(without, pairs, strict=True):
                needs[number] = need
        return needs

    @cached_property
    def parts_of_spike(self) -> list[Parts]:
        """What makes the spike, then each part of it, and what adds to it; nothing if there is no spike."""
        if not self.spike:
            return []
        each: list[Parts] = [self.spike]
        if len(self.sets) > 1:
            each += [neurons_of(sites) for sites in self.sets]
        elif len(self.sites) > 1:
            each += [(neuron,) for neuron in neurons_of(self.sites)]
        return each + [(neuron,) for neuron in neurons_of(self.further)]

    def _need_of_spike(self, own: Sequence[Part], *, several: bool) -> Need:
        """The spike, or the parts of it that a head needs alone, if heads need different ones or it has several."""
        if not own or not (several or len(self.sets) > 1):
            return Need(self.spike, by_spike=True)
        if self.further:
            own = list(dict.fromkeys([*self.spike, *own]))
        return Need(tuple(own), by_spike=True)

    def _pairs(self, heads: Sequence[int], promising: Sequence[Parts]) -> list[Need]:
        """For each of some heads that need nothing alone, two parts that it needs together."""
        pairs = [one + other for one, other in combinations(promising, 2)]
        if not pairs:
            return [Need()] * len(heads)
        most = self.effect.only(heads).lost([self.edit(pair) for pair in pairs]).max(0)
        best = zip(most.values.tolist(), most.indices.tolist(), strict=True)
        return [Need(pairs[index] if lost >= NEEDED else (), alone=False) for lost, index in best]

    def groups(self) -> tuple[Readers, ...]:
        """The heads by what they need, the largest group first."""
        by_need: dict[Need, list[int]] = {}
        for head, need in enumerate(self.needs()):
            by_need.setdefault(need, []).append(head)
        by_size = sorted(by_need.items(), key=lambda group: (-len(group[1]), not group[0].alone))
        return tuple(self._group(need, numbers) for need, numbers in by_size)

    def _group(self, need: Need, numbers: Sequence[int]) -> Readers:
        """The heads that need the same parts, without these and under the controls of that."""
        effect = self.effect.only(numbers)
        parts = need.parts
        if need.alone and not need.by_spike and parts and POSITION not in parts:
            swap = tuple(part for part in parts if isinstance(part, Component | Head))
            parts = tuple(effect.with_heads(swap, alone=True))
        edits: list[Edit] = []
        if POSITION in parts:
            edits = [self.edit(parts)]
        elif parts:
            edits = self.beside_random(parts, effect.depth - 1)
        intact, *edited = effect.values(edits)
        attention = float(intact.mean())
        tried = len(self.effect.components) + len(self.sites)
        search = Search("components and neurons, alone and in pairs", tried)
        claim = None
        names, before, after = ranked_heads(effect.heads, intact, edited[0] if edited else intact)
        if edited:
            left = torch.stack(edited).mean(1) / attention
            contrasts = [Contrast("intact", 1.0)]
            if POSITION in parts:
                typical, given = (effect.values(edits, reverse=True).mean(1) / attention).tolist()
                contrasts = [Contrast("other", typical, 1, "an ordinary position")]
                contrasts.append(Contrast("other", given, 1, "an ordinary position with all that is written there"))
            elif len(edited) > 1:
                contrasts.append(by_chance(parts, left[1:]))
            else:
                swapped = effect.values(edits, elsewhere=self.elsewhere)[1]
                contrasts.append(Contrast("elsewhere", float(swapped.mean()) / attention))
            claim = Claim(
                role="carries",
                subject=parts,
                outcome=Outcome("attention", heads=names),
                place=self.place,
                value=float(left[0]),
                contrasts=tuple(contrasts),
                draws=len(effect.ids),
                search=search,
                margin=margin_of((edited[0] / intact).numpy()) if len(effect.ids) > 1 else None,
            )
        return Readers(names, before, after, parts, need.by_spike, claim, search)

    def beside_random(self, parts: Parts, depth: int) -> list[Edit]:
        """The edit of some parts, and 20 with as many random neurons of the same layers, or heads up to a layer.

        Only the edit itself if there are too few others.
        """
        edit = self.edit(parts)
        return [edit, *random_edits(self.setup, edit, self.sites, depth)]


def ranked_heads(
    heads: Heads, intact: Float[Tensor, " head"], left: Float[Tensor, " head"]
) -> tuple[tuple[str, ...], tuple[float, ...], tuple[float, ...]]:
    """Names of heads, those with most attention first, and the attention of each before and after an edit."""
    ranked = intact.argsort(descending=True, stable=True)
    names = tuple(head_name(*heads[number]) for number in ranked.tolist())
    return names, tuple(intact[ranked].tolist()), tuple(left[ranked].tolist())


def by_chance(parts: Parts, left: Float[Tensor, " draw"]) -> Contrast:
    """What is left without random parts: of neurons the least; of heads the median, as some are of the circuit."""
    if all(isinstance(part, Neuron) for part in parts):
        return Contrast("random", float(left.min()), len(left))
    return Contrast("random", float(left.median()), len(left))


def random_edits(setup: Setup, edit: Edit, excluded: Sites, depth: int) -> list[Edit]:
    """20 edits of as many random neurons of the same layers, or of random heads up to a layer; none if too few."""
    if edit.zero and not edit.swap:
        return silencing(random_sets(setup.target, edit.zero, excluded, setup.seed))
    pool: list[Head] = []
    for layer in filter(setup.target.has_attention, range(depth + 1)):
        pool += heads_of(setup.target, layer)
    whole = {part.layer for part in edit.swap if isinstance(part, Component) and part.kind == "attention"}
    barred: set[Part] = {*edit.swap}
    pool = [head for head in pool if head not in barred and head.layer not in whole]
    size = max(1, len(edit.swap))
    if size > len(pool):
        return []
    edits: list[Edit] = []
    generator = draws(setup.seed, f"heads beside {edit.swap}")
    for _ in range(CONTROL_DRAWS):
        drawn = torch.randperm(len(pool), generator=generator)[:size].tolist()
        edits.append(Edit(swap=tuple(pool[index] for index in drawn)))
    return edits
