"""The circuit of the attention sink, from the first token to the heads that attend to it, with evidence per step."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from einops import einsum, rearrange, reduce
from jaxtyping import Float, Int
from plotly.subplots import make_subplots
from torch import Tensor

from sinkscope.files.notation import head_name, listed, neuron_name
from sinkscope.files.tables import percent
from sinkscope.measure import Number, Positive, Result, Setup, measurement
from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.style import BLUE, GREY, ORANGE, finished
from sinkscope.models.target import norm_of
from sinkscope.sinks.first_token.attribution import Attribution, KeyScores, NeuronInputs, attribute
from sinkscope.sinks.first_token.effects import Component, Edit, effects
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.position_effect import PositionEffect, random_sets
from sinkscope.sinks.first_token.result import CONTROL_DRAWS, FindSinks, Sites
from sinkscope.sinks.tokens import prefixes
from sinkscope.trace.run import trace

NEURON_SHARE = 0.01  # neurons that write less of the spike are backups or not involved
TESTED_SHARE = 0.1  # a component whose share is at least this is replaced by itself
READING = 0.3  # mean attention from which a head reads the first token (Gu et al. 2024)
TEXTS = 2  # pieces of typical text
TYPICAL_PLACES = 6  # positions of each piece that the first token is compared with
FIGURE_COMPONENTS = 12


def _edge(
    step: str, source: str, target: str, share: Any, necessity: Any, control: Any, sufficiency: Any
) -> dict[str, Any]:
    """A row of the table; numbers that were not measured are None instead of NaN."""
    row: dict[str, Any] = {"step": step, "source": source, "target": target}
    numbers = {"share": share, "necessity": necessity, "necessity_control": control, "sufficiency": sufficiency}
    for name, value in numbers.items():
        row[name] = None if value is None or np.isnan(value) else float(value)
    return row


@dataclass(frozen=True)
class MarkEvidence:
    """What marks a position: the exact share of every component, and what replacing it does.

    Attributes:
        components: Everything that writes into the inputs: heads, MLPs, embeddings and biases.
        inputs: What is written into: "gate of layer 1", "up of layer 1", "keys", or nothing if shares are not known.
        share: Exact share of each component in what distinguishes the position from typical ones in the inputs. The
            gate and up inputs of a layer together sum to one.
        necessity: Share of the effect that is lost if the component writes at the position what it writes at a typical
            one. NaN where that was not tested: shares below 0.1.
        sufficiency: Share of the effect that a typical position gains if the component writes there what it writes at
            the position.
        necessity_control: Largest loss of 20 single random heads. None if there are too few heads.
        sufficiency_control: Largest gain of 20 single random heads.
        marks: The components that make the mark: those that are needed alone or, if none is, the smallest set found.
        marks_necessity: Share of the effect that is lost without all of them.
        marks_control: Largest loss without as many random heads.
        needed_alone: Whether each mark alone takes away at least half of the effect, and more than its control. If the
            attention to the first token needs the spike, that is judged by the attention, because heads may read a
            spike of half the size as well.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}

    components: tuple[str, ...]
    inputs: tuple[str, ...]
    share: Float[np.ndarray, "component input"]
    necessity: Float[np.ndarray, " component"]
    sufficiency: Float[np.ndarray, " component"]
    necessity_control: float | None
    sufficiency_control: float | None
    marks: tuple[str, ...]
    marks_necessity: float | None
    marks_control: float | None
    needed_alone: bool

    def rows(self, step: str) -> list[dict[str, Any]]:
        """A row for each component that was replaced."""
        rows: list[dict[str, Any]] = []
        for number, name in enumerate(self.components):
            if np.isnan(self.necessity[number]) and name not in self.marks:
                continue
            target, share = "spike", np.nan
            if self.inputs:
                largest = int(np.abs(self.share[number]).argmax())
                target, share = self.inputs[largest], self.share[number, largest]
            control = self.necessity_control
            rows.append(_edge(step, name, target, share, self.necessity[number], control, self.sufficiency[number]))
        return sorted(rows, key=lambda row: row["source"] not in self.marks)

    def in_words(self) -> str:
        """What is lost without the marks, beside random heads."""
        control = "" if self.marks_control is None else f" (random heads: at most {percent(self.marks_control)})"
        if not self.marks:
            largest = int(np.nan_to_num(self.necessity, nan=-1.0).argmax())
            share = percent(float(self.necessity[largest]))
            return f"no component is needed alone; most is lost without {self.components[largest]}, {share}"
        names, lost = listed(self.marks), percent(self.marks_necessity)
        if not self.needed_alone:
            return f"no component is needed alone; {lost} is lost without {names} together{control}"
        verb, them = ("is", "it") if len(self.marks) == 1 else ("are each", "them")
        return f"{names} {verb} needed: {lost} is lost without {them}{control}"


