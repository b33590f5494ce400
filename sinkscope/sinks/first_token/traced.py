"""Measuring one sink: what its spike needs, which neurons make it, and what each head that attends to it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, compress

import numpy as np
import torch
from einops import reduce
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.notation import head_name, neuron_name
from sinkscope.measure import Setup
from sinkscope.measure.evidence import NEEDED
from sinkscope.models.norms import norm_of
from sinkscope.sinks.first_token.effects import Component, Edit, effects, has_key_bias, one_by_one, writers
from sinkscope.sinks.first_token.members import RATE_EPS, Sites
from sinkscope.sinks.first_token.position_effect import (
    EFFECTIVE,
    NEARLY,
    Components,
    Marks,
    PositionEffect,
    random_swaps,
)
from sinkscope.sinks.first_token.result import FindSinks
from sinkscope.sinks.first_token.search import random_sets
from sinkscope.sinks.first_token.steps import KEYS, MARK, NEURONS, SPIKE, CircuitStep, Readers
from sinkscope.sinks.tokens import TokenRows
from sinkscope.trace.run import trace

PAIRED = 6  # parts that are removed in pairs for heads that need none alone


@dataclass(frozen=True)
class TracedPlace:
    """A sink, and the texts on which its circuit is measured.

    Attributes:
        setup: The model and its text.
        name: The position in words.
        ids: Texts that have the same sink at the same position.
        at: The position.
        other: The typical position that it trades places with.
        layer: The layer after which the spike is read. None if there is no spike.
        sites: The neurons that make the spike. If there are none, components that are needed stand for them.
        shared_dims: Residual dimensions that are massive on all tokens and left out of norms.
    """

    setup: Setup
    name: str
    ids: TokenRows
    at: int
    other: int
    layer: int | None
    sites: Sites
    shared_dims: tuple[int, ...]

    @classmethod
    def of(
        cls, setup: Setup, sinks: FindSinks, name: str, ids: TokenRows, at: int, layer: int | None, sites: Sites
    ) -> TracedPlace:
        """Chooses the typical position: its norms after the layer are nearest to the median of their text."""
        shared_dims = sinks.shared_dims
        site = f"blocks.{setup.n_layers - 1 if layer is None else layer}.hook_resid_post"
        norms = trace(setup.target, ids, [site], lambda resid: norm_of(resid, shared_dims))[site]
        distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
        distance[:, at] = torch.inf
        length = ids.shape[1]
        begin, end = length // 8, max(length // 2, length // 8 + 1)
        other = begin + int(distance[:, begin:end].amax(0).argmin())
        return cls(setup, name, ids, at, other, layer, sites, shared_dims)

    @property
    def spike(self) -> PositionEffect:
        """The norm of the position after the layer."""
        return PositionEffect(self.setup.target, self.ids, self.at, self.other, self.layer, without=self.shared_dims)

    def random_heads(self, depth: int, excluded: Sequence[Component], size: int) -> list[Edit]:
        """Edits that replace random heads of the layers up to one, except these."""
        layers = filter(self.setup.target.has_attention, range(depth + 1))
        heads = [Component("head", layer, head) for layer in layers for head in range(self.setup.n_heads)]
        return random_swaps([head for head in heads if head not in excluded], size, self.setup.seed)

    def swapped(self, depth: int, chosen: tuple[Component, ...]) -> list[Edit]:
        """Edits that replace the chosen components, and as many random heads; none if nothing was chosen."""
        if not chosen:
            return []
        return [Edit(swap=chosen), *self.random_heads(depth, chosen, len(chosen))]

    def silenced(self, sites: Sites) -> list[Edit]:
        """Edits that silence the neurons, and random sets of as many neurons of the same layers (and experts)."""
        generator = torch.Generator().manual_seed(self.setup.seed)
        return [Edit(zero=zero) for zero in (sites, *random_sets(self.setup.target, sites, self.sites, generator))]

    def attention(self) -> PositionEffect | None:
        """The attention to the position of all heads that attend to it; None if there are none."""
        target = self.setup.target
        received = effects(target, self.ids, [], at=self.at, attention=True).intact_attention
        reading = reduce(received, "text layer head -> layer head", "mean") > RATE_EPS
        if not bool(reading.any()):
            return None
        return PositionEffect(target, self.ids, self.at, self.other, heads=reading)


def _step(
    name: str,
    effect: PositionEffect,
    edits: dict[str, Edit],
    chosen: Sequence[str],
    together: Sequence[Edit],
    judges: Sequence[PositionEffect],
    control: float | None = None,
) -> CircuitStep:
    """What is lost of an effect under each of some edits, and without all that were chosen.

    Args:
        name: Name of the step.
        effect: The effect.
        edits: What removes each component or neuron, by its name.
        chosen: Those that are called needed.
        together: The edit that removes all of these, and its controls.
        judges: Effects by which they are called needed alone: at least one has to need them.
        control: The control of a single edit. None: that of all together.
    """
    single = list(edits.values())
    lost = effect.necessity([*single, *together])
    together_control = max(lost[len(single) + 1 :], default=None)
    return CircuitStep(
        name=name,
        components=tuple(edits),
        necessity=np.array(lost[: len(single)]),
        sufficiency=np.array(effect.sufficiency(single)),
        control=together_control if control is None else control,
        chosen=tuple(chosen),
        alone=np.max([judge.necessity([edits[one] for one in chosen]) for judge in judges], axis=0),
        together=lost[len(single)] if together else None,
        together_control=together_control,
    )


def mark_step(
    position: TracedPlace, name: str, effect: PositionEffect, marks: Marks, depth: int, judges: Sequence[PositionEffect]
) -> CircuitStep:
    """What an effect needs of the components before a layer, which reads it by its MLP or by its keys."""
    control = None
    if len(marks.chosen) != 1:  # for one component, the controls of all together are those of a single one
        control = max(effect.necessity(position.random_heads(depth, marks.chosen, 1)), default=None)
    edits = {str(one): Edit(swap=(one,)) for one in (*marks.chosen, *marks.effective)}
    together = position.swapped(depth, marks.chosen)
    return _step(name, effect, edits, tuple(map(str, marks.chosen)), together, judges, control)


@dataclass(frozen=True)
class Needs:
    """What a head needs: every one of the parts alone, or only all of them together."""

    parts: tuple[str, ...] = ()
    alone: bool = True


@dataclass(frozen=True)
class HeadByHead:
    """What each head that attends to a position loses.

    Attributes:
        position: The position.
        effect: The attention of these heads.
        spike: What removes the spike; None if there is none.
        neurons: What removes each neuron that makes it, by its name.
    """

    position: TracedPlace
    effect: PositionEffect
    spike: Edit | None
    neurons: dict[str, Edit]

    @cached_property
    def components(self) -> Components:
        """What may carry the position without a spike."""
        target = self.position.setup.target
        components = writers(target, self.depth)
        if has_key_bias(target):
            components.append(Component("key bias"))
        return tuple(components)

    @property
    def places(self) -> list[list[int]]:
        """Layer and number of each head."""
        assert self.effect.heads is not None
        return self.effect.heads.nonzero().tolist()

    @property
    def depth(self) -> int:
        """The last layer of a head."""
        return max(layer for layer, _ in self.places)

    def lost(self, edits: Sequence[Edit]) -> Float[Tensor, "edit head"]:
        """Share of its attention that each head loses under each edit."""
        if not edits:
            return torch.zeros(0, len(self.places))
        removed = reduce(self.effect.removed(edits), "edit text head -> edit head", "mean")
        return removed / self.effect.intact.mean(0)

    def needs(self) -> list[Needs]:
        """What each head needs: the spike, or else components, or else two of these together."""
        spikes = [] if self.spike is None else [self.spike]
        without_spike = self.lost(spikes)
        without_neuron = self.lost(list(self.neurons.values()))
        without_component = self.lost(one_by_one(self.components))
        bar = (NEARLY * without_component.amax(0)).clamp(min=NEEDED)
        needs: list[Needs] = []
        for head in range(len(self.places)):
            lost = (without_component[:, head] >= bar[head]).tolist()
            parts = list(map(str, compress(self.components, lost)))
            if spikes and float(without_spike[0, head]) >= NEEDED:
                own = zip(self.neurons, without_neuron[:, head].tolist(), strict=True)
                parts = [name for name, share in own if share >= NEEDED]
                parts = parts or [SPIKE]
            needs.append(Needs(tuple(parts)))
        self._add_pairs(needs, without_component)
        return self._as_one_spike(needs)

    def _add_pairs(self, needs: list[Needs], without_component: Float[Tensor, "edit head"]) -> None:
        """Pairs of parts that heads need which need none alone, the pair that takes most."""
        open_heads = [head for head, own in enumerate(needs) if not own.parts]
        if not open_heads:
            return
        order = without_component[:, open_heads].mean(1).argsort(descending=True, stable=True)[:PAIRED].tolist()
        parts = [Edit(swap=(self.components[index],)) for index in order]
        names = [str(self.components[index]) for index in order]
        if self.spike is not None:
            parts.append(self.spike)
            names.append(SPIKE)
        pairs = list(combinations(range(len(parts)), 2))
        both = [Edit((*parts[i].zero, *parts[j].zero), (*parts[i].swap, *parts[j].swap)) for i, j in pairs]
        lost = self.lost(both)
        for head in open_heads:
            best = int(lost[:, head].argmax()) if pairs else 0
            if pairs and float(lost[best, head]) >= NEEDED:
                needs[head] = Needs(tuple(names[index] for index in pairs[best]), alone=False)

    def _as_one_spike(self, needs: list[Needs]) -> list[Needs]:
        """The same, where neurons are named only if heads need different ones."""
        of_spike = {own for own in needs if set(own.parts) <= {SPIKE, *self.neurons} and own.parts}
        if len(of_spike) > 1:
            return needs
        return [Needs((SPIKE,)) if own in of_spike else own for own in needs]

    def groups(self) -> list[tuple[Readers, PositionEffect]]:
        """The heads by what they need, the largest group first, with the attention of each group."""
        by_needs: dict[Needs, list[int]] = {}
        for head, own in enumerate(self.needs()):
            by_needs.setdefault(own, []).append(head)
        groups = [self._group(own, heads) for own, heads in by_needs.items()]
        return sorted(groups, key=lambda group: -len(group[0].heads))

    def _group(self, needs: Needs, heads: list[int]) -> tuple[Readers, PositionEffect]:
        """The heads that need the same, without it and under its controls."""
        assert self.effect.heads is not None
        mask = torch.zeros_like(self.effect.heads)
        for head in heads:
            mask[tuple(self.places[head])] = True
        one = replace(self, effect=replace(self.effect, heads=mask))
        names, step, edits = needs.parts, None, []
        if set(names) <= {SPIKE, *self.neurons}:
            edits = one.without_spike(names) if names else []
        else:
            names, step, edits = one.without_components(needs)
        intact = one.effect.intact.mean(0)
        left = intact[None] * (1 - one.lost(edits)) if edits else intact[None]
        ranked = intact.argsort(descending=True, stable=True)
        readers = Readers(
            needs=names,
            heads=tuple(head_name(*one.places[number]) for number in ranked.tolist()),
            length=one.effect.ids.shape[1],
            attention=intact[ranked].double().numpy(),
            attention_without=left[0, ranked].double().numpy(),
            control=float(left[1:].mean(1).min()) if len(left) > 1 else None,
            keys=step,
        )
        return readers, one.effect

    def without_spike(self, names: Sequence[str]) -> list[Edit]:
        """What removes the spike or some of its neurons, and as many random neurons."""
        assert self.spike is not None
        if self.spike.zero:
            sites = self.spike.zero
            if tuple(names) != (SPIKE,):
                sites = tuple(site for name in names for site in self.neurons[name].zero)
            return self.position.silenced(sites)
        if self.position.layer is None or self.spike.swap[0].kind == "mlp":
            return [self.spike]
        return self.position.swapped(self.position.layer, self.spike.swap)

    def without_components(self, needs: Needs) -> tuple[tuple[str, ...], CircuitStep | None, list[Edit]]:
        """Components with heads in place of attention layers; the step; what removes them, and random heads."""
        members = tuple(one for one in self.components if str(one) in needs.parts)
        zero = self.spike.zero if self.spike is not None and SPIKE in needs.parts else ()
        chosen = members
        if needs.alone:
            chosen = self.effect.with_heads(members)
        lost = np.array(self.effect.necessity(one_by_one(self.components)))
        effective = tuple(one for one, share in zip(self.components, lost, strict=True) if share >= EFFECTIVE)
        step = mark_step(self.position, KEYS, self.effect, Marks(chosen, effective), self.depth - 1, [self.effect])
        edits = self.position.swapped(self.depth - 1, chosen)
        names = tuple(map(str, chosen))
        if SPIKE not in needs.parts:
            return names, step, edits
        return (*names, SPIKE), None, [Edit(zero, chosen), *edits[1:]]


def traced_place(position: TracedPlace, made_by_mlp: bool) -> tuple[tuple[CircuitStep, ...], tuple[Readers, ...]]:
    """The steps of a sink and the groups of its readers; `made_by_mlp` says whether MLPs make its spike."""
    spike, layer, sites = position.spike, position.layer, position.sites
    marks = Marks((), ()) if layer is None else spike.marks(layer)
    neurons = {neuron_name(*site): Edit(zero=(site,)) for site in sites}
    removing = None
    if sites:
        removing = Edit(zero=sites)
    elif layer is not None and made_by_mlp:
        removing = Edit(swap=(Component("mlp", layer),))
    elif marks.chosen:
        removing = Edit(swap=marks.chosen)
    attention = position.attention()
    groups: list[tuple[Readers, PositionEffect]] = []
    if attention is not None:
        groups = HeadByHead(position, attention, removing, neurons).groups()
    judges = [effect for readers, effect in groups if readers.need_the_spike] or [spike]
    steps: list[CircuitStep] = []
    if layer is not None:
        steps.append(mark_step(position, MARK, spike, marks, layer, judges))
    if sites:
        steps.append(_step(NEURONS, spike, neurons, tuple(neurons), position.silenced(sites), judges))
    return tuple(steps), tuple(readers for readers, _ in groups)
