"""Colours and layout that drawings share."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

# Okabe and Ito's colours: told apart also without colour vision
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", RED)
BAND = "rgba(140,140,140,0.25)"


Mark = tuple[str, dict[str, Any]]
"""A line, an area or words across a panel: what plotly's figures add, such as "hline", and its options."""


class Panel(NamedTuple):
    """What stands in one panel of a figure.

    Attributes:
        title: above it.
        traces: of plotly, those in front last.
        x: title of the x axis, or plotly's options for it; None: it is left as it is.
        y: the same for the y axis.
        marks: what lies across it.
    """

    title: str
    traces: Sequence[Any] = ()
    x: str | dict[str, Any] | None = None
    y: str | dict[str, Any] | None = None
    marks: Sequence[Mark] = ()


def drawn(
    result: Any, parts: Sequence[Panel], widths: Sequence[float] | None = None, *, grid: Any = None, **layout: Any
) -> go.Figure:
    """A whole figure.

    Args:
        result: as for `finished`.
        parts: the panels, row by row.
        widths: of the columns.
        grid: further options of `panels`.
        layout: for `finished`.
    """
    options: dict[str, Any] = {"cols": len(parts)} | (grid or {})
    fig = panels([part.title for part in parts], widths, **options)
    for number, part in enumerate(parts):
        fill(fig, part, *(at + 1 for at in divmod(number, options["cols"])))
    return finished(fig, result, **layout)


def fill(fig: Any, part: Panel, row: int = 1, col: int = 1) -> None:
    """Put what a panel holds into its place in a figure."""
    fig.add_traces(list(part.traces), rows=row, cols=col)
    for kind, options in part.marks:  # after the traces: a panel without any takes no line
        getattr(fig, f"add_{kind}")(**options, row=row, col=col)
    axes(fig, row, col, x=part.x, y=part.y)


def curve(
    x: Any, y: Any, name: str | None, color: str, dash: str = "solid", width: int | float | None = None, **more: Any
) -> go.Scatter:
    """Points with a line through them; `more` is for plotly, such as `mode="lines"`."""
    line = {"color": color, "dash": dash, "width": width}
    return go.Scatter(**{"x": x, "y": y, "name": name, "line": line, "mode": "lines+markers"} | more)


def dots(x: Any, y: Any, name: str | None, color: Any, size: int | float | None = None, **more: Any) -> go.Scatter:
    """Points; `more` is for plotly, and what begins with `marker_` is for them."""
    return go.Scatter(x=x, y=y, name=name, mode="markers", marker={"color": color, "size": size}, **more)


def bars(x: Any, y: Any, color: Any, **more: Any) -> go.Bar:
    """Bars; what stands in `text` is written above them, and `more` is for plotly."""
    above = {"textposition": "outside", "cliponaxis": False} if "text" in more else {}
    return go.Bar(**{"x": x, "y": y, "marker_color": color, "showlegend": "name" in more} | above | more)


def band(x: Sequence[Any], low: Sequence[Any], high: Sequence[Any], **more: Any) -> go.Scatter:
    """The area where typical text lies."""
    style = {"fill": "toself", "fillcolor": BAND, "mode": "none", "hoverinfo": "skip"}
    return go.Scatter(x=[*x, *x[::-1]], y=[*high, *low[::-1]], name="typical text, 5-95 %", **style, **more)


def across(y: int | float, color: str = RED, dash: str = "dot", **more: Any) -> Mark:
    """A thin horizontal line that values are held against."""
    return "hline", {"y": y, "line": {"color": color, "dash": dash, "width": 1}} | more


def upright(x: int | float, color: str, dash: str = "dot", width: int | float | None = None) -> Mark:
    """A vertical line."""
    return "vline", {"x": x, "line": {"color": color, "dash": dash, "width": width}}


def words(
    text: str, x: int | float | None = None, y: int | float | None = None, color: str | None = None, **more: Any
) -> Mark:
    """Words in a panel; `y` is a share of its height."""
    place = {} if x is None else {"x": x, "y": y, "yref": "y domain"}
    return "annotation", {"text": text, "showarrow": False, "font": {"color": color}} | place | more


def panels(titles: Sequence[str], widths: Sequence[float] | None = None, *, spacing: float = 0.09, **more: Any) -> Any:
    """A figure with panels side by side.

    Args:
        titles: one per panel.
        widths: of the panels, in the same order; None: all alike. Further ones than there are titles are left out.
        spacing: between them, as a share of the width.
        more: for plotly's `make_subplots`.
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
    """The figure with its title and the layout that all figures share.

    The title is what was found: the first sentence of the result's conclusion. It breaks into lines that fit.

    Args:
        fig: what was drawn.
        result: names the model and has a conclusion; None: the title is `found` alone.
        found: the title where the result has no conclusion; it is escaped here.
        width: pixels.
        height: pixels.
        legend: height of the legend, which is below the panels; or what is different about it.
        bottom: margin for axis titles and legend.
        top: margin for the titles.
        more: for plotly's `update_layout`.
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
    """Titles and scales of the axes of a panel.

    Args:
        fig: what is drawn.
        row: of the panel; None: the same in every row.
        col: of the panel; None: the same in every column.
        x: title of the x axis, or plotly's options for it; None: it is left as it is.
        y: the same for the y axis.
    """
    for update, axis in ((fig.update_xaxes, x), (fig.update_yaxes, y)):
        if axis is not None:
            update(**({"title_text": axis} if isinstance(axis, str) else axis), row=row, col=col)


def at_place(position: str) -> str:
    """Where a question stands, in words."""
    return {"begin": "at the beginning", "middle": "in the middle", "end": "at the end"}.get(position, position)


def counted(title: str, count: int, most: int = 12) -> dict[str, Any]:
    """An axis of whole numbers from 0, with about `most` of them written out."""
    return {"title_text": title, "dtick": max(1, count // most)}


def shares(title: str | None = None, *span: int | float) -> dict[str, Any]:
    """An axis in per cent; `span` is its range, if it is fixed."""
    return {"title_text": title, "tickformat": ".0%"} | ({"range": list(span)} if span else {})


def powers(title: str | None = None, values: Iterable[float | None] = ()) -> dict[str, Any]:
    """A logarithmic axis with powers of ten, at most about eight of them for these `values`."""
    sizes = [math.log10(v) for v in values if v is not None and v > 0] or [0.0]
    every = math.ceil((max(sizes) - min(sizes) + 1) / 8)
    return {"title_text": title, "type": "log", "dtick": every, "exponentformat": "power"}


def by_layer(count: int, most: int = 16) -> dict[str, Any]:
    """The vertical axis of a map, layer by something: layer 0 is at the top in all of them."""
    return counted("layer", count, most) | {"autorange": "reversed"}


def level(fig: Any, y: float, row: int = 1, col: int = 1, *, color: str = RED, dash: str = "dot", **more: Any) -> None:
    """A thin horizontal line that values are held against; `more` is for plotly's `add_hline`."""
    fig.add_hline(y, line={"color": color, "dash": dash, "width": 1}, row=row, col=col, **more)


def intervals(rates: Sequence[Any], share: str = "share", low: str = "low", high: str = "high") -> dict[str, Any]:
    """Error bars from rates with an interval, which stand in the fields `share`, `low` and `high`."""
    return {
        "array": [getattr(r, high) - getattr(r, share) for r in rates],
        "arrayminus": [getattr(r, share) - getattr(r, low) for r in rates],
        "thickness": 1,
        "width": 3,
    }
