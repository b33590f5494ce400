"""Colours and layout that drawings share."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from sinkscope.results.mean import Mean
from sinkscope.results.table import Row

# Okabe and Ito's colours, which readers without colour vision can also distinguish
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", RED)
PIXELS_PER_CHARACTER = 7.7
WIDTH_OF_FRAME = 900
"""Pixels that a notebook gives a figure."""
LINE_OF_TITLE = 18
"""Pixels."""


def bars(
    fig: Any,
    rows: Iterable[Row],
    number: str,
    colour: str,
    name: str = "",
    pattern: str = "",
    **where: int,
) -> None:
    """Draw a number of rows as bars, with its margins, controls in grey; rows without it are left out.

    Args:
        fig: The figure.
        rows: The rows.
        number: The number.
        colour: The colour.
        name: What a legend calls them. Empty: they are in none.
        pattern: What fills the bars beside their colour, as plotly names it: "/", "x" and others. Empty: nothing.
        where: The panel: row and col.
    """
    names: list[str] = []
    means: list[Mean] = []
    colours: list[str] = []
    for row in rows:
        mean = row.values().get(number)
        if isinstance(mean, Mean):
            means.append(mean)
            names.append(html.escape(row.short_label))
            colours.append(GREY if row.is_control else colour)
    margins = {"type": "data", "array": [mean.margin or 0.0 for mean in means]}
    values = [mean.value for mean in means]
    fills = {"color": colours, "pattern": {"shape": pattern}}
    fig.add_bar(x=names, y=values, error_y=margins, marker=fills, name=name, showlegend=bool(name), **where)


def figure_of(
    fig: Any,
    result: Any,
    title: str = "",
    *,
    width: int,
    height: int,
    legend: float = -0.27,
    bottom: int = 110,
) -> go.Figure:
    """Give a figure its title and the layout that all figures share.

    The title is the conclusion of the result, broken into lines. The figure is as wide as its frame.

    Args:
        fig: The figure.
        result: The result, which names the model and has a conclusion. None takes `title`.
        title: Title of a figure without a result; it is escaped here.
        width: Pixels at which it looks best: the width of its pictures.
        height: Height in pixels.
        legend: Vertical position of the legend, below the panels.
        bottom: Margin in pixels for axis titles and legend.
    """
    if result is not None:
        title = f"{result.model.name}: {result.conclusion().removesuffix('.')}"
    lines = textwrap.wrap(title, int(min(width, WIDTH_OF_FRAME) / PIXELS_PER_CHARACTER))
    top = 90 + LINE_OF_TITLE * max(0, len(lines) - 2)
    text = "<br>".join(html.escape(line) for line in lines)
    place = {"x": 0.01, "xanchor": "left", "y": 1 - 16 / height, "yanchor": "top"}
    fig.update_layout(
        template="plotly_white",
        meta={"width": width},
        height=height,
        font={"size": 13},
        margin={"l": 70, "r": 20, "t": top, "b": bottom},
        title={"text": text, "font": {"size": 15}, **place},
        legend={"orientation": "h", "y": legend, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    fig.for_each_annotation(
        lambda annotation: annotation.update(text=re.sub(r"^[a-z]+=", "", annotation.text))
    )  # of plotly's facets
    return fig
