"""The measurements, of sinkscope and of other packages, and the modules of all kinds of results.

A measurement is registered once: its command, its kind of result, its part of a scan and its name in Python follow from
its place.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points

MEASUREMENTS = "sinkscope.measurements"
"""Group of entry points by which other packages add measurements."""
OWN = {
    "attack": "sinks.attack:attack",
    "barcode": "loops.barcode:barcode",
    "circuit": "sinks.spikes.find:circuit",
    "find-sinks": "sinks.spikes.find:find_sinks",
    "heads": "sinks.marking_heads:heads",
    "lines": "sparse.lines:lines",
    "lines-loss": "sparse.lines_loss:lines_loss",
    "patch-eval": "sinks.patch:patch_eval",
    "patch-make": "sinks.patch:patch_make",
    "precision": "sinks.precision:precision",
    "repeat": "sinks.repeat:repeat",
    "why": "loops.why:why",
}
"""Sinkscope's own measurements: the function of each kind of result, by its place within sinkscope."""
KINDS = {
    "bench": "sinkscope.bench.table",
    "check-cache": "sinkscope.conformance.check_cache",
    "compare": "sinkscope.app.compare",
    "loops": "sinkscope.loops.text.check",
    "scan-table": "sinkscope.app.report",
    "sink-card": "sinkscope.app.card",
    "view": "sinkscope.app.view.result",
}
"""Kinds of results that no measurement gives."""


@cache
def other_measurements() -> dict[str, EntryPoint]:
    """Return the measurements of other packages, by the names of their functions."""
    return {point.attr: point for point in sorted(entry_points(group=MEASUREMENTS))}


@cache
def measurements() -> dict[str, EntryPoint]:
    """Return all measurements, by the kinds of their results."""
    points = {name.replace("_", "-"): point for name, point in other_measurements().items()}
    for kind, place in OWN.items():
        points[kind] = EntryPoint(kind, f"sinkscope.{place}", MEASUREMENTS)
    return points


@cache
def kind_modules() -> dict[str, str]:
    """Return each kind of result that can be read, with the module that registers it."""
    return {kind: point.module for kind, point in measurements().items()} | KINDS