@dataclass(frozen=True)
class NeuronEvidence:
    """The sink neurons, and what their columns write.

    Attributes:
        neurons: The neurons.
        share: Share of the first token's residual stream that the neuron's column writes.
        necessity: Share of the spike that is lost if the neuron is zero.
        sufficiency: Share of the spike that a typical position gains if what the neuron writes is added there.
        set_necessity: The loss without all neurons.
        set_sufficiency: The gain from all neurons.
        necessity_control: Largest loss without as many random neurons of the same layers, over 20 draws.
        sufficiency_control: Largest gain from these.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}

    neurons: tuple[str, ...]
    share: Float[np.ndarray, " neuron"]
    necessity: Float[np.ndarray, " neuron"]
    sufficiency: Float[np.ndarray, " neuron"]
    set_necessity: float
    set_sufficiency: float
    necessity_control: float
    sufficiency_control: float

    def rows(self) -> list[dict[str, Any]]:
        """A row per neuron."""
        rows: list[dict[str, Any]] = []
        for number, name in enumerate(self.neurons):
            tested = self.necessity[number], self.necessity_control, self.sufficiency[number]
            rows.append(_edge("column", name, "spike", self.share[number], *tested))
        return rows


@dataclass(frozen=True)
class ReaderEvidence:
    """The heads that give the first token at least 0.3 of their attention, those with most attention first.

    Attributes:
        carried_by: What their keys need: "spike", or the components that mark the first token for them.
        heads: The heads.
        attention: Mean attention of each head to the first token.
        attention_without: The same without what carries it: the sink neurons are silent, or the components are
            replaced.
        share: Exact share of what carries it in the score of the first token's key beyond that of typical keys. NaN
            where the architecture does not expose its keys.
        necessity: Share of the attention that is lost without it.
        sufficiency: Share of the attention that a typical position gains with it. NaN where that cannot be tested.
        necessity_control: Largest loss when the same number of random neurons or heads is silenced or replaced.
        control: The lowest attention of all heads together in that control. None if there are too few.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"arbitrary_types_allowed": True}

    carried_by: tuple[str, ...]
    heads: tuple[str, ...]
    attention: Float[np.ndarray, " head"]
    attention_without: Float[np.ndarray, " head"]
    share: Float[np.ndarray, " head"]
    necessity: Float[np.ndarray, " head"]
    sufficiency: Float[np.ndarray, " head"]
    necessity_control: Float[np.ndarray, " head"]
    control: float | None

    @property
    def by_spike(self) -> bool:
        """Whether the attention needs the spike."""
        return self.carried_by == ("spike",)

    def rows(self) -> list[dict[str, Any]]:
        """A row per head."""
        rows: list[dict[str, Any]] = []
        for number, head in enumerate(self.heads):
            source = "spike" if self.by_spike else "marks"
            tested = self.necessity[number], self.necessity_control[number], self.sufficiency[number]
            rows.append(_edge("keys", source, head, self.share[number], *tested))
        return rows

    def in_words(self) -> str:
        """The attention with and without what carries it."""
        control = "" if self.control is None else f" ({self.control:.2f} in the random control)"
        carried = "the spike" if self.by_spike else listed(self.carried_by)
        return (
            f"without {carried} their attention falls from {self.attention.mean():.2f} to "
            f"{self.attention_without.mean():.2f}{control}"
        )


