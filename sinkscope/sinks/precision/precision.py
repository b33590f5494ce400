"""What rounding costs a model, and what is regained by keeping its sink exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import plotly.express as px
import plotly.graph_objects as go
import torch
from pydantic import Field

from sinkscope.errors import UnsupportedError
from sinkscope.measure import Result, ScanPart, Setup, measurement
from sinkscope.results.claims import Claim, Contrast, Outcome, Search, percent_pair
from sinkscope.results.notation import word_list
from sinkscope.results.parts import Component, Part, Parts, Tokens, in_words, neurons_of
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.patch.evaluate import held_out
from sinkscope.sinks.precision.exact import (
    ACTIVATIONS,
    DRAWS,
    Exact,
    Sink,
    compared_layers,
    comparisons,
    has_experts,
)
from sinkscope.sinks.precision.rounded import Rounded, Texts

Scheme = Literal["a8-tensor", "a8-token", "kv8", "kv4"]
SCHEMES: dict[str, dict[str, Any]] = {
    "a8-tensor": {"activations": 8, "scale": "tensor"},
    "a8-token": {"activations": 8},
    "kv8": {"kv": 8},
    "kv4": {"kv": 4},
}
"""What is rounded, and how: fields of `Quantize`."""
WORDS = {
    "a8-tensor": "activations to 8 bits per tensor",
    "a8-token": "activations to 8 bits per token",
    "kv8": "keys and values to 8 bits",
    "kv4": "keys and values to 4 bits",
}
NOTHING, PROJECTIONS, COSTLIEST = "nothing", "down projections", "costliest layers"
LAYERS = ("sink layers", COSTLIEST)
SELECTION = 2
"""Texts on which the costliest layers are found."""


@dataclass(frozen=True)
class Kept:
    """A rounded model of which something stays exact.

    Attributes:
        scheme: What is rounded, to how many bits, and of activations whether tokens share a scale.
        kept: What stays exact.
        kl: Divergence of the next token's distribution from that of the exact model, in nats.
        regained: Share of the divergence with nothing exact that is regained.
        margin: Two standard errors of `regained` over texts; None for too few texts.
        random: The largest share that as many random ones regain, over 3 draws; None if there are none.
        bits: Bits of a rounded number on average, with 16 for one that stays exact.
        per_bit: Nats regained for each bit that numbers take more on average.
        perplexity: Perplexity of the texts.
    """

    scheme: str
    kept: str
    kl: float
    regained: float
    margin: float | None
    random: float | None
    bits: float
    per_bit: float | None
    perplexity: float


@dataclass(frozen=True, kw_only=True)
class Precision(Result):
    """What rounding costs, and what is regained by keeping something exact.

    Attributes:
        rounded: What is rounded, and what stays exact.
        perplexity: Perplexity of the texts without rounding.
        costliest: As many layers as build the spike, or one, that regain most alone, on other texts, by scheme.
        place: The words for the places of the sink; empty if there is none.
        neurons: The neurons that make its spikes.
        layers: The layers that build them.
    """

    percent = ("regained", "margin", "random")
    columns = ("scheme", "kept", "kl", "regained", "random", "per_bit")
    table_of = "rounded"

    rounded: tuple[Kept, ...]
    perplexity: float
    costliest: dict[str, tuple[int, ...]]
    place: str
    neurons: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]

    @property
    def costs(self) -> list[Kept]:
        """Every scheme with nothing exact."""
        return [one for one in self.rounded if one.kept == NOTHING]

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What is left of each cost while something stays exact."""
        return tuple(self.claim_of(one) for one in self.rounded if one.kept != NOTHING)

    def claim_of(self, one: Kept) -> Claim:
        """What is left of a scheme's cost while something stays exact, beside random ones and nothing exact."""
        same = [other for other in self.rounded if other.scheme == one.scheme and other.kept != NOTHING]
        best = max(same, key=lambda other: other.regained)
        random = Contrast("other", 1.0, 1, "no others of that size")
        if one.random is not None:
            random = Contrast("random", 1 - one.random, DRAWS, "random ones")
        return Claim(
            role="protects",
            subject=self._parts(one),
            outcome=Outcome(f"the cost of {one.scheme}"),
            place=f"held-out text, with {one.kept} exact",
            value=min(1.0, 1 - one.regained),
            contrasts=(Contrast("intact", 1.0, 1, "nothing exact"), random),
            draws=self.settings.get("pieces", 1),
            search=Search("things", len(same), best.regained, best.kept),
            margin=one.margin,
        )

    def layers_of(self, one: Kept) -> tuple[int, ...]:
        """The layers that stay exact, or whose down projections do."""
        return self.costliest[one.scheme] if one.kept == COSTLIEST else self.layers

    def _parts(self, one: Kept) -> Parts:
        """What stays exact."""
        if one.kept == "sink neurons":
            return neurons_of(self.neurons)
        parts: list[Part] = []
        for layer in self.layers_of(one):
            if one.kept in LAYERS:
                parts.append(Component("attention", layer))
            if one.kept in (*LAYERS, PROJECTIONS):
                parts.append(Component("mlp", layer))
        return tuple(parts) or (Tokens("tokens kept exact"),)

    def best(self, scheme: str) -> Kept | None:
        """Of what regains at least half, beyond random ones, what takes the fewest bits; None if nothing does."""
        worth: list[Kept] = []
        for one in self.rounded:
            if one.scheme == scheme and one.kept != NOTHING and self.claim_of(one).verdict == "needed":
                worth.append(one)
        return min(worth, key=lambda one: one.bits, default=None)

    def shown_rows(self) -> list[dict[str, Any]]:
        """One row for each scheme and what was kept exact; the scheme that costs most stands first."""
        costs = {one.scheme: one.kl for one in self.costs}
        return sorted(self.rows(), key=lambda row: costs[row["scheme"]], reverse=True)

    def headline(self) -> Number | None:
        """What regains most of the largest cost, as the conclusion has it."""
        best = self.best(max(self.costs, key=lambda one: one.kl).scheme)
        if best is None:
            return super().headline()
        return Number(f"regained by {best.kept}, {best.scheme}", best.regained, best.random, best.margin)

    def conclusion(self) -> str:
        """The largest cost, and what regains most of it with the fewest bits, beside random ones."""
        cost = max(self.costs, key=lambda one: one.kl)
        said = f"Rounding {WORDS[cost.scheme]} costs {cost.kl:.2g} nats"
        best = self.best(cost.scheme)
        if best is None:
            search = next(claim for claim in self.claims if claim.outcome.kind.endswith(cost.scheme)).search
            return f"{said}; nothing kept exact regains half beyond random ones ({search})."
        name = f"the {best.kept}"
        if best.kept == "sink neurons":
            name = in_words(self.claim_of(best).subject, 2)
        elif best.kept in LAYERS:
            name = f"layer {word_list(self.layers_of(best), 2)}"
        claim = self.claim_of(best)
        regained, random = percent_pair(1 - claim.value, 1 - claim.control.value)
        return f"{said}; keeping {name} exact regains {regained} ({claim.control.in_words(())}: {random})."

    def details(self) -> list[str]:
        """What each scheme does to the perplexity and to repetition."""
        lines = []
        for cost in self.costs:
            change = cost.perplexity / self.perplexity - 1
            lines.append(f"{cost.scheme}: the perplexity changes by {change:+.2%}.")
        if self.place:
            return [*lines, f"The sink is at {self.place}."]
        return [*lines, "There is no sink."]

    def numbers(self) -> list[Number]:
        """The cost of each scheme, and what the sink's places and neurons regain."""
        numbers = []
        for one in self.rounded:
            if one.kept == NOTHING:
                numbers.append(Number(f"nats lost, {one.scheme}", one.kl))
            elif one.kept in ("sink places", "sink neurons"):
                label = f"regained by {one.kept}, {one.scheme}"
                numbers.append(Number(label, one.regained, one.random, one.margin))
        return numbers


