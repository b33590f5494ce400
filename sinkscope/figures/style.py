"""Colours and layout that drawings share."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

# Okabe and Ito's colours: told apart also without colour vision
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", RED)
BAND = "rgba(140,140,140,0.25)"


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
    found: str,
    *,
    width: int,
    height: int,
    legend: float | dict[str, Any] = -0.27,
    bottom: int = 110,
    top: int = 90,
    **more: Any,
) -> go.Figure:
    """The figure with its title and the layout that all figures share.

    Args:
        fig: what was drawn.
        result: names the model.
        found: the title behind the model's name; it is escaped here, with the name.
        width: pixels.
        height: pixels.
        legend: height of the legend, which is below the panels; or what is different about it.
        bottom: margin for axis titles and legend.
        top: margin for the titles.
        more: for plotly's `update_layout`.
    """
    place = legend if isinstance(legend, dict) else {"y": legend}
    return fig.update_layout(
        **{
            "title": {"text": html.escape(f"{result.model.name}: {found}"), "x": 0.01, "xanchor": "left"},
            "template": "plotly_white",
            "width": width,
            "height": height,
            "margin": {"l": 70, "r": 20, "t": top, "b": bottom},
            "font": {"size": 13},
            "legend": {"orientation": "h", "y": -0.27, "x": 0.5, "xanchor": "center", "yanchor": "top"} | place,
        }
        | more
    )


def layer_axis(fig: Any, count: int, row: int = 1, col: int = 1, *, title: str = "layer") -> None:
    """Whole numbers from 0 on the x axis, about twelve of them at most.

    Args:
        fig: what is drawn.
        count: how many layers or heads there are.
        row: of the panel.
        col: of the panel.
        title: of the axis.
    """
    fig.update_xaxes(title_text=title, dtick=max(1, count // 12), row=row, col=col)


def level(fig: Any, y: float, row: int = 1, col: int = 1, *, color: str = RED, dash: str = "dot", **more: Any) -> None:
    """A thin horizontal line that values are held against; `more` is for plotly's `add_hline`."""
    fig.add_hline(y, line={"color": color, "dash": dash, "width": 1}, row=row, col=col, **more)


def log_axes(fig: Any, row: int = 1, col: int = 1, *, x: str | None = None, y: str | None = None) -> None:
    """A logarithmic y axis with powers of ten; the x axis, too, where it has a title.

    Args:
        fig: what is drawn.
        row: of the panel.
        col: of the panel.
        x: title of the x axis; None: it is left as it is.
        y: title of the y axis.
    """
    if x is not None:
        fig.update_xaxes(title_text=x, type="log", dtick=1, row=row, col=col)
    fig.update_yaxes(title_text=y, type="log", dtick=1, exponentformat="power", row=row, col=col)


def intervals(rates: Sequence[Any]) -> dict[str, Any]:
    """Error bars from rates with `share`, `low` and `high`."""
    return {
        "array": [r.high - r.share for r in rates],
        "arrayminus": [r.share - r.low for r in rates],
        "thickness": 1,
        "width": 3,
    }
