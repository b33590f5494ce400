"""A result for tests of what is done with results: that of the model in the package, with a second place."""

from __future__ import annotations

from dataclasses import replace

from repository import FIGURES

from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.record import SpikeResult
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.spike import PlaceKey, PlaceKind, PlaceWords
from sinkscope.sinks.spikes.tables import Role, Writer

STOP = PlaceWords("'.' wherever it stands", ".", PlaceKey(PlaceKind.TOKENS, (".",)))
NEEDED = Neuron(1, None, 338)


def writer(neuron: Neuron, share: float, left: float, role: Role, margin: float | None = None) -> Writer:
    """A neuron that writes the spike."""
    return Writer(key=neuron, share=Mean(share, margin), role=role, left=Mean(left), neutral=Mean(0.01))


def with_writers(spike: SpikeResult, *rows: Writer) -> SpikeResult:
    """A spike with further writers, in place of those that are the same neurons."""
    writers = {row.key: row for row in (*spike.writers, *rows)}
    return replace(spike, writers=tuple(writers.values()))


def sample_find_sinks(**changes) -> FindSinks:
    """Six layers, a sink at the first token, and the same spike at full stops."""
    found = FindSinks.load(FIGURES / "find_sinks.json")
    (first,) = found.spikes
    return replace(found, **{"spikes": (first, replace(first, place=STOP, like=0)), **changes})