@dataclass(frozen=True, kw_only=True)
class Circuit(Result):
    """How the first token becomes a sink, step by step.

    Attributes:
        first_token: The token that stands first in the texts.
        sink_layer: The last layer whose MLP makes the spike. None if no MLP does.
        spike_by: The component that makes the spike: "MLP" or another one. None if there is no spike, or no single
            maker.
        first: What marks the first token for the spike. None if no MLP makes a spike.
        repetition: What marks the last of many repetitions. None if there is no spike, or if repetition makes none.
        repeated: The token that is repeated.
        repeats: How often it is repeated.
        neurons: The sink neurons. None if no set was found; the whole MLP of the sink layer then stands for them.
        keys: What marks the first token for the reading heads, if they do not need the spike.
        readers: The heads that read the first token. None if there are none.
        error: Largest distance of a sum of shares from the model's own value, relative to the largest such value.
    """

    percent: ClassVar[tuple[str, ...]] = ("share", "necessity", "necessity_control", "sufficiency")
    columns: ClassVar[tuple[str, ...]] = ("step", "source", "target", "share", "necessity", "necessity_control")
    glossary: ClassVar[dict[str, str]] = {
        "step": "what the edge belongs to",
        "target": "the input, or the head, that reads the source",
        "share": "exact share of the source in what distinguishes the first token in the input that is read",
        "necessity": "share of the effect that is lost without the source",
        "necessity_control": "largest loss with random heads or neurons instead",
        "sufficiency": "share of the effect that a typical position gains from the source",
    }

    first_token: str
    sink_layer: int | None
    spike_by: str | None = None
    first: MarkEvidence | None = None
    repetition: MarkEvidence | None = None
    repeated: str | None = None
    repeats: int | None = None
    neurons: NeuronEvidence | None = None
    keys: MarkEvidence | None = None
    readers: ReaderEvidence | None = None
    error: float | None = None

    def rows(self) -> list[dict[str, Any]]:
        """The edges, from the first token to the heads."""
        rows: list[dict[str, Any]] = []
        for step, marks in (("first token", self.first), ("repetition", self.repetition), ("keys", self.keys)):
            if marks is not None:
                rows += marks.rows(step)
        for evidence in (self.neurons, self.readers):
            if evidence is not None:
                rows += evidence.rows()
        return rows

    def conclusion(self) -> str:
        """What marks the first token, or what its readers need, with the control."""
        if self.first is not None:
            return f"For the first token's spike, {self.first.in_words()}."
        if self.spike_by is not None:
            return f"The {self.spike_by} makes the first token's spike without an MLP."
        if self.readers is not None:
            return f"Heads attend to the first token without a spike: {self.readers.in_words()}."
        return "No circuit: no MLP raises the first token's norm, and no head attends to the first token."

    def numbers(self) -> list[Number]:
        """The spike without its marks, and the attention without what carries it."""
        numbers: list[Number] = []
        if self.first is not None:
            numbers.append(Number("spike lost without its marks", self.first.marks_necessity, self.first.marks_control))
        if self.readers is not None:
            without = float(self.readers.attention_without.mean())
            numbers.append(Number("attention without what carries it", without, self.readers.control))
        return numbers

    def details(self) -> list[str]:
        """The neurons, repetition, the readers, and the numerical error of the shares."""
        lines: list[str] = []
        if self.neurons is not None:
            lost, chance = percent(self.neurons.set_necessity), percent(self.neurons.necessity_control)
            names = listed(self.neurons.neurons)
            lines.append(f"Without {names}, {lost} of the spike is lost (random neurons: at most {chance}).")
        if self.repetition is not None:
            lines.append(f"After {self.repeats} repetitions of {self.repeated!r}, {self.repetition.in_words()}.")
        if self.readers is not None and (self.first is not None or self.spike_by is not None):
            lines.append(f"{len(self.readers.heads)} heads read the first token; {self.readers.in_words()}.")
        if self.error is not None:
            lines.append(f"Shares sum to the model's own inputs up to {self.error:.0e} of the largest.")
        return lines


