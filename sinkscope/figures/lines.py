"""The drawings of `line_weights` and `line_overlap`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED, finished, level, panels

_WEIGHTS = (
    ("chosen lines, each cell once", "mass", BLUE, "solid"),
    ("line by line, crossings twice", "line_sums", ORANGE, "solid"),
    ("random lines of the same length", "random_mass", GREY, "dash"),
    ("cells covered", "cells", GREEN, "dot"),
)
_OVERLAPS = (
    ("between inputs", "inputs", BLUE, "solid"),
    ("with i = j (paper)", "inputs_paper", BLUE, "dash"),
    ("between inputs, random lines", "inputs_random", BLUE, "dot"),
    ("first half in second", "segments", ORANGE, "solid"),
    ("within each half", "segments_relative", ORANGE, "dash"),
    ("halves, random lines", "segments_random", ORANGE, "dot"),
)


def draw_weights(result: Any) -> go.Figure:
    """Draw mass against eta over all heads, each head at the paper's eta, and an attention map with its lines."""
    p, at = result.picture, result.shown
    titles = (
        "Mean over the heads",
        f"Each head, eta {result.etas[at]:g}",
        f"Layer {p.layer}, head {p.head}, first {len(p.words)} tokens: heaviest {p.eta:.0%} of the lines",
    )
    fig = panels(titles, [0.3, 0.3, 0.4], spacing=0.1)
    _curves(fig, result, _WEIGHTS, 0.9)
    fig.update_yaxes(title_text="share", tickformat=".0%", rangemode="tozero", row=1, col=1)
    _heads(
        fig,
        result,
        2,
        lambda h: (h.mass[at], h.random_mass[at], h.cells[at], h.vertical[at]),
        "<br>random lines %{customdata[1]:.1%}, cells %{customdata[2]:.1%}, vertical %{customdata[3]:.0%} of the lines",
        colorbar={"title": {"text": "mass"}, "tickformat": ".0%", "x": 0.585, "thickness": 12},
    )
    _map(fig, p)
    legend = {"y": -0.14, "x": 0, "xanchor": "left"}
    return finished(fig, result, "what vertical and slash lines carry", width=1500, height=600, legend=legend)


def draw_overlap(result: Any) -> go.Figure:
    """Draw the overlap of lines by eta and by head; below, which queries find the tokens that answers attend to."""
    t, eta = result.tokens, result.etas[0]
    titles = ["Lines, mean over the heads", f"Between inputs, eta {eta:g}", f"First half in second, eta {eta:g}"]
    if t is not None:
        titles += ["Question's place: found by the last window", "Found by a block of queries", "Blocks of an answer"]
    rows = 1 if t is None else 2
    fig = panels(titles, rows=rows, cols=3, vertical_spacing=0.16, column_widths=[0.36, 0.32, 0.32])
    _curves(fig, result, _OVERLAPS, 0.5)
    fig.update_yaxes(title_text="lines shared", tickformat=".0%", range=[0, 1], row=1, col=1)
    place = {"len": 1.0, "y": 0.5} if t is None else {"len": 0.4, "y": 0.8}
    for col, field in ((2, "inputs"), (3, "segments")):
        bar = {"showscale": col == 3, "colorbar": {"tickformat": ".0%", "thickness": 12, **place}}
        _heads(fig, result, col, lambda h, field=field: (getattr(h, field)[0],), "", **bar)
    if t is not None:
        _tokens(fig, t)
    legend = {"y": -0.25 / rows + 0.02, "x": 0, "xanchor": "left"}
    height = 500 * rows + 100
    told = "how far heavy lines agree"
    return finished(fig, result, told, width=1500, height=height, legend=legend, bottom=120, barmode="group")


