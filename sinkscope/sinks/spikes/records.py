"""The parts of a `find_sinks` result as JSON holds them: spikes, each with the rows of its tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sinkscope.errors import SinkscopeError
from sinkscope.results.notation import read_head, read_neuron, word_form
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.results.row import Row, of_table
from sinkscope.sinks.spikes.places import PlaceWords
from sinkscope.sinks.thresholds import HALF, REMOVED

WRITES = ("needed", "lowers", "backup")
"""The roles of neurons that write a spike."""
CAUSES = ("its token", "alone", "id 0")
"""What is special about the first token."""
AS_IT_IS, ONE_OTHER, TAKEN_SIGHT = "as it is", "sees 1 other, drawn", "place, sees {} more"
"""Rows of the table of conditions: two controls, and the place with tokens before it."""
TAKEN = {"its token": "place, another token", "alone": TAKEN_SIGHT.format(4), "id 0": "place, 32 later"}
"""The row in which each cause is taken away at the place."""
PURPOSE_CONTROLS = "purpose, controls"
"""The table of what hiding another key costs."""
NO_EQUAL = "no set of other neurons writes as much"
"""What a control says that is two thirds of its layer's neurons."""


@dataclass(frozen=True, kw_only=True)
class SpikeResult:
    """A spike as a result says it: what was chosen on one half of the texts, in numbers of the other half.

    Attributes:
        place: Where it is.
        layers: First and last layer of the run in which it stands out.
        peak: The layer after which it is largest.
        highest: The layer of the run after which its norm is farthest above the typical one.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        needed: The smallest set found without which less than a quarter of it is left; empty: no set that was tried.
        like: Number of an earlier spike that this one repeats at another place. None: it repeats none.
        held_out: Whether its numbers are of texts that did not find it.
        texts: The numbers of these texts among those that were read.
        rows: Everything that was measured of it, by tables.
    """

    place: PlaceWords
    layers: tuple[int, int]
    peak: int
    highest: int
    dims: tuple[int, ...]
    needed: tuple[str, ...]
    like: int | None
    held_out: bool
    texts: tuple[int, ...]
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.table("effects") and not self.table("controls"):
            raise SinkscopeError(f"the effects of {title_of(self)} have no control: give the rows of its controls")

    def table(self, name: str) -> dict[str, Row]:
        """Return the rows of a table by their names."""
        return of_table(self.rows, name)

    def named(self, table: str, name: str) -> Row:
        """Return a row of a table; an empty one if it was not measured."""
        return self.table(table).get(name, Row(table, name))

    @property
    def heads(self) -> int:
        """The heads in its layers that attend to the place."""
        return int(self.named("spike", "read by").get("heads"))

    @property
    def ratio(self) -> float:
        """Its norm over the typical one, in the layer of the run where it is largest."""
        return self.named("spike", "norm").get("ratio")

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The values that a patch writes: those of the neurons that write the spike, by what their removal does."""
        neurons = self.table("writers").values()
        return {neuron_of(row.name): row.get("neutral") for row in neurons if row.note in WRITES}

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The needed neurons; empty if components are needed."""
        return tuple(part for part in map(part_of, self.needed) if isinstance(part, Neuron))


def strongest_control(rows: Iterable[Row]) -> Row | None:
    """Return the control of the needed set that costs most, or leaves least; None if nothing was removed instead."""
    controls = [row for row in of_table(rows, "controls").values() if "left" in row.numbers]
    return max(controls, key=lambda row: (row.get("loss"), -row.get("left")), default=None)


def sufficient(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the fewest causes that give an ordinary position half of the spike; each alone, if several do so alone."""
    enough: list[tuple[str, ...]] = []
    for name, row in of_table(rows, "conditions").items():
        causes = tuple(name.split(", "))
        if {*causes} <= {*CAUSES} and row.get("left") - row.margin("left") >= HALF:
            enough.append(causes)
    fewest = min(map(len, enough), default=0)
    if fewest == 1:
        return tuple(causes[0] for causes in enough if len(causes) == 1)
    return next((causes for causes in enough if len(causes) == fewest), ())


def necessary(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the causes without which less than a quarter of the spike is left at the place."""
    asked = of_table(rows, "conditions")
    taken = {cause: asked[name] for cause, name in TAKEN.items() if name in asked}
    return tuple(cause for cause, row in taken.items() if row.get("left") + row.margin("left") < REMOVED)


def neuron_of(name: str) -> Neuron:
    """Return a neuron by its name."""
    return Neuron.of(read_neuron(name))


def part_of(name: str) -> Neuron | Head | Component:
    """Return the part of a name: "mlp 11", "attention 3", "embedding", "L0.H4", "L1.N338"."""
    kind, _, layer = name.partition(" ")
    if kind == "embedding" or layer:
        return Component(kind, int(layer) if layer else None)  # pyright: ignore[reportArgumentType] - one of the kinds
    return Head(*read_head(name)) if ".H" in name else neuron_of(name)


def title_of(spike: SpikeResult) -> str:
    """Return a spike by its place and layers, as its card has it."""
    return f"Spike at {spike.place.words}, {run(*spike.layers)}"


def run(first: int, last: int) -> str:
    """Return the layers of a spike: "layer 3", "layers 3-5"."""
    return f"{word_form(last - first + 1, 'layer', 'layers')} {span(first, last)}"


def span(first: int, last: int) -> str:
    """Return the numbers of the layers of a spike."""
    return str(first) if first == last else f"{first}-{last}"
