"""The drawings of further looks: the screen of the weights, checkpoints in a row, and the tokens of a text."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, axes, by_layer, counted, finished, panels, powers, shares
from sinkscope.notation import neuron_name
from sinkscope.results import cell


def draw_screen(result: Any) -> go.Figure:
    """Median and largest reach of every layer, and the candidates."""
    fig = panels(["What the neurons of each layer can write", "Candidates"], [0.55, 0.45])
    layers = [one.layer for one in result.layers]
    style: dict[str, Any] = {"row": 1, "col": 1, "mode": "lines+markers"}
    fig.add_scatter(x=layers, y=[one.median for one in result.layers], name="median", line={"color": GREY}, **style)
    fig.add_scatter(x=layers, y=[one.largest for one in result.layers], name="largest", line={"color": BLUE}, **style)
    axes(fig, x=counted("layer", len(layers)), y=powers("largest norm written"))
    fig.add_bar(
        x=[neuron_name(c.layer, c.expert, c.neuron).replace(".", "<br>") for c in result.candidates],
        y=[c.reach for c in result.candidates],
        text=[f"z {c.z:.1f}" for c in result.candidates],
        textposition="outside",
        cliponaxis=False,
        marker_color=ORANGE,
        showlegend=False,
        row=1,
        col=2,
    )
    written = {"title_text": "largest norm written", "rangemode": "tozero"}
    axes(fig, 1, 2, x={"type": "category", "tickangle": 0}, y=written)
    return finished(fig, result, width=1200, height=460)


def draw_positions(result: Any) -> go.Figure:
    """Norm over the typical one and attention received, layer by position."""
    fig = panels(["Norm over the typical one", "Attention received, mean of heads and later queries"], spacing=0.12)
    names = [f"{i} {html.escape(repr(token.text))}" for i, token in enumerate(result.tokens)]
    layers, places = list(range(len(result.norm))), list(range(len(names)))
    ratio = [[v / usual for v in row] for row, usual in zip(result.norm, result.typical_norm, strict=True)]
    shown = [[math.log10(max(v, 1e-3)) for v in row] for row in ratio]
    given = [[None if math.isnan(v) else v for v in row] for row in result.attention.tolist()]
    ticks = list(range(-3, 8))
    bar = {"tickvals": ticks, "ticktext": [f"{10.0**t:g}" for t in ticks], "x": 0.44, "thickness": 12}
    for col, z, text, colours, scale in (
        (1, shown, ratio, [[0, "#f7f7f7"], [1, BLUE]], bar),
        (2, given, given, [[0, "#f7f7f7"], [1, ORANGE]], {"thickness": 12}),
    ):
        fig.add_heatmap(
            x=places,
            y=layers,
            z=z,
            text=[[f"{name}: {cell(v)}" for name, v in zip(names, row, strict=True)] for row in text],
            hovertemplate="layer %{y}, %{text}<extra></extra>",
            colorscale=colours,
            zmin=0,
            colorbar=scale,
            row=1,
            col=col,
        )
        axes(fig, 1, col, x="position", y=by_layer(len(layers)))
        if len(names) <= 40:
            axes(fig, 1, col, x={"tickvals": places, "ticktext": names, "tickangle": -60, "tickfont": {"size": 10}})
    return finished(fig, result, width=1400, height=520, bottom=150 if len(names) <= 40 else 80)


def draw_training(result: Any) -> go.Figure:
    """Sink rate, spike, and layer with neurons, checkpoint by checkpoint."""
    fig = panels(["Sink rate", "Largest norm of the first token", "Layer and neurons of the sink"], spacing=0.08)
    known = result.measured
    names = [html.escape(c.name) for c in result.checkpoints]
    style: dict[str, Any] = {"x": [html.escape(c.name) for c in known], "row": 1, "showlegend": False}
    line = {"mode": "lines+markers", **style}
    fig.add_scatter(y=[c.rate for c in known], line={"color": ORANGE}, col=1, **line)
    fig.add_scatter(y=[c.spike for c in known], line={"color": BLUE}, col=2, **line)
    few = len(known) <= 12
    fig.add_scatter(
        y=[c.sink_layer for c in known],
        text=[c.shown for c in known],
        mode="markers+text" if few else "markers",
        textposition="top center",
        marker={"color": GREEN, "size": 9},
        hovertemplate="%{x}: layer %{y}, %{text}<extra></extra>",
        col=3,
        **style,
    )
    axes(fig, None, None, x={"type": "category", "categoryorder": "array", "categoryarray": names})
    axes(fig, 1, 1, y=shares("share of heads") | {"rangemode": "tozero"})
    axes(fig, 1, 2, y=powers("over the typical norm"))
    depth = result.model.n_layers
    axes(fig, 1, 3, y=by_layer(depth) | {"autorange": False, "range": [depth - 0.5, -0.5]})
    return finished(fig, result, width=1400, height=460, bottom=120)
