"""Colours and layout that drawings share."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

# Okabe and Ito's colours, which readers without colour vision can also distinguish
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", RED)
BAND = "rgba(140,140,140,0.25)"


Mark = tuple[str, dict[str, Any]]
"""A line, an area or words across a panel: the kind that plotly's figures add, such as "hline", and its options."""


class Panel(NamedTuple):
    """What stands in one panel of a figure.

    Attributes:
        title: Title above the panel.
        traces: Plotly's traces; later ones are drawn in front.
        x: Title of the x axis, or plotly's options for it. None leaves the axis unchanged.
        y: The same for the y axis.
        marks: Lines, areas and words across the panel.
    """

    title: str
    traces: Sequence[Any] = ()
    x: str | dict[str, Any] | None = None
    y: str | dict[str, Any] | None = None
    marks: Sequence[Mark] = ()


def drawn(
    result: Any, parts: Sequence[Panel], widths: Sequence[float] | None = None, *, grid: Any = None, **layout: Any
) -> go.Figure:
    """Draw a whole figure.

    Args:
        result: The result, as in `finished`.
        parts: The panels, row by row.
        widths: Relative widths of the columns.
        grid: Further options of `panels`.
        layout: Further options of `finished`.
    """
    options: dict[str, Any] = {"cols": len(parts)} | (grid or {})
    fig = panels([part.title for part in parts], widths, **options)
    for number, part in enumerate(parts):
        fill(fig, part, *(at + 1 for at in divmod(number, options["cols"])))
    return finished(fig, result, **layout)


def fill(fig: Any, part: Panel, row: int = 1, col: int = 1) -> None:
    """Add the traces, marks and axes of a panel to its place in a figure."""
    fig.add_traces(list(part.traces), rows=row, cols=col)
    for kind, options in part.marks:  # after the traces: a panel without any takes no line
        getattr(fig, f"add_{kind}")(**options, row=row, col=col)
    axes(fig, row, col, x=part.x, y=part.y)


def curve(
    x: Any, y: Any, name: str | None, color: str, dash: str = "solid", width: int | float | None = None, **more: Any
) -> go.Scatter:
    """Make a line with a marker at each point; `more` goes to plotly, such as `mode="lines"`."""
    line = {"color": color, "dash": dash, "width": width}
    return go.Scatter(**{"x": x, "y": y, "name": name, "line": line, "mode": "lines+markers"} | more)


def dots(x: Any, y: Any, name: str | None, color: Any, size: int | float | None = None, **more: Any) -> go.Scatter:
    """Make markers without a line; `more` goes to plotly, such as `marker_symbol`."""
    return go.Scatter(x=x, y=y, name=name, mode="markers", marker={"color": color, "size": size}, **more)


def bars(x: Any, y: Any, color: Any, **more: Any) -> go.Bar:
    """Make bars with `text`, if it is given, above them; `more` goes to plotly."""
    above = {"textposition": "outside", "cliponaxis": False} if "text" in more else {}
    return go.Bar(**{"x": x, "y": y, "marker_color": color, "showlegend": "name" in more} | above | more)


def band(x: Sequence[Any], low: Sequence[Any], high: Sequence[Any], **more: Any) -> go.Scatter:
    """Make the shaded area in which typical text lies."""
    style = {"fill": "toself", "fillcolor": BAND, "mode": "none", "hoverinfo": "skip"}
    return go.Scatter(x=[*x, *x[::-1]], y=[*high, *low[::-1]], name="typical text, 5-95 %", **style, **more)


def across(y: int | float, color: str = RED, dash: str = "dot", **more: Any) -> Mark:
    """Make a thin horizontal reference line."""
    return "hline", {"y": y, "line": {"color": color, "dash": dash, "width": 1}} | more


def upright(x: int | float, color: str, dash: str = "dot", width: int | float | None = None) -> Mark:
    """Make a vertical line."""
    return "vline", {"x": x, "line": {"color": color, "dash": dash, "width": width}}


def words(
    text: str, x: int | float | None = None, y: int | float | None = None, color: str | None = None, **more: Any
) -> Mark:
    """Make an annotation in a panel; `y` is a share of the panel's height."""
    place = {} if x is None else {"x": x, "y": y, "yref": "y domain"}
    return "annotation", {"text": text, "showarrow": False, "font": {"color": color}} | place | more


def panels(titles: Sequence[str], widths: Sequence[float] | None = None, *, spacing: float = 0.09, **more: Any) -> Any:
    """Make a figure with panels side by side.

    Args:
        titles: One title per panel.
        widths: Relative widths of the panels, in the same order. None makes all equal. Extra widths are ignored.
        spacing: Space between panels, as a share of the figure's width.
        more: Further options of plotly's `make_subplots`.
    """
    chosen = None if widths is None or len(titles) < 2 else list(widths[: len(titles)])
    options: dict[str, Any] = {"cols": len(titles), "subplot_titles": list(titles), "column_widths": chosen} | more
    return make_subplots(**options, horizontal_spacing=spacing)


