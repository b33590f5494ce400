"""Results drawn with plotly, one file per kind; nothing is measured here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.results import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

_DRAWN = (
    "find-sinks",
    "attack",
    "attack-detection",
    "clusters",
    "atlas",
    "repeat",
    "repeat-attention",
    "heads",
    "separate",
    "converge",
    "divergence",
    "patch-make",
    "patch-eval",
    "massive-activations",
    "locking",
    "barcode",
    "loopbench",
    "loopbench-show",
    "dialogues",
    "dialogues-fidelity",
    "dialogues-positions",
    "rotary",
    "loops",
)  # kinds; each has a file of its name here, with a function `draw`


def figure(result: Result) -> go.Figure:
    """The drawing of a result of any kind.

    Raises:
        SinkscopeError: there is none of this kind.
    """
    if result.kind not in _DRAWN:
        raise SinkscopeError(
            f"no figure is drawn of {result.kind!r}: there are {', '.join(_DRAWN)}; use --json or --html"
        )
    return import_module(f"sinkscope.figures.{result.kind.replace('-', '_')}").draw(result)