def _curves(fig: Any, result: Any, series: Iterable[tuple[str, str, str, str]], at: float) -> None:
    for name, field, color, dash in series:
        line = {"color": color, "dash": dash}
        hover = "eta %{x}: %{y:.1%}<extra>" + name + "</extra>"
        y = list(getattr(result, field))
        fig.add_scatter(
            x=list(result.etas), y=y, name=name, mode="lines+markers", row=1, col=1, line=line, hovertemplate=hover
        )
    level(fig, at)
    fig.update_xaxes(title_text="share of all lines chosen (eta)", rangemode="tozero", row=1, col=1)


def _heads(fig: Any, result: Any, col: int, numbers: Any, hover: str, **settings: Any) -> None:
    """A map, layer by head; the first of a head's `numbers` is its colour."""
    cells = {(h.layer, h.head): numbers(h) for h in result.heads}
    layers, heads = (sorted({key[i] for key in cells}) for i in (0, 1))
    grid = [[cells[layer, h] for h in heads] for layer in layers]
    fig.add_heatmap(
        x=heads,
        y=layers,
        z=[[cell[0] for cell in row] for row in grid],
        zmin=0,
        zmax=1,
        customdata=grid,
        colorscale="Viridis",
        hovertemplate=f"layer %{{y}}, head %{{x}}: %{{z:.1%}}{hover}<extra></extra>",
        row=1,
        col=col,
        **settings,
    )
    fig.update_xaxes(title_text="head", dtick=max(1, len(heads) // 8), row=1, col=col)
    fig.update_yaxes(title_text="layer", dtick=max(1, len(layers) // 16), autorange="reversed", row=1, col=col)


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
    for name, color, ends in (
        ("vertical line", BLUE, [((b, b), (b, n - 1)) for b in p.vertical]),
        ("slash line", ORANGE, [((0, o), (n - 1 - o, n - 1)) for o in p.slash]),
    ):
        fig.add_scatter(
            x=[x for start, stop in ends for x in (start[0], stop[0], None)],
            y=[y for start, stop in ends for y in (start[1], stop[1], None)],
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


def _tokens(fig: Any, t: Any) -> None:
    """The second row of `draw_overlap`, with a colour for each budget."""
    own = [b for b in t.blocks if b.block >= 0 and b.apart is not None]
    curves = (
        (2, "block", "", [b.block for b in t.blocks], [b.overlap for b in t.blocks]),
        (2, "block", "dash", [b.block for b in own], [b.apart for b in own]),
        (3, "", "", [d.blocks for d in t.distances], [d.overlap for d in t.distances]),
    )
    for i, budget in enumerate(t.budgets):
        color, tokens = (GREEN, ORANGE, BLUE, RED, GREY)[i % 5], f"{budget:.0%} of the tokens"
        fig.add_bar(
            x=[html.escape(p.position) for p in t.positions],
            y=[p.overlap[i] for p in t.positions],
            name=tokens,
            marker_color=color,
            row=2,
            col=1,
            hovertemplate="%{x}: %{y:.1%}<extra>" + tokens + "</extra>",
        )
        level(fig, t.random[i], 2, 1, color=color)
        for col, before, dash, x, values in curves:
            where = "block %{x}" if before else "%{x} apart"
            fig.add_scatter(
                x=x,
                y=[value[i] for value in values],
                line={"color": color, "dash": dash or "solid"},
                mode="lines+markers",
                showlegend=False,
                hovertemplate=f"{where}: %{{y:.1%}}<extra>{tokens}</extra>",
                row=2,
                col=col,
            )
    if own:
        fig.add_vline(-0.5, line={"color": GREY, "dash": "dot", "width": 1}, row=2, col=2)
    for col, x, y in (
        (1, "place of the question (dotted: random tokens)", "important tokens found"),
        (2, "block (0: first of the answer; dashed: without its own queries)", "important tokens found"),
        (3, f"blocks of {t.window} queries apart", "important tokens shared"),
    ):
        fig.update_xaxes(title_text=x, dtick=1 if col == 3 else None, row=2, col=col)
        fig.update_yaxes(title_text=y, tickformat=".0%", range=[0, 1], row=2, col=col)
