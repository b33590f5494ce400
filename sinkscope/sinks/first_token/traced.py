"""Measuring one sink: what its spike needs, which neurons make it, and what each head that attends to it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np
import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from sinkscope.display.notation import head_name, neuron_name
from sinkscope.measure import Setup
from sinkscope.measure.evidence import NEEDED
from sinkscope.models.norms import norm_of
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.effects import Component, Edit, effects, mixing, writers
from sinkscope.sinks.first_token.members import CONTROL_DRAWS, RATE_EPS, Sites
from sinkscope.sinks.first_token.position_effect import Components, PositionEffect, heads_of
from sinkscope.sinks.first_token.search import random_sets
from sinkscope.sinks.first_token.steps import KEYS, MARK, NEURONS, SPIKE, CircuitStep, Readers
from sinkscope.sinks.tokens import TokenRows
from sinkscope.trace.run import trace

TEXTS = 2  # pieces of typical text
MORE_POSITIONS = (
    8  # typical ones, if the token embedding seems to be needed: a token there may be one that is not marked
)
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
        others: Places with other tokens that the same words mean; different neurons may make their spikes.
    """

    setup: Setup
    name: str
    ids: TokenRows
    at: int
    other: int
    spike: TracedSpike
    shared_dims: tuple[int, ...]
    others: tuple[TracedPlace, ...] = ()

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

    def with_more_tokens(self, effect: PositionEffect) -> PositionEffect:
        """The effect with several typical positions of each text, and so with more tokens."""
        length = self.ids.shape[1]
        typical = [place for place in range(length // 8, length // 2) if place != self.at]
        typical = typical[:: max(1, len(typical) // MORE_POSITIONS)] or [self.other]
        ids = effect.ids.repeat_interleave(len(typical), 0)
        return replace(effect, ids=ids, other=torch.tensor(typical).repeat(len(effect.ids)))

    @cached_property
    def attention(self) -> PositionEffect | None:
        """The attention to the position of all heads that attend to it; None if there are none."""
        target, ids = self.setup.target, self.ids[:TEXTS]
        received = effects(target, ids, [], at=self.at, attention=True).intact_attention
        reading = reduce(received, "text layer head -> layer head", "mean") > RATE_EPS
        if not bool(reading.any()):
            return None
        heads = [(layer, head) for layer, head in reading.nonzero().tolist()]
        return PositionEffect(target, ids, self.at, self.other, heads=heads)

    def judge(self, removing: Edit) -> PositionEffect:
        """The effect by which a neuron is called needed here: the attention that needs the spike, or else the norm.

        Args:
            removing: What removes the spike.
        """
        if self.attention is not None:
            lost = self.attention.lost([removing])[0]
            needing = (lost >= NEEDED).nonzero().flatten().tolist()
            if needing:
                return self.attention.only(needing)
        return self.norm(self.spike.layer)

    def random_heads(self, depth: int, excluded: Components, size: int) -> list[Edit]:
        """Edits that replace random heads of the layers up to one, except these; none if there are too few."""
        pool: list[Component] = []
        for layer in filter(self.setup.target.has_attention, range(depth + 1)):
            pool += heads_of(self.setup.target, layer)
        pool = [head for head in pool if head not in excluded]
        if not 0 < size <= len(pool):
            return []
        generator = torch.Generator().manual_seed(self.setup.seed)
        edits = []
        for _ in range(CONTROL_DRAWS):
            drawn = torch.randperm(len(pool), generator=generator)[:size].tolist()
            edits.append(Edit(swap=tuple(pool[index] for index in drawn)))
        return edits

    def swapped(self, depth: int, chosen: Components) -> list[Edit]:
        """Edits that replace the chosen components, and as many random heads."""
        return [Edit(swap=chosen), *self.random_heads(depth, chosen, len(chosen))]

    def silenced(self, sites: Sites) -> list[Edit]:
        """Edits that silence the neurons, and random sets of as many neurons of the same layers (and experts)."""
        generator = torch.Generator().manual_seed(self.setup.seed)
        return [
            Edit(zero=zero) for zero in (sites, *random_sets(self.setup.target, sites, self.spike.sites, generator))
        ]


def _step(
    name: str,
    effect: PositionEffect,
    edits: dict[str, Edit],
    chosen: Sequence[str],
    together: Sequence[Edit],
    judges: Sequence[PositionEffect] = (),
    single: Sequence[Edit] = (),
) -> tuple[CircuitStep, Float[Tensor, "state part"]]:
    """What is lost of an effect under each of some edits, and without all that were chosen.

    The effect itself comes second: without an edit, without all that were chosen, and under the controls of that.

    Args:
        name: Name of the step.
        effect: The effect.
        edits: What removes each component or neuron, by its name, the chosen ones first.
        chosen: Those that are called needed.
        together: The edit that removes all of these, and its controls.
        judges: Effects by which they are called needed alone, if not by this one: at least one has to need them.
        single: The controls of a single edit, if they are others.
    """
    values = effect.values([*edits.values(), *together, *single])
    whole = float((values[0] - effect.typical).mean())
    lost = ((values[0] - values[1:]).mean(1) / whole).tolist()
    each, end = len(edits), len(edits) + len(together)
    bar = min(EFFECTIVE, max(lost[:each]))
    named = {one: share for one, share in zip(edits, lost, strict=False) if one in chosen or share >= bar}
    together_control = max(lost[each + 1 : end], default=None)
    alone = [[named[one] for one in chosen]]
    if judges:
        alone = [judge.necessity([edits[one] for one in chosen]) for judge in judges]
    step = CircuitStep(
        name=name,
        components=tuple(named),
        necessity=np.array(list(named.values())),
        sufficiency=np.array(effect.sufficiency([edits[one] for one in named], whole)),
        control=max(lost[end:], default=together_control),
        chosen=tuple(chosen),
        alone=np.max(alone, axis=0),
        together=lost[each] if together else None,
        together_control=together_control,
    )
    return step, torch.cat([values[:1], values[1 + each : 1 + end]])


def before_mlp(target: Target, layer: int) -> list[Component]:
    """What writes before the MLP of a layer."""
    return [*writers(target, layer), *mixing(target, layer)]


def mark_step(
    position: TracedPlace,
    name: str,
    effect: PositionEffect,
    chosen: Components,
    candidates: Sequence[Component],
    judges: Sequence[PositionEffect] = (),
) -> tuple[CircuitStep, Float[Tensor, "state part"]]:
    """What an effect needs of components before the layer that reads it by its MLP or by its keys, as `_step` says."""
    edits = {str(one): Edit(swap=(one,)) for one in (*chosen, *candidates)}
    depth = max(one.layer or 0 for one in candidates)
    together, single = [], []
    if chosen:
        together = position.swapped(depth, chosen)
    if len(chosen) != 1:  # for one component, the controls of all together are those of a single one
        single = position.random_heads(depth, chosen, 1)
    return _step(name, effect, edits, tuple(map(str, chosen)), together, judges, single)


@dataclass(frozen=True)
class Needs:
    """What a head needs: every one of the parts alone, or only all of them together."""

    parts: tuple[str, ...] = ()
    alone: bool = True


@dataclass(frozen=True)
class HeadByHead:
    """What each head that attends to a position needs.

    Attributes:
        position: The position.
        heads: The attention of these heads.
        spike: What removes the spike; None if there is none.
        neurons: What removes each neuron that makes it, by its name.
    """

    position: TracedPlace
    heads: PositionEffect
    spike: Edit | None
    neurons: dict[str, Edit]

    @cached_property
    def parts(self) -> dict[str, Edit]:
        """What removes each part that a head may need: the spike, its neurons and the components."""
        parts = dict(self.neurons)
        if self.spike is not None:
            parts[SPIKE] = self.spike
        for component in self.heads.components:
            parts[str(component)] = Edit(swap=(component,))
        return parts

    def needs(self) -> list[Needs]:
        """What each head needs: the spike, or else components, or else two of these together."""
        components = self.heads.components
        lost = self.heads.lost(list(self.parts.values()))
        needed = lost >= NEEDED
        first = len(self.parts) - len(components)
        needed[first:] = self.heads.needed(components, lost[first:])
        needs: list[Needs] = []
        for head in range(lost.shape[1]):
            own = [name for name, of_head in zip(self.parts, needed[:, head].tolist(), strict=True) if of_head]
            if SPIKE in own:
                own = [name for name in own if name in self.neurons] or [SPIKE]
            else:
                own = [name for name in own if name not in self.neurons]
            needs.append(Needs(tuple(own)))
        self._add_pairs(needs, lost[first:])
        return self._as_one_spike(needs)

    def _add_pairs(self, needs: list[Needs], lost: Float[Tensor, "component head"]) -> None:
        """Pairs of parts that heads need which need none alone, the pair that takes most."""
        open_heads = [head for head, own in enumerate(needs) if not own.parts]
        order = lost[:, open_heads].mean(1).nan_to_num().argsort(descending=True, stable=True)[:PAIRED].tolist()
        names = [str(self.heads.components[index]) for index in order]
        if self.spike is not None:
            names.append(SPIKE)
        pairs = list(combinations(names, 2))
        if not pairs or not open_heads:
            return
        without_both = self.heads.lost([self.removal(pair) for pair in pairs])
        for head in open_heads:
            best = int(without_both[:, head].argmax())
            if float(without_both[best, head]) >= NEEDED:
                needs[head] = Needs(pairs[best], alone=False)

    def _as_one_spike(self, needs: list[Needs]) -> list[Needs]:
        """The same, where neurons are named only if heads need different ones."""
        of_spike = {own for own in needs if own.parts and {SPIKE, *self.neurons}.issuperset(own.parts)}
        if len(of_spike) > 1:
            return needs
        return [Needs((SPIKE,)) if own in of_spike else own for own in needs]

    def removal(self, names: Sequence[str]) -> Edit:
        """What removes all of these parts."""
        zero, swap = [], []
        for name in names:
            zero += self.parts[name].zero
            swap += self.parts[name].swap
        return Edit(tuple(zero), tuple(swap))

    def groups(self) -> list[tuple[Readers, PositionEffect]]:
        """The heads by what they need, the largest group first, with the attention of each group."""
        by_needs: dict[Needs, list[int]] = {}
        for head, own in enumerate(self.needs()):
            by_needs.setdefault(own, []).append(head)
        groups = [self._group(own, heads) for own, heads in by_needs.items()]
        return sorted(groups, key=lambda group: -len(group[0].heads))

    def _group(self, needs: Needs, numbers: Sequence[int]) -> tuple[Readers, PositionEffect]:
        """The heads that need the same, without it and under its controls."""
        heads = self.heads.only(numbers)
        components = tuple(one for one in heads.components if str(one) in needs.parts)
        if components and needs.alone:
            components = heads.with_heads(components, alone=True)
        names, keys = needs.parts, None
        if components and SPIKE not in names:
            names = tuple(map(str, components))
            keys, values = mark_step(self.position, KEYS, heads, components, heads.components)
        elif components:
            names = (*map(str, components), SPIKE)
            _, *random = self.position.swapped(heads.depth - 1, components)
            values = heads.values([Edit(self.parts[SPIKE].zero, components), *random])
        else:
            values = heads.values(self._without_spike(names) if names else [])
        intact, *without = values
        ranked = intact.argsort(descending=True, stable=True)
        readers = Readers(
            needs=names,
            heads=tuple(head_name(*heads.heads[number]) for number in ranked.tolist()),
            length=heads.ids.shape[1],
            attention=intact[ranked].double().numpy(),
            attention_without=(without[0] if without else intact)[ranked].double().numpy(),
            control=min([float(attention.mean()) for attention in without[1:]], default=None),
            keys=keys,
        )
        return readers, heads

    def _without_spike(self, names: Sequence[str]) -> list[Edit]:
        """What removes the spike or some of its neurons, and as many random neurons or heads."""
        removal = self.removal(names)
        if removal.zero:
            return self.position.silenced(removal.zero)
        layer = self.position.spike.layer
        if layer is None or removal.swap[0].kind == "mlp":
            return [removal]
        return self.position.swapped(layer, removal.swap)


def traced_place(position: TracedPlace) -> tuple[tuple[CircuitStep, ...], tuple[Readers, ...]]:
    """The steps of a sink and the groups of its readers."""
    made = position.spike
    spike, begun = position.norm(made.layer), position.norm(made.begun)
    before: list[Component] = []
    marks: Components = ()
    if made.begun is not None:
        before = before_mlp(begun.target, made.begun)
        marks = begun.marks(before)
        if len(marks) > 1 and Component("token embedding") in marks:
            begun = position.with_more_tokens(begun)
            marks = begun.marks(before)
    neurons = {neuron_name(*site): Edit(zero=(site,)) for site in made.sites}
    removing = None
    if made.sites:
        removing = Edit(zero=made.sites)
    elif made.layer is not None and made.by_mlp:
        removing = Edit(swap=(Component("mlp", made.layer),))
    elif marks:
        removing = Edit(swap=marks)
    groups: list[tuple[Readers, PositionEffect]] = []
    if position.attention is not None:
        groups = HeadByHead(position, position.attention, removing, neurons).groups()
    judges = [heads for readers, heads in groups if readers.need_the_spike]
    steps: list[CircuitStep] = []
    if before:
        steps.append(mark_step(position, MARK, begun, marks, before, judges)[0])
    if made.sites:
        silenced = position.silenced(made.sites)
        elsewhere = [other.judge(Edit(zero=made.sites)) for other in position.others]
        if elsewhere:
            judges = [*(judges or [spike]), *elsewhere]
        steps.append(_step(NEURONS, spike, neurons, tuple(neurons), silenced, judges)[0])
    return tuple(steps), tuple(readers for readers, _ in groups)
