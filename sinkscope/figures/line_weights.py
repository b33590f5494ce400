"""The drawing of `line_weights`."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED


def draw(result: Any) -> go.Figure:
    """Mass against eta over all heads, each head at the paper's eta, and an attention map with its lines."""
    p, at = result.picture, min(range(len(result.etas)), key=lambda i: abs(result.etas[i] - 0.1))
    titles = (
        "Mean over the heads",
        f"Each head, eta {result.etas[at]:g}",
        f"Layer {p.layer}, head {p.head}, first {len(p.words)} tokens: heaviest {p.eta:.0%} of the lines",
    )
    fig = make_subplots(cols=3, subplot_titles=titles, column_widths=[0.3, 0.3, 0.4], horizontal_spacing=0.1)
    _curves(fig, result)
    _heads(fig, result, at)
    _map(fig, p)
    fig.update_layout(
        title={
            "text": f"{html.escape(result.model.name)}: what vertical and slash lines carry",
            "x": 0.01,
            "xanchor": "left",
        },
        template="plotly_white",
        width=1500,
        height=600,
        margin={"l": 70, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        legend={"orientation": "h", "y": -0.14, "x": 0, "xanchor": "left", "yanchor": "top"},
    )
    return fig


def _curves(fig: Any, result: Any) -> None:
    for name, field, color, dash in (
        ("chosen lines, each cell once", "mass", BLUE, "solid"),
        ("line by line, crossings twice", "line_sums", ORANGE, "solid"),
        ("random lines of the same length", "random_mass", GREY, "dash"),
        ("cells covered", "cells", GREEN, "dot"),
    ):
        fig.add_scatter(
            x=list(result.etas),
            y=list(getattr(result, field)),
            name=name,
            mode="lines+markers",
            row=1,
            col=1,
            line={"color": color, "dash": dash},
            hovertemplate="eta %{x}: %{y:.1%}<extra>" + name + "</extra>",
        )
    fig.add_hline(0.9, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=1)
    fig.update_xaxes(title_text="share of all lines chosen (eta)", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="share", tickformat=".0%", rangemode="tozero", row=1, col=1)


def _heads(fig: Any, result: Any, at: int) -> None:
    cells = {(h.layer, h.head): h for h in result.heads}
    layers, heads = (sorted({key[i] for key in cells}) for i in (0, 1))
    fig.add_heatmap(
        x=heads,
        y=layers,
        z=[[cells[layer, h].mass[at] for h in heads] for layer in layers],
        zmin=0,
        zmax=1,
        customdata=[
            [[cells[layer, h].random_mass[at], cells[layer, h].cells[at], cells[layer, h].vertical[at]] for h in heads]
            for layer in layers
        ],
        colorscale="Viridis",
        colorbar={"title": {"text": "mass"}, "tickformat": ".0%", "x": 0.585, "thickness": 12},
        hovertemplate="layer %{y}, head %{x}: %{z:.1%}<br>random lines %{customdata[0]:.1%}, cells "
        "%{customdata[1]:.1%}, vertical %{customdata[2]:.0%} of the lines<extra></extra>",
        row=1,
        col=2,
    )
    fig.update_xaxes(title_text="head", dtick=max(1, len(heads) // 8), row=1, col=2)
    fig.update_yaxes(title_text="layer", dtick=max(1, len(layers) // 16), autorange="reversed", row=1, col=2)


def _map(fig: Any, p: Any) -> None:
    values, n = p.values(), len(p.words)
    words = [html.escape(repr(word)) for word in p.words]
    fig.add_heatmap(
        z=[[math.sqrt(v) if k <= q else None for k, v in enumerate(row)] for q, row in enumerate(values)],
        customdata=[[[words[q], words[k], v] for k, v in enumerate(row)] for q, row in enumerate(values)],
        colorscale="Greys",
        showscale=False,
        zmin=0,
        zmax=1,
        row=1,
        col=3,
        hovertemplate="%{customdata[0]} (%{y}) looks at %{customdata[1]} (%{x}): %{customdata[2]:.3f}<extra></extra>",
    )
    for name, color, places in (
        ("vertical line", BLUE, [((b, b), (b, n - 1)) for b in p.vertical]),
        ("slash line", ORANGE, [((0, o), (n - 1 - o, n - 1)) for o in p.slash]),
    ):
        x: list[int | None] = []
        y: list[int | None] = []
        for start, stop in places:
            x += [start[0], stop[0], None]
            y += [start[1], stop[1], None]
        fig.add_scatter(
            x=x,
            y=y,
            mode="lines",
            name=name,
            line={"color": color, "width": 2},
            opacity=0.5,
            hoverinfo="skip",
            row=1,
            col=3,
        )
    fig.update_xaxes(title_text="key position", range=[-0.5, n - 0.5], row=1, col=3)
    fig.update_yaxes(title_text="query position", range=[n - 0.5, -0.5], row=1, col=3)