def draw(result: Precision) -> go.Figure:
    """Draw the shares that are regained, beside those of random ones, a panel per scheme."""
    rows = result.rows()
    costs = {cost.scheme: f"{cost.scheme}: {cost.kl:.2g} nats" for cost in result.costs}
    for row in rows:
        row["scheme"] = costs[row["scheme"]]
    axes: dict[str, Any] = {"x": "kept", "y": ["regained", "random"], "facet_col": "scheme", "range_y": (-0.55, 1.05)}
    fig = px.scatter(rows, **axes, labels={"value": "regained", "kept": "", "variable": ""})
    return figure_of(fig.update_yaxes(tickformat=".0%"), result, width=1300, height=520, legend=-0.5, bottom=200)


@measurement(
    group="Sinks",
    order=6,
    help="Measure what rounding costs, and what to keep exact.",
    scan=ScanPart(11, topic="Precision", quick={"pieces": 8}, streams=False),
    figure=draw,
    loading="whole",
    quick={"schemes": ["a8-tensor"], "pieces": 3, "length": 16},
)
def precision(
    setup: Setup,
    *,
    schemes: Sequence[Scheme] = ("a8-tensor", "a8-token", "kv8", "kv4"),
    pieces: Annotated[int, Field(ge=2)] = 16,
    length: Annotated[int, Field(ge=8)] = 64,
) -> Precision:
    """Measure what rounding costs, and what is regained by keeping the sink's places, neurons or layers exact.

    Activations, or keys and values, are rounded as `Quantize` does it, and the next tokens of held-out text are
    compared with those of the exact model. What stays exact is compared with random ones of the same size: tokens,
    neurons of the same layers, down projections, layers. The first tokens are as many as a text has places of the sink,
    and the prefix is that of Chen et al. 2024 (PrefixQuant). Rounded numbers are stored as before, so no memory is
    saved here.

    Args:
        schemes: What to round: a8-tensor, a8-token (activations), kv8, kv4 (keys and values).
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.

    Example:
        sinkscope precision --model llama-2-7b --html precision.html
    """
    target = setup.target
    sink = Sink.of(find_sinks.on(setup))
    ids = held_out(setup, pieces, length)
    setup.record(pieces=len(ids), length=ids.shape[1])
    texts, other_texts = Texts.of(target, ids), Texts.of(target, setup.ids[:SELECTION, :length])
    compared = comparisons(setup, sink, ids)
    rounded = list[Kept]()
    costliest: dict[str, tuple[int, ...]] = {}
    for name in dict.fromkeys(schemes):
        scheme = SCHEMES[name]
        if ACTIVATIONS in scheme and has_experts(target):
            continue
        setup.progress(f"precision, {name}", len(costliest), len(schemes))
        costliest[name] = costliest_layers(other_texts, scheme)[: max(1, len(sink.layers))]
        cost = texts.rounded(scheme, Exact())
        rounded.append(_kept(name, NOTHING, cost, cost, ()))
        for what, (chosen, *random) in {**compared, COSTLIEST: compared_layers(setup, costliest[name])}.items():
            if not scheme.keys().isdisjoint(chosen.of):
                others = [texts.rounded(scheme, one) for one in random]
                rounded.append(_kept(name, what, texts.rounded(scheme, chosen), cost, others))
    if not rounded:
        raise UnsupportedError(
            f"{target.name} is a mixture of experts, of which only keys and values can be rounded: give --scheme kv8"
        )
    return Precision(
        rounded=tuple(rounded),
        perplexity=texts.exact.perplexity,
        costliest=costliest,
        place=word_list([place.words for place in sink.places]) if sink.places else "",
        neurons=sink.neurons,
        layers=sink.layers,
    )


def _kept(scheme: str, what: str, rounded: Rounded, cost: Rounded, random: Sequence[Rounded]) -> Kept:
    """What is regained by what stays exact, and by random ones, of what the scheme costs."""
    bits = rounded.bits(SCHEMES[scheme], cost)
    more_bits = bits - cost.bits(SCHEMES[scheme], cost)
    return Kept(
        scheme=scheme,
        kept=what,
        kl=rounded.divergence,
        regained=rounded.regained(cost),
        margin=rounded.margin(cost),
        random=max((one.regained(cost) for one in random), default=None),
        bits=bits,
        per_bit=(cost.divergence - rounded.divergence) / more_bits if more_bits else None,
        perplexity=rounded.perplexity,
    )


def costliest_layers(texts: Texts, scheme: dict[str, Any]) -> tuple[int, ...]:
    """The layers, the one first whose exactness leaves the smallest divergence."""
    left = [texts.rounded(scheme, Exact({"layers": [layer]})).divergence for layer in range(texts.target.n_layers)]
    return tuple(torch.tensor(left).argsort(stable=True).tolist())
