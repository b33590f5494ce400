"""The drawing of `convergence`."""

from __future__ import annotations

import html
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED

_COLORS = (BLUE, ORANGE, GREEN, RED, GREY, "#cc79a7", "#56b4e9")


def draw(result: Any) -> go.Figure:
    """Distance and bound over n, each head's distance against its bound, and the distances of all layers."""
    deep = result.layers_read > 1
    titles = ["First layer: distance to the token alone", f"Its heads at n = {result.counts[-1]}"]
    fig = make_subplots(
        cols=2 + deep,
        subplot_titles=[*titles, *(["Every layer (median over tokens)"] if deep else [])],
        horizontal_spacing=0.075,
    )
    _first(fig, result)
    _heads(fig, result)
    if deep:
        _layers(fig, result)
    name = html.escape(result.model.name)
    if result.outside is not None:
        text = f"{name}: outside theorem 4.1 ({html.escape(result.outside)})"
    else:
        slopes = [c.exponent for c in result.wholes() if c.exponent is not None]
        said = "no head exceeds its bound" if result.holds else "a head exceeds its bound"
        text = f"{name}: {said}" + (f"; exponent of n {median(slopes):.2f}" if slopes else "")
    fig.update_layout(
        title={"text": text, "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400 if deep else 1000,
        height=480,
        margin={"l": 70, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        legend={"orientation": "h", "y": -0.24, "x": 0.3, "xanchor": "center", "yanchor": "top"},
        legend2={"orientation": "h", "y": -0.24, "x": 1, "xanchor": "right", "yanchor": "top"},
    )
    return fig


def _label(result: Any, curve: Any) -> str:
    word = html.escape(repr(curve.token), quote=False)
    return word if len(result.prefixes) == 1 else f"{word}, k = {result.prefixes[curve.prefix].k}"


def _first(fig: Any, result: Any) -> None:
    style: dict[str, Any] = {"row": 1, "col": 1, "mode": "lines"}
    for i, curve in enumerate(result.wholes()):
        color, label = _COLORS[i % len(_COLORS)], _label(result, curve)
        y = [d if d > 0 else None for d in curve.distance]
        fig.add_scatter(x=result.counts, y=y, name=label, line={"color": color, "width": 2.5}, **style)
        if curve.bound is not None:
            dashed = {"color": color, "dash": "dot", "width": 1.5}
            fig.add_scatter(
                x=result.counts, y=curve.bound, line=dashed, showlegend=False, name=f"{label}: bound", **style
            )
    if any(c.bound is not None for c in result.wholes()):
        fig.add_scatter(
            x=[None], y=[None], name="dotted: bound, sum over heads", line={"color": GREY, "dash": "dot"}, **style
        )
    if result.window is not None:
        fig.add_vline(result.window, line={"color": RED, "dash": "dash"}, row=1, col=1)
        fig.add_annotation(
            x=0.03,
            y=0.05,
            xref="x domain",
            yref="y domain",
            showarrow=False,
            font={"color": RED},
            row=1,
            col=1,
            text=f"from n = {result.window} the prefix is out of the window:<br>the distance is 0",
            align="left",
            xanchor="left",
        )
    fig.update_xaxes(title_text="repetitions n", type="log", dtick=1, row=1, col=1)
    fig.update_yaxes(title_text="L2 distance of the outputs", type="log", dtick=1, exponentformat="power", row=1, col=1)


def _heads(fig: Any, result: Any) -> None:
    count = 1 + max(c.head for c in result.curves if c.head is not None)
    for i, whole in enumerate(result.wholes()):
        heads = [
            c
            for c in result.curves
            if c.head is not None and c.layer == 0 and (c.id, c.prefix) == (whole.id, whole.prefix)
        ]
        shown = [c for c in heads if c.distance[-1] > 0]
        at: dict[str, Any] = {"x": [c.head for c in shown], "mode": "markers", "showlegend": False, "row": 1, "col": 2}
        color, label = _COLORS[i % len(_COLORS)], _label(result, whole)
        fig.add_scatter(y=[c.distance[-1] for c in shown], name=label, marker={"color": color, "size": 8}, **at)
        if any(c.bound is not None for c in shown):
            bars = {"color": color, "symbol": "line-ew-open", "size": 16, "line": {"width": 2}}
            bounds = [None if c.bound is None else c.bound[-1] for c in shown]
            fig.add_scatter(y=bounds, name=f"{label}: bound", marker=bars, **at)
    fig.update_xaxes(title_text="head (dot: measured, bar: bound)", dtick=max(1, count // 12), row=1, col=2)
    fig.update_yaxes(type="log", exponentformat="power", row=1, col=2)


def _layers(fig: Any, result: Any) -> None:
    count = result.layers_read
    scale = sample_colorscale("viridis", [0.9 * i / max(1, count - 1) for i in range(count)])
    named = set(range(count)) if count <= 8 else {0, count // 2, count - 1}
    for layer in range(count):
        curves = result.wholes(layer)
        y = [median(c.distance[i] for c in curves) for i in range(len(result.counts))]
        fig.add_scatter(
            x=result.counts,
            y=[v if v > 0 else None for v in y],
            name=f"layer {layer}",
            mode="lines",
            line={"color": scale[layer]},
            showlegend=layer in named,
            legend="legend2",
            row=1,
            col=3,
        )
    fig.update_xaxes(title_text="repetitions n", type="log", dtick=1, row=1, col=3)
    fig.update_yaxes(type="log", dtick=1, exponentformat="power", row=1, col=3)