def draw(result: Circuit) -> go.Figure:
    """Share, necessity and control of the edges, step by step."""
    rows = result.rows()
    steps = list(dict.fromkeys(row["step"] for row in rows))
    fig = make_subplots(cols=max(1, len(steps)), subplot_titles=steps or ["no circuit"])
    for col, step in enumerate(steps, start=1):
        shown = [row for row in rows if row["step"] == step][:FIGURE_COMPONENTS]
        names = [html.escape(row["target"] if step == "keys" else row["source"]) for row in shown]
        for field, color in (("share", BLUE), ("necessity", ORANGE), ("necessity_control", GREY)):
            values = [row[field] for row in shown]
            fig.add_bar(x=names, y=values, name=field, marker_color=color, showlegend=col == 1, row=1, col=col)
    fig.update_yaxes(tickformat=".0%")
    return finished(fig, result, width=max(700, 350 * len(steps)), height=460)


@dataclass(frozen=True)
class Comparison:
    """Texts that share one first token, and the typical positions that it is compared with.

    Attributes:
        ids: The texts.
        other: The typical position that the first token trades places with.
        places: The (text, position) of first tokens, of `other`, and of more typical positions.
    """

    ids: Int[Tensor, "text pos"]
    other: int
    places: Int[Tensor, "place 2"]

    @classmethod
    def of(cls, setup: Setup, layer: int | None, shared_dims: Sequence[int]) -> Comparison:
        """Chooses positions whose norms after a layer are nearest to the median of their text."""
        ids = setup.ids[:TEXTS].clone()
        ids[:, 0] = ids[0, 0]
        name = f"blocks.{setup.n_layers - 1 if layer is None else layer}.hook_resid_post"
        norms = trace(setup.target, ids, [name], lambda resid: norm_of(resid, shared_dims))[name]
        distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
        length = ids.shape[1]
        begin, end = length // 8, max(length // 2, length // 8 + 1)
        other = begin + int(distance[:, begin:end].amax(0).argmin())
        places: list[tuple[int, int]] = []
        for text in range(len(ids)):
            nearest = [pos for pos in distance[text].argsort().tolist() if pos not in (0, other, length - 1)]
            typical = sorted(nearest[: length // 2])
            spaced = typical[:: max(1, len(typical) // TYPICAL_PLACES)]
            places += [(text, pos) for pos in (0, other, *spaced)]
        return cls(ids, other, torch.tensor(places))

    @property
    def first(self) -> Int[Tensor, " text"]:
        """Indices of the places of first tokens."""
        return (self.places[:, 1] == 0).nonzero().flatten()

    @property
    def typical(self) -> Int[Tensor, " pair"]:
        """Indices of the typical places."""
        return (self.places[:, 1] > 0).nonzero().flatten()

    @property
    def first_of_typical(self) -> Int[Tensor, " pair"]:
        """For each typical place, the index of the first token of the same text."""
        return self.first[self.places[self.typical, 0]]


@dataclass(frozen=True)
class InputShares:
    """Exact shares of components in what distinguishes a position in some inputs."""

    inputs: tuple[str, ...]
    components: tuple[Component, ...]
    values: Float[Tensor, "component input"]


@dataclass(frozen=True)
class _Spike:
    """The spike of a model, or its absence, and the texts on which its circuit is measured.

    Attributes:
        setup: The model and its text.
        comparison: Texts and typical positions.
        layer: The sink layer. None if no MLP makes a spike.
        sites: The sink neurons. If there are none, the whole MLP of the sink layer stands for them.
        shared_dims: Residual dimensions that are massive on all tokens and left out of norms.
    """

    setup: Setup
    comparison: Comparison
    layer: int | None
    sites: Sites
    shared_dims: tuple[int, ...]

    @classmethod
    def of(cls, setup: Setup, sinks: FindSinks) -> _Spike:
        """The spike as `find_sinks` found it, without neurons that write nothing of it and are no backups."""
        if sinks.sink_layer is None:
            return cls(setup, Comparison.of(setup, None, sinks.shared_dims), None, (), sinks.shared_dims)
        sites: list[tuple[int, ...]] = []
        backups: list[tuple[int, ...]] = []
        for causal_set in sinks.causal_sets:
            if causal_set.kind == "backup":
                backups += causal_set.edit_sites
            elif not sites:
                sites += causal_set.edit_sites
        sites += [neuron.site for neuron in sinks.causal if neuron.site not in sites]
        layer = max(sinks.sink_layer, *(site[0] for site in sites), 0)
        comparison = Comparison.of(setup, layer, sinks.shared_dims)
        spike = cls(setup, comparison, layer, tuple(sites), sinks.shared_dims)
        if not sites:
            return spike
        shares = spike.column_shares(spike.attribution())
        kept = tuple(site for site in sites if shares[site] >= NEURON_SHARE or site in backups)
        return replace(spike, sites=kept)

    def attribution(self, keys: Sequence[int] = ()) -> Attribution:
        """The inputs of the sink neurons and of the keys of some layers."""
        return attribute(self.setup.target, self.comparison.ids, self.comparison.places, self.sites, keys)

    def column_shares(self, attribution: Attribution) -> dict[tuple[int, ...], float]:
        """Share of the first token's residual stream after the last layer with sink neurons that each one writes."""
        first, inputs = self.comparison.first, attribution.inputs
        stream = inputs[max(inputs)].stream[first].mean(0)
        shares: dict[tuple[int, ...], float] = {}
        for of_layer in inputs.values():
            written = reduce(of_layer.written[:, first], "neuron text d -> neuron d", "mean")
            along = einsum(written, stream, "neuron d, d -> neuron") / stream.square().sum()
            shares |= dict(zip(of_layer.sites, along.tolist(), strict=True))
        return shares

    def norm_effect(self) -> PositionEffect:
        """The norm of the first token after the sink layer."""
        comparison = self.comparison
        return PositionEffect(
            self.setup.target, comparison.ids, 0, comparison.other, self.layer, without=self.shared_dims
        )

    def mark_evidence(
        self, effect: PositionEffect, depth: int, shares: InputShares, judge: PositionEffect | None = None
    ) -> MarkEvidence:
        """What marks the position of an effect.

        Args:
            effect: The effect.
            depth: The layer that reads: by its MLP or, if the effect is attention, by its keys.
            shares: Share of each component in the inputs that are written into.
            judge: The effect by which components are called needed, if it is a different one.
        """
        marks, seed = effect.marks(depth), self.setup.seed
        pool = self.heads(depth, marks)
        single, together = random_sets(pool, 1, seed), random_sets(pool, len(marks), seed)
        rows = dict(zip(shares.components, shares.values, strict=True))
        for mark in marks:
            rows.setdefault(mark, torch.zeros(len(shares.inputs)))
        single_loss = max(effect.necessity(single), default=None)
        alone = (judge or effect).necessity([(mark,) for mark in marks])
        tested: list[int] = []
        alone_sets: list[tuple[Component, ...]] = []
        for number, (component, row) in enumerate(rows.items()):
            if component in marks or bool((row.abs() >= TESTED_SHARE).any()):
                tested.append(number)
                alone_sets.append((component,))
        necessity, sufficiency = np.full((2, len(rows)), np.nan)
        necessity[tested] = effect.necessity(alone_sets)
        sufficiency[tested] = effect.sufficiency(alone_sets)
        return MarkEvidence(
            components=tuple(map(str, rows)),
            inputs=shares.inputs,
            share=torch.stack(list(rows.values())).numpy(),
            necessity=necessity,
            sufficiency=sufficiency,
            necessity_control=single_loss,
            sufficiency_control=max(effect.sufficiency(single), default=None),
            marks=tuple(map(str, marks)),
            marks_necessity=effect.necessity([marks])[0] if marks else None,
            marks_control=max(effect.necessity(together), default=None),
            needed_alone=min(alone, default=0.0) >= max(NEEDED, single_loss or 0.0),
        )

    def heads(self, depth: int, excluded: Sequence[Component]) -> list[Component]:
        """Heads of the layers up to one, except these."""
        target = self.setup.target
        heads: list[Component] = []
        for layer in range(depth + 1):
            for head in range(target.n_heads):
                component = Component("head", layer, head)
                if component not in excluded:
                    heads.append(component)
        return heads

    def writing(self, attribution: Attribution, first: Int[Tensor, " text"]) -> dict[int, NeuronInputs]:
        """The layers whose sink neurons write some of the spike; backups may be silent."""
        writing: dict[int, NeuronInputs] = {}
        for layer, inputs in attribution.inputs.items():
            stream = inputs.stream[first].mean(0)
            written = inputs.written[:, first].mean(1).sum(0)
            if float(written @ stream) >= NEURON_SHARE * float(stream.square().sum()):
                writing[layer] = inputs
        return writing

    def activation_shares(
        self, attribution: Attribution, first: Int[Tensor, " pair"], typical: Int[Tensor, " pair"]
    ) -> InputShares:
        """What each component adds to the neurons' activation through the gate and up factors; sums to 1 per layer."""
        names: list[str] = []
        columns: list[dict[Component, float]] = []
        for layer, inputs in self.writing(attribution, first.unique()).items():
            contrast = inputs.contrast(first, typical) * inputs.weight_in_stream(first.unique())
            by_part = reduce(contrast, "factor part neuron -> factor part", "sum") / contrast.sum()
            names += [f"{factor} of layer {layer}" for factor in inputs.factors]
            columns += [dict(zip(inputs.parts, of_factor, strict=True)) for of_factor in by_part.tolist()]
        components = tuple(dict.fromkeys(component for column in columns for component in column))
        values = [[column.get(component, 0.0) for column in columns] for component in components]
        return InputShares(tuple(names), components, torch.tensor(values).reshape(len(components), len(names)))

    def neuron_evidence(self, attribution: Attribution) -> NeuronEvidence:
        """What the columns of the neurons write."""
        effect, shares = self.norm_effect(), self.column_shares(attribution)
        random = self.random_neurons()
        chance = self.transplants(effect, random, self.attribution_of(random))
        own = self.transplants(effect, [*((site,) for site in self.sites), self.sites], attribution)
        return NeuronEvidence(
            neurons=tuple(neuron_name(*site) for site in self.sites),
            share=np.array([shares[site] for site in self.sites]),
            necessity=own[0, :-1],
            sufficiency=own[1, :-1],
            set_necessity=float(own[0, -1]),
            set_sufficiency=float(own[1, -1]),
            necessity_control=float(chance[0].max()),
            sufficiency_control=float(chance[1].max()),
        )

    def random_neurons(self) -> list[Sites]:
        """Random sets of as many neurons of the same layers (and experts)."""
        generator, target = torch.Generator().manual_seed(self.setup.seed), self.setup.target
        width = min(target.width(site[0], *site[1:-1]) for site in self.sites)
        sets: list[Sites] = []
        for _ in range(CONTROL_DRAWS):
            order = iter(torch.randperm(width, generator=generator).tolist())
            members: list[tuple[int, ...]] = []
            for site in self.sites:
                drawn = (*site[:-1], next(order))
                while drawn in self.sites:
                    drawn = (*site[:-1], next(order))
                members.append(drawn)
            sets.append(tuple(members))
        return sets

    def attribution_of(self, sets: Sequence[Sites]) -> Attribution:
        """What the neurons of some sets write."""
        sites = sorted({site for members in sets for site in members})
        return attribute(self.setup.target, self.comparison.ids, self.comparison.places, sites)

    def transplants(
        self, effect: PositionEffect, sets: Sequence[Sites], attribution: Attribution
    ) -> Float[np.ndarray, "direction set"]:
        """Necessity of neurons, and what their writing alone gives the typical position while they are silent there."""
        lost = effect.shares(effect.removed([Edit(zero=members) for members in sets]))
        gained = effect.shares(effect.given([self.transplant(members, attribution) for members in sets]))
        return np.array([lost, gained])

    def transplant(self, members: Sites, attribution: Attribution) -> Edit:
        """Silence neurons, and write at the typical position what they write at the first token."""
        add: list[tuple[int, Tensor]] = []
        for layer, inputs in attribution.inputs.items():
            own = [number for number, site in enumerate(inputs.sites) if site in members]
            if own:
                at_first = inputs.raw[own][:, self.comparison.first]
                add.append((layer, reduce(at_first, "neuron text d -> text d", "sum")))
        return Edit(zero=members, add=tuple(add))

    def reading_effect(self) -> PositionEffect | None:
        """The attention to the first token of the heads that read it; None if there are none.

        Only heads behind the sink layer count. If there are none, all heads count, and these cannot read the spike.
        """
        target, ids = self.setup.target, self.comparison.ids
        received = effects(target, ids, [], attention=True).intact_attention
        reading = reduce(received, "text layer head -> layer head", "mean") >= READING
        behind = 0 if self.layer is None else self.layer + 1
        if bool(reading[behind:].any()):
            reading[:behind] = False
        if not bool(reading.any()):
            return None
        return PositionEffect(target, ids, 0, self.comparison.other, heads=reading)

    def without_spike(self) -> Edit:
        """An edit that removes the spike."""
        if self.sites:
            return Edit(zero=self.sites)
        return Edit(swap=(Component("mlp", self.layer),))

    def reader_evidence(
        self, effect: PositionEffect, marks: tuple[Component, ...], attribution: Attribution
    ) -> ReaderEvidence:
        """How the reading heads depend on the spike or, if `marks` are given, on these components."""
        assert effect.heads is not None
        order = [(layer, head) for layer, head in effect.heads.nonzero().tolist()]
        if marks:
            pool = self.heads(max(layer for layer, _ in order) - 1, marks)
            removing = [effect.edit(members) for members in (marks, *random_sets(pool, len(marks), self.setup.seed))]
            giving = [] if Component("key bias") in marks else removing
        elif self.sites:
            random = self.random_neurons()
            of_random = self.attribution_of(random)
            removing = [Edit(zero=members) for members in (self.sites, *random)]
            giving = [self.transplant(self.sites, attribution)]
            giving += [self.transplant(members, of_random) for members in random]
        else:
            removing = giving = [self.without_spike()]
        removed = effect.removed(removing)
        lost = effect.shares_by_part(removed)
        gained = torch.full_like(lost, torch.nan)
        if giving:
            gained = effect.shares_by_part(effect.given(giving))
        intact = effect.intact.mean(0)
        left = intact - reduce(removed, "edit text head -> edit head", "mean")
        ranked = intact.argsort(descending=True, stable=True)
        shares = torch.tensor([self.key_share(attribution, *place, marks) for place in order])
        control = torch.full_like(lost[0], torch.nan) if len(lost) == 1 else lost[1:].amax(0)
        return ReaderEvidence(
            carried_by=tuple(map(str, marks)) or ("spike",),
            heads=tuple(head_name(*order[number]) for number in ranked.tolist()),
            attention=intact[ranked].numpy(),
            attention_without=left[0, ranked].numpy(),
            share=shares[ranked].numpy(),
            necessity=lost[0, ranked].numpy(),
            sufficiency=gained[0, ranked].numpy(),
            necessity_control=control[ranked].numpy(),
            control=None if len(left) == 1 else float(left[1:].mean(1).min()),
        )

    def key_contrast(self, scores: KeyScores) -> dict[Component, Float[Tensor, " head"]]:
        """What each component adds to the first token's score beyond that of typical keys, for the heads of a layer."""
        comparison = self.comparison
        difference = scores.scores[:, comparison.first_of_typical] - scores.scores[:, comparison.typical]
        contrast: dict[Component, Tensor] = {}
        for part, row in zip(scores.parts, reduce(difference, "part pair head -> part head", "mean"), strict=True):
            component = Component("key bias") if part.kind == "key bias" else part
            contrast[component] = row
        return contrast

    def key_shares(self, attribution: Attribution, heads: Sequence[tuple[int, int]]) -> InputShares:
        """What each component adds to the keys of several heads together; shares sum to one."""
        totals: dict[Component, float] = {}
        contrasts = {layer: self.key_contrast(scores) for layer, scores in attribution.keys.items()}
        for layer, head in heads:
            for component, row in contrasts.get(layer, {}).items():
                totals[component] = totals.get(component, 0.0) + float(row[head])
        if not totals:
            return InputShares((), (), torch.zeros(0, 0))
        values = torch.tensor(list(totals.values())) / sum(totals.values())
        return InputShares(("keys",), tuple(totals), rearrange(values, "component -> component 1"))

    def key_share(self, attribution: Attribution, layer: int, head: int, marks: tuple[Component, ...]) -> float:
        """Share of the spike, or of the marks, in what sets the first token's key apart for one head."""
        if layer not in attribution.keys:
            return float("nan")
        own, total = 0.0, 0.0
        for component, row in self.key_contrast(attribution.keys[layer]).items():
            writes_spike = component.kind == "sink neurons"
            if not self.sites:
                writes_spike = component == Component("mlp", self.layer)
            if component in marks or (not marks and writes_spike):
                own += float(row[head])
            total += float(row[head])
        return own / total


@measurement(group="Sinks", figure=draw, quick={"max_repeats": 64})
def circuit(setup: Setup, *, token: str | None = None, max_repeats: Positive | None = None) -> Circuit:
    """Trace the circuit of the attention sink from the first token to the heads that read it, and verify each step.

    Every input along the way is split into exact shares of the components that write into it. Components are then
    replaced at the first token by what they write at a typical token (necessity), and the reverse (sufficiency), with
    random components as the control. For a model without a spike or without a sink, the result says so.

    Args:
        token: The token to repeat. By default one of five words of the text, drawn by the seed.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.

    Example:
        sinkscope circuit --model llama-2-7b --html circuit.html
    """
    sinks = find_sinks.on(setup, tokens=None if token is None else [token], max_repeats=max_repeats)
    spike = _Spike.of(setup, sinks)
    result = Circuit(
        first_token=setup.tokenizer.decode(spike.comparison.ids[0, :1].tolist()),
        sink_layer=spike.layer,
    )
    if sinks.norm_spike is not None and 0 in sinks.norm_spike.positions:
        result = replace(result, spike_by=sinks.norm_spike.made_by)
    reading, by_spike = None, False
    sink = sinks.attention_sink
    if sink is not None and any(place.position == 0 for place in sink.positions):
        reading = spike.reading_effect()
    if reading is not None and spike.layer is not None:
        by_spike = reading.shares(reading.removed([spike.without_spike()]))[0] >= NEEDED
    errors: list[float] = []
    if spike.layer is not None:
        shares = InputShares((), (), torch.zeros(0, 0))
        if spike.sites:
            attribution = spike.attribution()
            errors += attribution.errors
            comparison = spike.comparison
            shares = spike.activation_shares(attribution, comparison.first_of_typical, comparison.typical)
            result = replace(result, neurons=spike.neuron_evidence(attribution))
        judge = reading if by_spike else None
        result = replace(result, first=spike.mark_evidence(spike.norm_effect(), spike.layer, shares, judge))
        result = _with_repetition(result, spike, sinks, errors)
    if reading is not None and reading.heads is not None:
        heads = [(layer, head) for layer, head in reading.heads.nonzero().tolist()]
        depth = max(layer for layer, _ in heads)
        attribution = spike.attribution(sorted({layer for layer, _ in heads}))
        errors += attribution.errors
        marks: tuple[Component, ...] = ()
        if not by_spike:
            marks = reading.marks(depth)
            keys = spike.mark_evidence(reading, depth, spike.key_shares(attribution, heads))
            result = replace(result, keys=keys)
        if marks or by_spike:
            result = replace(result, readers=spike.reader_evidence(reading, marks, attribution))
    return replace(result, error=max(errors, default=None))


def _with_repetition(result: Circuit, spike: _Spike, sinks: FindSinks, errors: list[float]) -> Circuit:
    """The same at the last of 1.5 times as many repetitions as a sink needs, for the word that needs fewest."""
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats > 1]
    if not words:
        return result
    word = min(words, key=lambda word: word.repeats or 0)
    setup, needed = spike.setup, word.repeats or 0
    repeats = needed + needed // 2
    if setup.target.max_positions is not None:
        repeats = min(repeats, setup.target.max_positions - 1)
    ids = torch.tensor([[prefixes(setup, [word.id])[0], *[word.id] * repeats]])
    shares = InputShares((), (), torch.zeros(0, 0))
    if spike.sites:
        attribution = attribute(setup.target, ids, torch.tensor([[0, repeats], [0, 1]]), spike.sites)
        errors += attribution.errors
        shares = spike.activation_shares(attribution, torch.tensor([0]), torch.tensor([1]))
    effect = PositionEffect(setup.target, ids, repeats, 1, spike.layer, without=spike.shared_dims)
    evidence = spike.mark_evidence(effect, spike.layer or 0, shares)
    return replace(result, repetition=evidence, repeated=word.token, repeats=repeats)
