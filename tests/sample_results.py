"""A result for tests of what is done with results: that of the model in the package, with a second place."""

from __future__ import annotations

from dataclasses import replace

from repository import FIGURES

from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.result import FindSinks, SpikeResult
from sinkscope.sinks.spikes.spike import PlaceWords

STOP = PlaceWords("'.' wherever it stands", ".")
NEEDED = "L1.N338"


def share(value: float, margin: float | None = None) -> Mean:
    return Mean(value, margin, (), "share")


def writer(name: str, value: float, left: float, role: str, margin: float | None = None) -> Row:
    """A neuron that writes the spike."""
    return row_of("writers", name, role, share=share(value, margin), left=share(left), neutral=0.01)


def with_rows(one: SpikeResult, *rows: Row, without: tuple[str, ...] = ()) -> SpikeResult:
    """A spike with other rows of the same names, and without some tables."""
    new = {(row.table, row.name): row for row in rows}
    kept = {(row.table, row.name): row for row in one.rows if row.table not in without}
    return replace(one, rows=tuple((kept | new).values()))


def sample_find_sinks(**changes) -> FindSinks:
    """Six layers, a sink at the first token, and the same spike at full stops."""
    found = FindSinks.load(FIGURES / "find_sinks.json")
    (first,) = found.spikes
    return replace(found, **{"spikes": (first, replace(first, place=STOP, like=0)), **changes})
