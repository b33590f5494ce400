"""Kinds of results, and the module of each, which is imported when one is read; and measurements of other packages."""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

MEASUREMENTS = "sinkscope.measurements"
"""Group of entry points by which other packages add measurements."""
KINDS = {
    "attack": "sinkscope.sinks.attack",
    "barcode": "sinkscope.loops.barcode",
    "bench": "sinkscope.bench.table",
    "check-cache": "sinkscope.conformance.check_cache",
    "circuit": "sinkscope.sinks.spikes.result",
    "compare": "sinkscope.app.compare",
    "find-sinks": "sinkscope.sinks.spikes.result",
    "heads": "sinkscope.sinks.marking_heads",
    "lines": "sinkscope.sparse.lines",
    "lines-loss": "sinkscope.sparse.lines_loss",
    "loops": "sinkscope.loops.text.check",
    "patch-eval": "sinkscope.sinks.patch",
    "patch-make": "sinkscope.sinks.patch",
    "precision": "sinkscope.sinks.precision",
    "repeat": "sinkscope.sinks.repeat_result",
    "scan-table": "sinkscope.app.report",
    "sink-card": "sinkscope.app.card",
    "view": "sinkscope.app.view.result",
    "why": "sinkscope.loops.why",
}
"""Kinds of sinkscope's own results."""


@cache
def other_measurements() -> dict[str, EntryPoint]:
    """Return the measurements of other packages, by the names of their functions."""
    return {point.attr: point for point in sorted(entry_points(group=MEASUREMENTS))}


@cache
def kind_modules() -> dict[str, str]:
    """Return each kind of result that can be read, with the module that defines it."""
    others = {name.replace("_", "-"): point.module for name, point in other_measurements().items()}
    return others | KINDS
