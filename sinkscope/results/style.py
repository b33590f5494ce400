"""Colours and layout that drawings share."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.errors import SinkscopeError
from sinkscope.results.row import Row
from sinkscope.results.tables import long_table as long_table

# Okabe and Ito's colours, which readers without colour vision can also distinguish
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", RED)
PIXELS_PER_CHARACTER = 7.7
WIDTH_OF_FRAME = 900
"""Pixels that a notebook gives a figure."""
LINE_OF_TITLE = 18
"""Pixels."""
COLUMN, LETTERS = 480, 15
"""Pixels of a picture of one panel, and of its letters: 7 points where a column is 3.25 inches wide."""
SCALE = 2  # pixels of a picture for each of a page


class Figure(go.Figure):
    """A figure that is written to pictures at the width at which it looks best, so that no title is cut."""

    def to_image(self, *args: Any, **options: Any) -> bytes:
        """Return a picture, as plotly does; its width, height and scale are those of the figure if none are given."""
        return super().to_image(*args, **self._sized(options))

    def write_image(self, *args: Any, **options: Any) -> None:
        """Write a picture, as plotly does; its width, height and scale are those of the figure if none are given."""
        super().write_image(*args, **self._sized(options))

    def _sized(self, options: dict[str, Any]) -> dict[str, Any]:
        layout: Any = self.layout
        width = (layout.meta or {}).get("width", WIDTH_OF_FRAME)
        return {"width": width, "height": layout.height, "scale": SCALE, **options}


def panels(titles: Sequence[str], *, columns: int | None = None, spacing: float = 0.09) -> Any:
    """Make a figure with panels side by side, and in further rows if there are more than `columns`.

    Args:
        titles: One title per panel.
        columns: Panels in a row. None: all.
        spacing: Space between panels, as a share of the figure's width.
    """
    columns = columns or len(titles)
    rows = -(-len(titles) // columns)
    spaces: dict[str, Any] = {"horizontal_spacing": spacing, "vertical_spacing": 0.3 / rows}
    return make_subplots(rows, columns, subplot_titles=list(titles), **spaces)


def bars(fig: Any, rows: Iterable[Row], number: str, colour: str, name: str = "", **where: int) -> None:
    """Draw a number of rows as bars, with its margins; rows without it are left out.

    Args:
        fig: The figure.
        rows: The rows.
        number: The number.
        colour: The colour.
        name: What a legend calls them. Empty: they are in none.
        where: The panel: row and col.
    """
    shown = [row for row in rows if number in row.numbers]
    margins = {"type": "data", "array": [row.margin(number) for row in shown]}
    names, values = [html.escape(row.name) for row in shown], [row.get(number) for row in shown]
    fig.add_bar(x=names, y=values, error_y=margins, marker_color=colour, name=name, showlegend=bool(name), **where)


def panel_of(figure: Any, name: str) -> Figure:
    """Return one panel of a figure, large, with its traces, marks and axes.

    Args:
        figure: The figure.
        name: Its number from 1, or a word of its title.

    Raises:
        SinkscopeError: No panel has that number or word; the error lists the titles.
    """
    titles: dict[str, tuple[str, str]] = {}
    axes = [axis for axis in figure.layout if re.fullmatch(r"yaxis\d*", axis)]
    for y in sorted(axes, key=lambda axis: int(axis.removeprefix("yaxis") or 1)):
        x = (figure.layout[y].anchor or "x").replace("x", "xaxis")
        left, right = figure.layout[x].domain or (0, 1)
        _, top = figure.layout[y].domain or (0, 1)
        for annotation in figure.layout.annotations:
            if (
                annotation.xref == "paper"
                and abs(annotation.x - (left + right) / 2) < 0.02
                and abs(annotation.y - top) < 0.02
            ):
                titles[annotation.text] = (x.replace("axis", ""), y.replace("axis", ""))
    matching = list(titles)[int(name) - 1 : int(name)] if name.isdigit() else []
    matching += [title for title in titles if name.lower() in title.lower()]
    if not matching or not name.strip():
        raise SinkscopeError(f"panel={name!r}: expected a word of a title: {'; '.join(titles) or 'it has one panel'}")
    return _alone(figure, matching[0], *titles[matching[0]])


def _alone(figure: Any, title: str, x: str, y: str) -> Figure:
    """Return one panel of a figure as a figure of its own, with letters of 7 points at the width of a column."""
    data = [trace for trace in figure.data if (trace.xaxis or "x", trace.yaxis or "y") == (x, y)]
    layout: dict[str, Any] = figure.layout.to_plotly_json()
    options = {name: value for name, value in layout.items() if not re.fullmatch(r"[xy]axis\d*", name)}
    for letter, axis in (("x", x), ("y", y)):
        options[f"{letter}axis"] = {**layout[axis.replace(letter, f"{letter}axis")], "domain": [0, 1], "anchor": None}
    for name in ("annotations", "shapes"):
        marks = [mark for mark in layout.get(name, []) if str(mark.get("xref", "")).split()[0] == x]
        for mark in marks:
            mark |= {"xref": mark["xref"].replace(x, "x"), "yref": mark["yref"].replace(y, "y")}
        options[name] = marks
    lines = textwrap.wrap(re.sub("<[^>]+>", " ", title), int(COLUMN / 8.5))
    options["title"] = {**layout.get("title", {}), "text": "<br>".join(lines), "font": {"size": LETTERS}}
    alone: Any = Figure(layout={**options, "height": 360, "meta": {"width": COLUMN}, "font": {"size": LETTERS}})
    alone.update_layout(margin={"l": 70, "r": 15, "t": 30 + 20 * len(lines), "b": 60})
    alone.add_traces([trace.update(xaxis="x", yaxis="y") for trace in data])
    named = [trace.name for trace in data if trace.name and trace.showlegend is not False]
    if len(named) > 1:  # a legend below the axis title takes a line for two names
        rows = -(-len(named) // 2)
        alone.update_layout(height=380 + 22 * rows, margin_b=80 + 22 * rows, legend={"y": -0.24, "font": {"size": 13}})
    return alone


def figure_of(
    fig: Any,
    result: Any,
    title: str = "",
    *,
    width: int,
    height: int,
    legend: float = -0.27,
    bottom: int = 110,
    **more: Any,
) -> Figure:
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
        more: Further options of plotly's `update_layout`.
    """
    if result is not None:
        sentence = result.conclusion().removesuffix(".")
        title = f"{result.model.name}: {sentence}"
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
    return Figure(fig.update_layout(**more))