def finished(
    fig: Any,
    result: Any,
    found: str = "",
    *,
    width: int,
    height: int,
    legend: float | dict[str, Any] = -0.27,
    bottom: int = 110,
    top: int = 90,
    **more: Any,
) -> go.Figure:
    """Give a figure its title and the layout that all figures share.

    The title is the first sentence of the result's conclusion, broken into lines that fit.

    Args:
        fig: The figure.
        result: The result, which names the model and has a conclusion. None makes `found` the title.
        found: Title for a result without a conclusion; it is escaped here.
        width: Width in pixels.
        height: Height in pixels.
        legend: Vertical position of the legend below the panels, or plotly's options for the legend.
        bottom: Margin in pixels for axis titles and legend.
        top: Margin in pixels for the titles.
        more: Further options of plotly's `update_layout`.
    """
    said = found
    if result is not None:
        said = f"{result.model.name}: {result.conclusion().partition('. ')[0].removesuffix('.') or found}"
    lines = textwrap.wrap(said, int(width / 7.7))
    place = legend if isinstance(legend, dict) else {"y": legend}
    return fig.update_layout(
        **{
            "title": {
                "text": "<br>".join(map(html.escape, lines)),
                "font": {"size": 15},
                "x": 0.01,
                "xanchor": "left",
                "y": 1 - 16 / height,
                "yanchor": "top",
            },
            "template": "plotly_white",
            "width": width,
            "height": height,
            "margin": {"l": 70, "r": 20, "t": top + 18 * max(0, len(lines) - 2), "b": bottom},
            "font": {"size": 13},
            "legend": {"orientation": "h", "y": -0.27, "x": 0.5, "xanchor": "center", "yanchor": "top"} | place,
        }
        | more
    )


def axes(
    fig: Any,
    row: int | None = 1,
    col: int | None = 1,
    *,
    x: str | dict[str, Any] | None = None,
    y: str | dict[str, Any] | None = None,
) -> None:
    """Set the titles and scales of a panel's axes.

    Args:
        fig: The figure.
        row: Row of the panel. None stands for every row.
        col: Column of the panel. None stands for every column.
        x: Title of the x axis, or plotly's options for it. None leaves the axis unchanged.
        y: The same for the y axis.
    """
    for update, axis in ((fig.update_xaxes, x), (fig.update_yaxes, y)):
        if axis is not None:
            update(**({"title_text": axis} if isinstance(axis, str) else axis), row=row, col=col)


def at_place(position: str) -> str:
    """The position of a question in words."""
    return {"begin": "at the beginning", "middle": "in the middle", "end": "at the end"}.get(position, position)


def counted(title: str, count: int, most: int = 12) -> dict[str, Any]:
    """Options of an axis of whole numbers from 0 with about `most` labels."""
    return {"title_text": title, "dtick": max(1, count // most)}


def shares(title: str | None = None, *span: int | float) -> dict[str, Any]:
    """Options of an axis in per cent; `span` is its range, if it is fixed."""
    return {"title_text": title, "tickformat": ".0%"} | ({"range": list(span)} if span else {})


def powers(title: str | None = None, values: Iterable[float | None] = ()) -> dict[str, Any]:
    """Options of a logarithmic axis with about eight powers of ten at most, chosen for these `values`."""
    sizes = [math.log10(v) for v in values if v is not None and v > 0] or [0.0]
    every = math.ceil((max(sizes) - min(sizes) + 1) / 8)
    return {"title_text": title, "type": "log", "dtick": every, "exponentformat": "power"}


def by_layer(count: int, most: int = 16) -> dict[str, Any]:
    """Options of the vertical layer axis of a map; layer 0 is at the top in all maps."""
    return counted("layer", count, most) | {"autorange": "reversed"}


def level(fig: Any, y: float, row: int = 1, col: int = 1, *, color: str = RED, dash: str = "dot", **more: Any) -> None:
    """Add a thin horizontal reference line; `more` goes to plotly's `add_hline`."""
    fig.add_hline(y, line={"color": color, "dash": dash, "width": 1}, row=row, col=col, **more)


def intervals(rates: Sequence[Any], share: str = "share", low: str = "low", high: str = "high") -> dict[str, Any]:
    """Options of error bars for rates with an interval in the fields `share`, `low` and `high`."""
    return {
        "array": [getattr(r, high) - getattr(r, share) for r in rates],
        "arrayminus": [getattr(r, share) - getattr(r, low) for r in rates],
        "thickness": 1,
        "width": 3,
    }
