"""Measuring one sink: what its spike needs, which neurons make it, and what each head that attends to it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, compress
from typing import NamedTuple

import numpy as np
import torch
from einops import reduce

from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.measure.evidence import NEEDED
from sinkscope.models.draws import draws
from sinkscope.models.norms import norm_of
from sinkscope.models.target import Target
from sinkscope.results.notation import head_name, neuron_name
from sinkscope.sinks.circuit.steps import MARK, NEURONS, SPIKE, CircuitStep, Readers
from sinkscope.sinks.find.members import RATE_EPS
from sinkscope.sinks.removal.components import Component, Edit, Sites, heads_of, mixing, one_by_one, silencing, writers
from sinkscope.sinks.removal.effects import effects
from sinkscope.sinks.removal.position_effect import Components, PositionEffect
from sinkscope.sinks.removal.search import CONTROL_DRAWS, random_sets
from sinkscope.sinks.tokens import TokenRows

TEXTS = 2  # pieces of typical text
MORE_POSITIONS = 8  # typical positions, if the token embedding seems to be needed
EFFECTIVE = 0.1  # components that take away at least this share are named
PAIRED = 6  # components that are removed in pairs for heads that need none alone


@dataclass(frozen=True)
class TracedSpike:
    """What makes the spike of a place.

    Attributes:
        by_mlp: Whether MLPs make it.
        sites: The neurons. If there are none, components that are needed stand for them.
        layer: The layer after which the spike is read. None if there is no spike, or its maker is not known.
        begun: The layer after which it has begun: an earlier one, if it falls and rises again.
    """

    by_mlp: bool = False
    sites: Sites = ()
    layer: int | None = None
    begun: int | None = None


@dataclass(frozen=True)
class TracedPlace:
    """A sink, and the texts on which its circuit is measured.

    Attributes:
        setup: The model and its text.
        name: The position in words.
        ids: Texts that have the same sink at the same position.
        at: The position.
        other: The typical position that it trades places with.
        spike: What makes the spike.
        shared_dims: Residual dimensions that are massive on all tokens and left out of norms.
    """

    setup: Setup
    name: str
    ids: TokenRows
    at: int
    other: int
    spike: TracedSpike
    shared_dims: tuple[int, ...]

    @classmethod
    def of(
        cls, setup: Setup, name: str, ids: TokenRows, at: int, spike: TracedSpike, shared_dims: tuple[int, ...]
    ) -> TracedPlace:
        """Chooses the typical position: its norms after the layer are nearest to the median of their text."""
        layer = setup.n_layers - 1 if spike.layer is None else spike.layer
        site = f"blocks.{layer}.hook_resid_post"
        norms = trace(setup.target, ids[:TEXTS], [site], lambda resid: norm_of(resid, shared_dims))[site]
        distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
        distance[:, at] = torch.inf
        length = ids.shape[1]
        begin, end = length // 8, max(length // 2, length // 8 + 1)
        other = begin + int(distance[:, begin:end].amax(0).argmin())
        return cls(setup, name, ids, at, other, spike, shared_dims)

    def norm(self, layer: int | None) -> PositionEffect:
        """The norm of the position after a layer."""
        ids = self.ids[:TEXTS]
        return PositionEffect(self.setup.target, ids, self.at, self.other, layer, without=self.shared_dims)

    @cached_property
    def attention(self) -> PositionEffect | None:
        """The attention to the position of all heads that attend to it; None if there are none."""
        target, ids = self.setup.target, self.ids[:TEXTS]
        read = effects(target, ids, [], at=self.at, source=self.other, attention=True, keep=True)
        reading = reduce(read.intact_attention, "text layer head -> layer head", "mean") > RATE_EPS
        if not bool(reading.any()):
            return None
        heads = [(layer, head) for layer, head in reading.nonzero().tolist()]
        return PositionEffect(target, ids, self.at, self.other, heads=heads, known={False: read.intact})

    @cached_property
    def parts(self) -> dict[str, Edit]:
        """What removes each neuron of the spike, and the spike."""
        parts = {neuron_name(*site): Edit(zero=(site,)) for site in self.spike.sites}
        if self.spike.sites:
            parts[SPIKE] = Edit(zero=self.spike.sites)
        elif self.spike.by_mlp:
            parts[SPIKE] = Edit(swap=(Component("mlp", self.spike.layer),))
        elif self.marks:
            parts[SPIKE] = Edit(swap=self.marks)
        return parts

    @property
    def before(self) -> list[Component]:
        """What may mark the position for the spike: everything that writes before the MLP of the layer."""
        if self.spike.begun is None:
            return []
        return before_mlp(self.setup.target, self.spike.begun)

    @cached_property
    def marked(self) -> tuple[PositionEffect, Components]:
        """The norm where the spike begins, and what marks the position for it; nothing if there is no spike.

        If the token embedding seems to be needed, several typical positions of each text are looked at: a token there
        may be one that heads do not mark.
        """
        effect = self.norm(self.spike.begun)
        if self.spike.begun is None:
            return effect, ()
        marks = effect.marks(self.before)
        if len(marks) < 2 or Component("token embedding") not in marks:
            return effect, marks
        length = self.ids.shape[1]
        typical = [place for place in range(length // 8, length // 2) if place != self.at]
        typical = typical[:: max(1, len(typical) // MORE_POSITIONS)] or [self.other]
        ids = effect.ids.repeat_interleave(len(typical), 0)
        effect = replace(effect, ids=ids, other=torch.tensor(typical).repeat(len(effect.ids)), known={})
        return effect, effect.marks(self.before)

    @property
    def marks(self) -> Components:
        """What marks the position for the spike; empty if there is no spike."""
        return self.marked[1]

    def beside_random(self, removal: Edit, depth: int) -> list[Edit]:
        """An edit, and 20 with as many random neurons of the same layers, or random heads of the layers up to one.

        Only the edit itself if there are too few others.
        """
        if removal.zero:
            sets = random_sets(self.setup.target, removal.zero, self.spike.sites, self.setup.seed)
            return [removal, *silencing(sets)]
        pool: list[Component] = []
        for layer in filter(self.setup.target.has_attention, range(depth + 1)):
            pool += heads_of(self.setup.target, layer)
        pool = [head for head in pool if head not in removal.swap]
        size = max(1, len(removal.swap))
        edits = [removal]
        generator = draws(self.setup.seed, f"heads beside {removal.swap}")
        for _ in range(CONTROL_DRAWS if size <= len(pool) else 0):
            drawn = torch.randperm(len(pool), generator=generator)[:size].tolist()
            edits.append(Edit(swap=tuple(pool[index] for index in drawn)))
        return edits


def before_mlp(target: Target, layer: int) -> list[Component]:
    """What writes before the MLP of a layer."""
    return [*writers(target, layer), *mixing(target, layer)]


def measured_step(name: str, effect: PositionEffect, edits: dict[str, Edit], together: Sequence[Edit]) -> CircuitStep:
    """What is lost of an effect under each of some edits, and without all that were chosen.

    Args:
        name: Name of the step.
        effect: The effect.
        edits: What removes each component or neuron, by its name, the chosen ones first.
        together: The edit that removes all that were chosen, and its controls.
    """
    chosen = len(together[0].zero) or len(together[0].swap)
    values = effect.values([*edits.values(), *together])
    whole = float((values[0] - effect.typical).mean())
    lost = ((values[0] - values[1:]).mean(1) / whole).tolist()
    each = len(edits)
    bar = min(EFFECTIVE, max(lost[:each]))
    shown = []
    for number, share in enumerate(lost[:each]):
        if number < chosen or share >= bar:
            shown.append(number)
    names = list(edits)
    sufficiency = effect.sufficiency([edits[names[number]] for number in shown], whole)
    return CircuitStep(
        name=name,
        components=tuple(names[number] for number in shown),
        necessity=np.array([lost[number] for number in shown]),
        sufficiency=np.array(sufficiency),
        chosen=tuple(names[:chosen]),
        together=lost[each] if chosen else 0.0,
        control=max(lost[each + 1 :], default=None),
    )


def mark_step(position: TracedPlace, name: str) -> CircuitStep:
    """What the spike needs before the MLP of the layer in which it begins."""
    edits = {str(one): Edit(swap=(one,)) for one in (*position.marks, *position.before)}
    effect, marks = position.marked
    together = position.beside_random(Edit(swap=marks), position.spike.begun or 0)
    return measured_step(name, effect, edits, together)


# --- the heads ---------------------------------------------------------------------------------------------------


class Need(NamedTuple):
    """What a head needs.

    Attributes:
        names: The spike and perhaps neurons of it, or components; empty if nothing was found.
        alone: Whether it needs each of these alone, and not only all together.
    """

    names: tuple[str, ...] = ()
    alone: bool = True


@dataclass(frozen=True)
class HeadByHead:
    """What each head that attends to a position needs.

    Attributes:
        position: The position.
        heads: The attention of these heads.
    """

    position: TracedPlace
    heads: PositionEffect

    def removal(self, names: Sequence[str]) -> Edit:
        """What removes all of these parts."""
        parts = self.position.parts | {str(one): Edit(swap=(one,)) for one in self.heads.components}
        zero, swap = [], []
        for name in names:
            zero += parts[name].zero
            swap += parts[name].swap
        return Edit(tuple(zero), tuple(swap))

    def needs(self) -> list[Need]:
        """What each head needs: the spike and neurons of it, or else components."""
        needs = [Need()] * len(self.heads.heads)
        parts = self.position.parts
        if parts:
            needed = self.heads.lost(list(parts.values())) >= NEEDED
            of_heads = [tuple(compress(parts, of_head)) for of_head in needed.T.tolist()]
            several = len({names for names in of_heads if SPIKE in names}) > 1
            for head, names in enumerate(of_heads):
                if SPIKE in names:  # neurons are named only if heads need different ones
                    needs[head] = Need(names if several else (SPIKE,))
        others = [head for head, need in enumerate(needs) if not need.names]
        if others:
            for head, need in zip(others, self.needs_of_components(self.heads.only(others)), strict=True):
                needs[head] = need
        return needs

    def needs_of_components(self, heads: PositionEffect) -> list[Need]:
        """The components that each of some heads needs alone or, if there are none, two parts that it needs."""
        components = heads.components
        lost = heads.lost(one_by_one(components))
        needed = heads.needed(components, lost).T.tolist()
        needs = [Need(tuple(map(str, compress(components, of_head)))) for of_head in needed]
        without = [head for head, need in enumerate(needs) if not need.names]
        if without:
            order = lost[:, without].mean(1).nan_to_num().argsort(descending=True, stable=True)[:PAIRED]
            promising = [str(components[index]) for index in order.tolist()]
            for head, need in zip(without, self.pairs(heads.only(without), promising), strict=True):
                needs[head] = need
        return needs

    def pairs(self, heads: PositionEffect, promising: list[str]) -> list[Need]:
        """For each of some heads that need nothing alone, two parts that it needs together."""
        if SPIKE in self.position.parts:
            promising = [*promising, SPIKE]
        pairs = list(combinations(promising, 2))
        if not pairs:
            return [Need()] * len(heads.heads)
        most = heads.lost([self.removal(pair) for pair in pairs]).max(0)
        best = zip(most.values.tolist(), most.indices.tolist(), strict=True)
        return [Need(pairs[index] if lost >= NEEDED else (), alone=False) for lost, index in best]

    def groups(self) -> list[Readers]:
        """The heads by what they need, the largest group first."""
        by_need: dict[Need, list[int]] = {}
        for head, need in enumerate(self.needs()):
            by_need.setdefault(need, []).append(head)
        by_size = sorted(by_need.items(), key=lambda group: (-len(group[1]), not group[0].alone))
        return [self.group(need.names, numbers, alone=need.alone) for need, numbers in by_size]

    def group(self, needs: tuple[str, ...], numbers: Sequence[int], *, alone: bool = True) -> Readers:
        """The heads that need the same parts, alone or only together, without these and under the controls of that."""
        heads = self.heads.only(numbers)
        removal = self.removal(needs)
        if SPIKE not in needs and alone:
            removal = Edit(swap=heads.with_heads(removal.swap, alone=True))
            needs = tuple(map(str, removal.swap))
        elif len(needs) > 1 and alone:
            needs = tuple(name for name in needs if name != SPIKE)
        intact, *without = heads.values(self.position.beside_random(removal, heads.depth - 1) if needs else [])
        ranked = intact.argsort(descending=True, stable=True)
        return Readers(
            needs=needs,
            heads=tuple(head_name(*heads.heads[number]) for number in ranked.tolist()),
            attention=intact[ranked].double().numpy(),
            attention_without=(without[0] if without else intact)[ranked].double().numpy(),
            control=min([float(attention.mean()) for attention in without[1:]], default=None),
        )


def traced_place(position: TracedPlace) -> tuple[tuple[CircuitStep, ...], tuple[Readers, ...]]:
    """The steps of a sink and the groups of its readers."""
    made = position.spike
    steps: list[CircuitStep] = []
    readers: list[Readers] = []
    if position.before:
        steps.append(mark_step(position, MARK))
    if made.sites:
        neurons = {name: edit for name, edit in position.parts.items() if name != SPIKE}
        together = position.beside_random(position.parts[SPIKE], 0)
        steps.append(measured_step(NEURONS, position.norm(made.layer), neurons, together))
    if position.attention is not None:
        readers = HeadByHead(position, position.attention).groups()
    return tuple(steps), tuple(readers)
