"""The drawing of `repeat_attention`."""

from __future__ import annotations

import html
import math
from itertools import pairwise
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, ORANGE, RED

_COLOURS = (BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9")


def draw(result: Any) -> go.Figure:
    """Attention to the first and to all high-norm positions over layers; below, a picture per sequence and layer."""
    shown = [p.layer for p in result.sequences[0].pictures]
    across, down = max(len(shown), 1), len(result.sequences)
    left = (across + 1) // 2
    specs: list[list[Any]] = [[None] * across]
    specs[0][0] = {"colspan": left}
    specs[0][left if across > 1 else 0] = {"colspan": across - left or 1}
    labels = [html.escape(s.label) for s in result.sequences]
    labels = [labels[0], *(f"{result.max_repeats} x {label}" for label in labels[1:])]
    titles = ["Attention of all queries", "Tail: a high-norm key over an ordinary one"][: 2 if across > 1 else 1]
    titles += [f"layer {layer}: {label}" for label in labels for layer in shown]
    fig = make_subplots(
        rows=1 + down,
        cols=across,
        specs=[*specs, *[[{} for _ in range(across)] for _ in range(down)]],
        subplot_titles=titles,
        row_heights=[1.1, *[1.0] * down],
        vertical_spacing=0.3 / (1 + down),
        horizontal_spacing=0.035,
    )
    _over_layers(fig, result, labels)
    if across > 1:
        _ratios(fig, result, labels, left + 1)
    for row, sequence in enumerate(result.sequences, 2):
        for column, picture in enumerate(sequence.pictures, 1):
            _picture(fig, result.edges, picture, row, column)
    where = "no sink" if result.sink_layer is None else f"sink layer {result.sink_layer}"
    name = html.escape(result.model.name)
    fig.update_layout(
        title={"text": f"{name}: head-averaged attention, {where}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400,
        height=400 + 330 * down,
        margin={"l": 80, "r": 20, "t": 100, "b": 60},
        font={"size": 13},
        legend={"x": 1.01, "y": 1, "yanchor": "top", "font": {"size": 11}},
        coloraxis={"colorscale": "Viridis", "cmin": -3, "cmax": 0, "colorbar": _bar(down)},
    )
    fig.update_xaxes(title_text="key position", row=1 + down)
    fig.update_yaxes(title_text="query position", col=1)
    fig.update_yaxes(title_text="share of attention", row=1, col=1)
    return fig


def _bar(down: int) -> dict[str, Any]:
    return {
        "title": {"text": "share of attention<br>(queries of a row,<br>keys of a column)"},
        "tickvals": [-3, -2, -1, 0],
        "ticktext": ["0.001", "0.01", "0.1", "1"],
        "len": 0.9 * down / (1 + down),
        "y": 0,
        "yanchor": "bottom",
    }


def _over_layers(fig: Any, result: Any, labels: list[str]) -> None:
    layers = list(range(result.model.n_layers))
    for sequence, label, colour in zip(result.sequences, labels, _COLOURS * len(labels), strict=False):
        lines = [(sequence.first, "position 0", "dot")]
        if sequence.mass is not None:
            lines.append((sequence.mass, "high-norm positions", "solid"))
            lines.append(([sequence.uniform] * len(layers), "these, were it uniform", "dash"))
        for values, what, dash in lines:
            fig.add_scatter(
                x=layers,
                y=values,
                mode="lines" if dash == "dash" else "lines+markers",
                name=f"{label}: {what}",
                line={"color": colour, "dash": dash, "width": 1 if dash == "dash" else 2},
                row=1,
                col=1,
            )
    fig.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 12), row=1, col=1)
    fig.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)


def _ratios(fig: Any, result: Any, labels: list[str], column: int) -> None:
    layers = list(range(result.model.n_layers))
    for sequence, label, colour in zip(result.sequences, labels, _COLOURS * len(labels), strict=False):
        if sequence.tail_ratio is not None:
            fig.add_scatter(
                x=layers,
                y=sequence.tail_ratio,
                mode="lines+markers",
                name=f"{label}: ratio",
                showlegend=False,
                line={"color": colour},
                row=1,
                col=column,
            )
    fig.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 12), row=1, col=column)
    fig.update_yaxes(type="log", exponentformat="power", dtick=1, row=1, col=column)


def _picture(fig: Any, edges: Any, picture: Any, row: int, column: int) -> None:
    cells = [[math.log10(max(v, 1e-6)) if v > 0 else None for v in line] for line in picture.cells]
    ends = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    fig.add_heatmap(
        z=cells,
        coloraxis="coloraxis",
        row=row,
        col=column,
        customdata=[
            [(q, k, v) for k, v in zip(ends, line, strict=True)] for q, line in zip(ends, picture.cells, strict=True)
        ],
        hovertemplate="queries %{customdata[0]}, keys %{customdata[1]}: %{customdata[2]:.3g}<extra></extra>",
    )
    ticks = [*range(0, len(ends) - 2, max(1, len(ends) // 4)), len(ends) - 1]
    style = {"tickvals": ticks, "ticktext": [str(edges[i]) for i in ticks], "row": row, "col": column}
    fig.update_xaxes(**style)
    fig.update_yaxes(autorange="reversed", **style)
