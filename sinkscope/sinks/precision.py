"""What rounding costs a model, and what is regained by keeping its sink exact."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.files.progress import report_progress
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.quantize import Quantize
from sinkscope.measure import Result, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.target import Target
from sinkscope.results.effect import Effect
from sinkscope.results.notation import word_list
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.spikes.controls import ordered_in, random_neurons
from sinkscope.sinks.spikes.edited import left_of
from sinkscope.sinks.spikes.find import sinks_of
from sinkscope.sinks.spikes.places import Place
from sinkscope.sinks.tokens import Length, Pieces, TokenRows, held_out, logits_of

Scheme = Literal["a8-tensor", "a8-token", "kv8", "kv4"]
Divergence = Callable[..., Float[Tensor, " text"]]
SCHEMES: dict[Scheme, dict[str, Any]] = {
    "a8-tensor": {"activations": 8, "scale": "tensor"},
    "a8-token": {"activations": 8},
    "kv8": {"kv": 8},
    "kv4": {"kv": 4},
}
"""What is rounded, and how: fields of `Quantize`."""
RANDOM_SETS = 3  # random controls that are kept exact; each is a pass of all texts
WORDS = {
    "a8-tensor": "activations to 8 bits per tensor",
    "a8-token": "activations to 8 bits per token",
    "kv8": "keys and values to 8 bits",
    "kv4": "keys and values to 4 bits",
}
KEEPING = "Keeping {parts} exact removes {value} of what rounding {scheme} costs ({control})."
NAMED = 4  # parts that a table names
SELECTION = 2  # texts on which the costliest layer is found


@dataclass(frozen=True)
class ExactParts:
    """Parts that may stay exact, and as many random ones.

    Attributes:
        name: What it is called.
        parts: The names of its parts.
        field: The field of `Quantize` that keeps it exact.
        values: The values of this field: the parts, then each random draw.
    """

    name: str
    parts: tuple[str, ...]
    field: Literal["places", "neurons", "layers"]
    values: Sequence[Any]


@dataclass(frozen=True)
class KeptExact:
    """How much of a cost goes while something stays exact.

    Attributes:
        scheme: What is rounded.
        name: What stays exact.
        parts: The names of its parts.
        removed: Share of the cost that goes, beside the most that goes with random parts exact.
    """

    scheme: Scheme
    name: str
    parts: tuple[str, ...]
    removed: Effect


@dataclass(frozen=True, kw_only=True)
class Precision(Result):
    """What rounding costs, and what is left of that cost while something stays exact.

    Attributes:
        costs: Divergence of the next token's distribution from that of the exact model, in nats, by scheme; the largest
            first.
        kept: What was kept exact, for the largest cost first; what removes half of it stands before the rest.
        alone: What was not measured, because the model has nothing else of the kind to compare it with.
    """

    percent = ("remaining", "control")
    columns = ("rounded", "exact", "parts", "remaining", "control")
    glossary: ClassVar = {
        "rounded": "what is rounded",
        "exact": "what stays exact",
        "parts": "its parts",
        "remaining": "what remains of the divergence that rounding causes",
        "control": "the least that remains with as many random places, neurons or layers exact, over at most 3 draws",
        "stands": "whether more than half of the cost goes, beyond random ones and the margin over texts",
    }

    costs: dict[str, float]
    kept: tuple[KeptExact, ...]
    alone: tuple[str, ...] = ()

    def rows(self) -> Table:
        """Return a row for everything that was kept exact."""
        rows: Table = []
        for exact in self.kept:
            numbers = {"remaining": 1 - exact.removed.value, "control": 1 - exact.removed.control[1]}
            names = {"rounded": exact.scheme, "exact": exact.name, "parts": word_list(exact.parts, NAMED)}
            rows.append({**names, **numbers, "stands": exact.removed.stands})
        return rows

    def numbers(self) -> list[Number]:
        """Return the share of a cost that goes while something stays exact."""
        numbers: dict[str, Number] = {}
        for exact in self.kept:
            label = f"of what rounding {WORDS[exact.scheme]} costs goes with {word_list(exact.parts, NAMED)} exact"
            key = f"{exact.scheme}.{exact.name}"
            numbers.setdefault(key, Number.of(key, label, exact.removed))
        return list(numbers.values())

    def conclusion(self) -> str:
        """Say how much of the largest cost goes with what removes most of it exact."""
        return self._sentences()[0]

    def _sentences(self) -> list[str]:
        """Say how much of a cost each thing removes."""
        sentences: list[str] = []
        for exact in self.kept:
            words = {"parts": word_list(exact.parts, 2), "scheme": WORDS[exact.scheme]}
            sentences.append(exact.removed.sentence(KEEPING, **words))
        return sentences or ["Rounding costs nothing here."]

    def details(self) -> list[str]:
        """Say how much else removes of each cost, and what each rounding costs."""
        costs = [f"{cost:.2g} ({WORDS[scheme]})" for scheme, cost in self.costs.items()]
        lines = [*self._sentences()[1:], f"Rounding costs {word_list(costs)} nats."]
        if self.alone:
            lines.append(f"The model has nothing else of the kind to compare with the {word_list(self.alone)}.")
        return lines


def draw(result: Precision) -> go.Figure:
    """Draw the shares that are left, beside those with random ones exact, a panel per scheme."""
    rows = result.rows()
    for row in rows:
        row["rounded"] = html.escape(f"{row['rounded']}: {result.costs.get(row['rounded'], np.nan):.2g} nats")
        row["exact"] = html.escape(row["exact"])
    axes: dict[str, Any] = {
        "x": "exact",
        "y": ["remaining", "control"],
        "facet_col": "rounded",
        "range_y": (-0.05, 1.55),
    }
    fig = px.scatter(rows, **axes, labels={"value": "remaining", "exact": "", "variable": ""})
    fig.update_xaxes(tickangle=30)
    return figure_of(fig.update_yaxes(tickformat=".0%"), result, width=1300, height=520, legend=-0.5, bottom=200)


@measurement(
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
    """Measure what rounding costs, and what is regained by keeping the sink's places or neurons, or a layer, exact.

    Activations, or keys and values, are rounded as `Quantize` does it, and the next tokens of held-out text are
    compared with those of the exact model. What stays exact is compared with random ones of the same size: tokens,
    neurons of the same layers, a layer. Rounded numbers are stored as before, so no memory is saved here.

    Args:
        schemes: What to round: a8-tensor, a8-token (activations), kv8, kv4 (keys and values).
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
    """
    target = setup.target
    names: list[Scheme] = list(dict.fromkeys(schemes))
    if target.mixtures:
        names = [name for name in names if "kv" in SCHEMES[name]]
    if not names:
        raise UnsupportedError(
            f"{target.name} is a mixture of experts, of which only keys and values can be rounded: give --schemes kv8"
        )
    spikes = sinks_of(setup).spikes
    neurons = tuple(dict.fromkeys(chain.from_iterable(circuit.writers for circuit in spikes if circuit.needed_neurons)))
    ids = held_out(setup, pieces, length)
    setup.record(pieces=len(ids), length=ids.shape[1])
    divergence, other_divergence = (
        partial(divergence_of, target, some, logits_of(target, some).log_softmax(-1))
        for some in (ids, setup.ids[:SELECTION, :length])
    )
    known = list[ExactParts]()
    if neurons:
        orders = ordered_in(target, setup.ids, neurons)
        drawn = {random_neurons(orders, neurons, setup.seed, number): None for number in range(RANDOM_SETS)}
        random = [others for others in drawn if not {*others} & {*neurons}]
        known.append(ExactParts("sink neurons", tuple(map(str, neurons)), "neurons", [neurons, *random]))
    if spikes:
        known.append(random_places(setup, [circuit.place for circuit in spikes], ids))
    costs = {name: divergence(SCHEMES[name]) for name in names}
    names.sort(key=lambda name: -float(costs[name].mean()))
    exact, alone = list[KeptExact](), list[str]()
    for number, name in enumerate(names):
        setup.progress(f"precision, {name}", number, len(names))
        scheme, cost = SCHEMES[name], costs[name]
        if float(cost.mean()) <= 0:
            continue
        candidates = [candidate for candidate in known if candidate.field != "neurons" or "activations" in scheme]
        candidates.append(random_layers(setup, costliest_layer(other_divergence, scheme, target.n_layers)))
        alone += [candidate.name for candidate in candidates if len(candidate.values) == 1]
        of_scheme = [
            keeping(divergence, name, cost, candidate) for candidate in candidates if len(candidate.values) > 1
        ]
        exact += sorted(of_scheme, key=_order)
    return Precision(
        costs={name: float(costs[name].mean()) for name in names},
        kept=tuple(exact),
        alone=tuple(dict.fromkeys(alone)),
    )


def random_places(setup: Setup, places: Sequence[Place], ids: TokenRows) -> ExactParts:
    """Return the places of norm spikes, and draw as many other tokens of each text; none if there are not as many."""
    there = torch.zeros_like(ids, dtype=torch.bool)
    for place in places:
        there |= place.matches(ids)
    generator = draws(setup.seed, "places beside those of the sink")
    others = torch.rand(RANDOM_SETS, *ids.shape, generator=generator).masked_fill(there, 2.0)
    random = others.argsort(-1).argsort(-1) < there.sum(1, keepdim=True)
    drawn = [mask for mask in random if not bool((mask & there).any())]  # else there are too few other places
    values = [mask.nonzero().tolist() for mask in (there, *drawn)]
    return ExactParts("sink places", ("the sink places",), "places", values)


def random_layers(setup: Setup, layer: int) -> ExactParts:
    """Return a layer, and draw others: all if they are few."""
    others = [other for other in range(setup.n_layers) if other != layer]
    random = some_of(others, RANDOM_SETS, draws(setup.seed, f"layers beside {layer}"))
    return ExactParts("costliest layer", (f"layer {layer}",), "layers", [[number] for number in (layer, *random)])


def divergence_of(
    target: Target,
    ids: TokenRows,
    logs: Float[Tensor, "text pos vocab"],
    scheme: dict[str, Any],
    **exact: Any,
) -> Float[Tensor, " text"]:
    """Measure the mean divergence of the rounded model's next tokens from those of the exact one, in nats.

    Args:
        target: The whole model.
        ids: The texts.
        logs: Logarithms of the exact model's probabilities.
        scheme: Fields of `Quantize` that say what is rounded.
        exact: Fields of `Quantize` that say what stays exact.
    """
    with under(Quantize(**scheme, **exact), target):
        rounded = logits_of(target, ids).log_softmax(-1)
    return (logs.exp() * (logs - rounded)).sum(-1)[:, 1:].mean(1).cpu()


def _order(exact: KeptExact) -> tuple[bool, float]:
    """What stands comes first, as it was tried, from small to large; the rest by what it removes."""
    if exact.removed.stands:
        return False, 0.0
    return True, -exact.removed.value


def costliest_layer(divergence: Divergence, scheme: dict[str, Any], n_layers: int) -> int:
    """Find the layer whose exactness leaves the smallest divergence."""
    left: list[float] = []
    for layer in range(n_layers):
        report_progress("precision, layers", layer, n_layers)
        left.append(float(divergence(scheme, layers=[layer]).mean()))
    return int(np.argmin(left))


def keeping(divergence: Divergence, name: Scheme, cost: Float[Tensor, " text"], candidate: ExactParts) -> KeptExact:
    """Measure how much of a scheme's cost goes while something stays exact, beside random ones."""
    divergences = [cost]
    for value in candidate.values:
        report_progress(f"precision, {name}, {candidate.name}", len(divergences) - 1, len(candidate.values))
        divergences.append(divergence(SCHEMES[name], **{candidate.field: value}))
    by_text, *others = left_of(torch.stack(divergences))
    most = max(1 - float(other.mean()) for other in others)
    removed = Effect(1 - float(by_text.mean()), margin_of(by_text.numpy()), {f"random {candidate.field}": most})
    return KeptExact(name, candidate.name, candidate.parts, removed)
