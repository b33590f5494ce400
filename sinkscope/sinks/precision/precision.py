"""What rounding costs a model, and what is regained by keeping its sink exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Annotated, Any, Literal

import plotly.express as px
import plotly.graph_objects as go
import torch
from pydantic import Field

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.decode import greedy
from sinkscope.hooks.edit.quantize import Quantize
from sinkscope.measure import Result, ScanPart, Setup, Whole, measurement
from sinkscope.measure.evidence import Evidence, percent_pair
from sinkscope.models.target import Target
from sinkscope.results.notation import neuron_names, word_list
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.patch.evaluate import held_out
from sinkscope.sinks.precision.exact import (
    ACTIVATIONS,
    Exact,
    Sink,
    compared_layers,
    comparisons,
    has_experts,
)
from sinkscope.sinks.precision.rounded import Rounded, Texts
from sinkscope.sinks.tokens import TokenRows

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

    @property
    def is_worth_it(self) -> bool:
        """Whether at least half is regained, beyond the margin, and more than by random ones."""
        return self.margin is not None and Evidence(self.regained - self.margin, self.random).holds


@dataclass(frozen=True, kw_only=True)
class Precision(Result):
    """What rounding costs, and what is regained by keeping something exact.

    Attributes:
        rounded: What is rounded, and what stays exact.
        perplexity: Perplexity of the texts without rounding.
        repetition: Share of the tokens of greedy continuations that stood in them before, without rounding ("exact")
            and for each scheme with nothing exact. Empty if none were written.
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
    repetition: dict[str, float]
    costliest: dict[str, tuple[int, ...]]
    place: str
    neurons: tuple[tuple[int, ...], ...]
    layers: tuple[int, ...]

    @property
    def costs(self) -> list[Kept]:
        """Every scheme with nothing exact."""
        return [one for one in self.rounded if one.kept == NOTHING]

    def best(self, scheme: str, *among: str) -> Kept | None:
        """Of what is worth it, what takes the fewest bits; None if nothing is."""
        worth = []
        for one in self.rounded:
            if one.scheme == scheme and one.is_worth_it and (not among or one.kept in among):
                worth.append(one)
        return min(worth, key=lambda one: one.bits, default=None)

    def exact_layers(self, best: Kept | None) -> tuple[int, ...]:
        """The layers that stay exact."""
        if best is None:
            return ()
        return self.costliest[best.scheme] if best.kept == COSTLIEST else self.layers

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
        if best is not None:
            name = f"the {best.kept}"
            if best.kept == "sink neurons":
                name = neuron_names(self.neurons, 2)
            elif best.kept in LAYERS:
                name = f"layer {word_list(self.exact_layers(best), 2)}"
            regained, random = percent_pair(best.regained, best.random)
            return f"{said}; keeping {name} exact regains {regained}, random ones at most {random}."
        if not self.place:
            return f"{said}; there is no sink, and nothing tried regains half of it and more than random ones."
        return f"{said}; nothing of the sink, kept exact, regains half of it and more than random ones."

    def details(self) -> list[str]:
        """What each scheme does to the perplexity and to repetition."""
        lines = []
        for cost in self.costs:
            line = f"{cost.scheme}: the perplexity changes by {cost.perplexity / self.perplexity - 1:+.2%}"
            if self.repetition:
                exact, rounded = self.repetition["exact"], self.repetition[cost.scheme]
                line += f", and repetition from {exact:.1%} to {rounded:.1%} of tokens"
            lines.append(f"{line}.")
        if self.place:
            lines.append(f"The sink is at {self.place}.")
        return lines

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
    scan=ScanPart(11, topic="Precision", quick={"pieces": 8, "new": 0}, streams=False),
    figure=draw,
    loading="whole",
    quick={"schemes": ["a8-tensor"], "pieces": 3, "length": 16, "new": 0},
)
def precision(
    setup: Setup,
    *,
    schemes: Sequence[Scheme] = ("a8-tensor", "a8-token", "kv8", "kv4"),
    pieces: Annotated[int, Field(ge=2)] = 16,
    length: Annotated[int, Field(ge=8)] = 64,
    new: Whole = 64,
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
        new: Tokens that the model writes after half of each piece, to see how much it repeats; 0 leaves this out.

    Example:
        sinkscope precision --model llama-2-7b --html precision.html
    """
    target = setup.target
    sink = Sink.of(find_sinks.on(setup))
    ids = held_out(setup, pieces, length)
    half = ids.shape[1] // 2
    new = min(new, (target.max_positions or half + new) - half)
    setup.record(pieces=len(ids), length=ids.shape[1], new=new)
    texts, other_texts = Texts.of(target, ids), Texts.of(target, setup.ids[:SELECTION, :length])
    compared = comparisons(setup, sink, ids)
    rounded = list[Kept]()
    costliest: dict[str, tuple[int, ...]] = {}
    repeated: dict[str, float] = {}
    if new:
        repeated["exact"] = repetition(target, ids, new)
    for name in dict.fromkeys(schemes):
        scheme = SCHEMES[name]
        if ACTIVATIONS in scheme and has_experts(target):
            continue
        setup.progress(f"precision, {name}", len(costliest), len(schemes))
        costliest[name] = costliest_layers(other_texts, scheme)[: max(1, len(sink.layers))]
        if new:
            repeated[name] = repetition(target, ids, new, Quantize(**scheme))
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
        repetition=repeated,
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


def repetition(target: Target, ids: TokenRows, new: int, edit: Intervention | None = None) -> float:
    """Share of the tokens of greedy continuations of half of each text that stood in the same one before."""
    shares: list[float] = []
    for row in greedy(target, ids[:, : ids.shape[1] // 2], new, edit):
        shares.append(len(set(row)) / len(row))
    return 1 - fmean(shares)
