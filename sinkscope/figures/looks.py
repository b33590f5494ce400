"""The drawings of further looks: the screen of the weights, checkpoints in a row, and the tokens of a text."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREY, ORANGE, finished, layer_axis, log_axes, panels


def draw_screen(result: Any) -> go.Figure:
    """Median and largest reach of every layer, and the candidates."""
    fig = panels(["What the neurons of each layer can write", "Candidates"], [0.55, 0.45])
    layers = [one.layer for one in result.layers]
    style: dict[str, Any] = {"row": 1, "col": 1, "mode": "lines+markers"}
    fig.add_scatter(x=layers, y=[one.median for one in result.layers], name="median", line={"color": GREY}, **style)
    fig.add_scatter(x=layers, y=[one.largest for one in result.layers], name="largest", line={"color": BLUE}, **style)
    layer_axis(fig, len(layers))
    log_axes(fig, y="largest norm written")
    fig.add_bar(
        x=[
            f"L{c.layer}" + ("" if c.expert is None else f"<br>expert {c.expert}") + f"<br>{c.neuron}"
            for c in result.candidates
        ],
        y=[c.reach for c in result.candidates],
        text=[f"z {c.z:.1f}" for c in result.candidates],
        textposition="outside",
        cliponaxis=False,
        marker_color=ORANGE,
        showlegend=False,
        row=1,
        col=2,
    )
    fig.update_xaxes(type="category", tickangle=0, row=1, col=2)
    fig.update_yaxes(title_text="largest norm written", rangemode="tozero", row=1, col=2)
    return finished(fig, result, "neurons by their weights", width=1200, height=460)
