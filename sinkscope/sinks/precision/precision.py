"""What rounding costs a model, and what is regained by keeping its sink exact."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go

from sinkscope.errors import UnsupportedError
from sinkscope.measure import Result, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.results.claims import Claim, Claims, Contrast, Outcome, Search
from sinkscope.results.notation import word_list
from sinkscope.results.parts import Component, Parts, Tokens
from sinkscope.results.style import figure_of
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.held_out import Length, Pieces, held_out
from sinkscope.sinks.precision.exact import (
    DRAWS,
    FIRST,
    NEURONS,
    PLACES,
    Rounded,
    Texts,
    beside_layers,
    comparisons,
)
from sinkscope.sinks.removal.components import Neurons

ACTIVATIONS = "activations"
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
NOTHING, COSTLIEST = "nothing", "costliest layers"
EXACT_BITS = 16
"""Bits of a number that stays exact."""
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
    """

    scheme: str
    kept: str
    kl: float
    regained: float
    margin: float | None
    random: float | None
    bits: float


@dataclass(frozen=True, kw_only=True)
class Precision(Result):
    """What rounding costs, and what is regained by keeping something exact.

    Attributes:
        rounded: What is rounded, and what stays exact.
        costliest: As many layers as build the spike, or one, that regain most alone, on other texts, by scheme.
        place: The words for the places of the sink; empty if there is none.
        neurons: The neurons that make its spikes.
        layers: The layers that build them.
    """

    percent = ("regained", "margin", "random")
    columns = ("scheme", "kept", "kl", "regained", "random", "bits")
    table_of = "rounded"

    rounded: tuple[Kept, ...]
    costliest: dict[str, tuple[int, ...]]
    place: str
    neurons: Neurons
    layers: tuple[int, ...]

    @property
    def costs(self) -> list[Kept]:
        """Every scheme with nothing exact, the one that costs most first."""
        return sorted([one for one in self.rounded if one.kept == NOTHING], key=lambda one: -one.kl)

    @property
    def claims(self) -> Claims:
        """What is left of each cost while something stays exact; none of what no random ones stand beside.

        The largest cost comes first, and of each what regains half of it beyond random ones with the fewest bits; then
        what regains most.
        """
        costs = [cost.scheme for cost in self.costs]
        compared = [(one, self._claim(one)) for one in self.rounded if one.random is not None]

        def rank(pair: tuple[Kept, Claim]) -> tuple[int, bool, float]:
            one, claim = pair
            worth = claim.verdict == "needed"
            return costs.index(one.scheme), not worth, one.bits if worth else -one.regained

        return tuple(claim for _, claim in sorted(compared, key=rank))

    def _claim(self, one: Kept) -> Claim:
        """What is left of a scheme's cost while something stays exact, beside random ones and nothing exact."""
        kept = [other for other in self.rounded if other.scheme == one.scheme and other.kept != NOTHING]
        most = max(kept, key=lambda other: other.regained)
        cost = f"most of what rounding {WORDS[one.scheme]} costs"
        return Claim(
            role="protects",
            subject=self._parts(one),
            outcome=Outcome(f"the cost of {one.scheme}", effect=cost),
            place=f"held-out text, with {one.kept} exact",
            value=min(1.0, 1 - one.regained),
            contrasts=(
                Contrast("intact", 1.0, 1, "nothing exact"),
                Contrast("random", 1 - (one.random or 0.0), DRAWS, "random ones"),
            ),
            draws=self.settings.get("pieces", 1),
            search=Search("things", len(kept), most.regained, most.kept),
            margin=one.margin,
            edit="exact",
        )

    def _parts(self, one: Kept) -> Parts:
        """What stays exact."""
        layers = self.costliest[one.scheme] if one.kept == COSTLIEST else self.layers
        if one.kept == NEURONS:
            return self.neurons
        if one.kept == PLACES or one.kept == FIRST:
            return (Tokens(one.kept),)
        return tuple(Component("layer", layer) for layer in layers)

    def facts(self) -> list[str]:
        """The costs, and where the sink is."""
        costs = [f"{cost.kl:.2g} ({WORDS[cost.scheme]})" for cost in self.costs]
        there = f"The sink is at {self.place}." if self.place else "There is no sink."
        return [f"Rounding costs {word_list(costs)} nats.", there]


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
    help="Measure what rounding costs, and what to keep exact.",
    figure=draw,
    loading="whole",
)
def precision(
    setup: Setup,
    *,
    schemes: Sequence[Scheme] = ("a8-tensor", "a8-token", "kv8", "kv4"),
    pieces: Pieces = 16,
    length: Length = 64,
) -> Precision:
    """Measure what rounding costs, and what is regained by keeping the sink's places, neurons or layers exact.

    Activations, or keys and values, are rounded as `Quantize` does it, and the next tokens of held-out text are
    compared with those of the exact model. What stays exact is compared with random ones of the same size: tokens,
    neurons of the same layers, layers. The first tokens are as many as a text has places of the sink. Rounded numbers
    are stored as before, so no memory is saved here.

    Args:
        schemes: What to round: a8-tensor, a8-token (activations), kv8, kv4 (keys and values).
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.

    Example:
        sinkscope precision --model llama-2-7b --html precision.html
    """
    target = setup.target
    experts = any(map(target.is_mixture, range(target.n_layers)))
    names = [name for name in dict.fromkeys(schemes) if not (experts and ACTIVATIONS in SCHEMES[name])]
    if not names:
        raise UnsupportedError(
            f"{target.name} is a mixture of experts, of which only keys and values can be rounded: give --scheme kv8"
        )
    sinks = find_sinks.on(setup)
    places = [each.place for each in sinks.spikes or sinks.sinks if each.place is not None]
    neurons = tuple(dict.fromkeys(chain.from_iterable(spike.set for spike in sinks.spikes)))
    stages = sinks.spikes[0].step_up if sinks.sink_layer is not None else ()
    layers = tuple(sorted({*stages, *(neuron.layer for neuron in neurons)}))
    ids = held_out(setup, pieces, length)
    setup.record(pieces=len(ids), length=ids.shape[1])
    texts, other_texts = Texts.of(target, ids), Texts.of(target, setup.ids[:SELECTION, :length])
    compared = comparisons(setup, places, neurons, layers, ids, experts)
    rounded = []
    costliest: dict[str, tuple[int, ...]] = {}
    for name in names:
        setup.progress(f"precision, {name}", len(costliest), len(names))
        scheme = SCHEMES[name]
        costliest[name] = costliest_layers(other_texts, scheme)[: max(1, len(layers))]
        cost = texts.rounded(**scheme)
        rounded.append(kept_of(name, NOTHING, cost, [cost]))
        compared[COSTLIEST] = "layers", beside_layers(setup, costliest[name])
        for what, (field, values) in compared.items():
            if ACTIVATIONS in scheme or what != NEURONS:
                read = [texts.rounded(**scheme, **{field: value}) for value in values]
                rounded.append(kept_of(name, what, cost, read))
    return Precision(
        rounded=tuple(rounded),
        costliest=costliest,
        place=word_list(places) if places else "",
        neurons=neurons,
        layers=layers,
    )


def kept_of(scheme: str, what: str, cost: Rounded, read: Sequence[Rounded]) -> Kept:
    """What is regained of the cost of a scheme by what stays exact (read first), and by random ones."""
    one, *random = read
    left = one.left(cost)
    low = SCHEMES[scheme].get(ACTIVATIONS) or SCHEMES[scheme]["kv"]
    return Kept(
        scheme=scheme,
        kept=what,
        kl=float(one.kl.mean()),
        regained=1 - left,
        margin=margin_of(((one.kl - left * cost.kl) / cost.kl.mean()).nan_to_num().numpy()),
        random=max([1 - other.left(cost) for other in random], default=None),
        bits=low + (EXACT_BITS - low) * (1 - one.numbers / cost.numbers),
    )


def costliest_layers(texts: Texts, scheme: dict[str, Any]) -> tuple[int, ...]:
    """The layers, the one first whose exactness leaves the smallest divergence."""
    left = [float(texts.rounded(**scheme, layers=[layer]).kl.mean()) for layer in range(texts.target.n_layers)]
    return tuple(np.argsort(left, kind="stable").tolist())
