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
    "find-sinks": "sinks.spikes.find:find_sinks",
    "lines": "sparse.lines:lines",
    "patch": "sinks.patch:patch",
    "repeat": "sinks.repeat:repeat",
    "why-loop": "loops.why:why_loop",
    "why-sink": "sinks.spikes.find:why_sink",
}
"""Sinkscope's own measurements, by the word of the command, which is their kind: the function, within sinkscope."""
KINDS = {
    "bench": "sinkscope.bench.table",
    "check-cache": "sinkscope.conformance.check_cache",
    "compare": "sinkscope.app.compare",
    "loops": "sinkscope.loops.text.check",
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
    """Return all measurements, by the words of their commands."""
    points = {name.replace("_", "-"): point for name, point in other_measurements().items()}
    for words, place in OWN.items():
        points[words] = EntryPoint(words, f"sinkscope.{place}", MEASUREMENTS)
    return points


@cache
def kind_modules() -> dict[str, str]:
    """Return each kind of result that can be read, with the module that registers it."""
    return {words: point.module for words, point in measurements().items()} | KINDS
