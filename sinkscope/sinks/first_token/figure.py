"""The drawing of a `find_sinks` result."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import plotly.graph_objects as go

from sinkscope.display.style import BAND, BLUE, GREEN, GREY, ORANGE, RED, figure_of, panels
from sinkscope.sinks.first_token.neurons import CAUSAL_DROP
from sinkscope.sinks.first_token.result import FindSinks

TITLES = (
    "Norm of the residual stream",
    "Heads that attend to the sink",
    "What each neuron writes",
    "Norm lost by ablation",
)
WIDTHS = (0.24, 0.18, 0.27, 0.31)


def draw(result: FindSinks) -> go.Figure:
    """Norms and attention per layer, contributions of the neurons, and their ablation against the control."""
    shown = 4 if result.neurons else 2
    fig = panels(TITLES[:shown], WIDTHS[:shown], spacing=0.06)
    _draw_norms(fig, result)
    rates = []
    if result.attention_sink is not None:
        rates += [layer.rate for layer in result.attention_sink.layers]
    hover = "layer %{x}: %{y:.0%} of the heads<extra></extra>"
    layers = list(range(len(rates)))
    fig.add_bar(x=layers, y=rates, marker_color=BLUE, hovertemplate=hover, showlegend=False, row=1, col=2)
    fig.update_yaxes(title_text="share of the layer's heads", tickformat=".0%", range=[0.0, 1.02], col=2)
    dtick = max(1, len(result.first_token_norm) // 12)
    for col in (1, 2):
        fig.update_xaxes(title_text="layer", dtick=dtick, col=col)
    if result.neurons:
        _draw_neurons(fig, result)
    width = 1600 if result.neurons else 1000
    return figure_of(fig, result, width=width, height=460, barmode="group", bargap=0.25)


def _place(result: FindSinks) -> str:
    """Where the blue line is measured."""
    if result.norm_spike is None:
        return "the first token"
    return html.escape(result.norm_spike.place.rules[0].words)


def _draw_norms(fig: Any, result: FindSinks) -> None:
    layers = list(range(len(result.first_token_norm)))
    read = layers[: result.layers_read]
    outline = [*result.typical_high[: len(read)], *result.typical_low[: len(read)][::-1]]
    area = {"fill": "toself", "fillcolor": BAND, "mode": "none", "hoverinfo": "skip"}
    fig.add_scatter(x=[*read, *read[::-1]], y=outline, name="typical text, 5-95 %", **area, row=1, col=1)
    grey, blue = {"color": GREY}, {"color": BLUE, "width": 3}
    fig.add_scatter(x=layers, y=result.typical_norm, name="typical text, median", line=grey, row=1, col=1)
    fig.add_scatter(x=layers, y=result.first_token_norm, name=_place(result), line=blue, row=1, col=1)
    if result.norm_spike is not None:
        for layer in result.norm_spike.step_down:
            fig.add_vline(layer, line={"color": GREEN, "dash": "dot"}, annotation_text="falls", row=1, col=1)
    if result.sink_layer is not None:
        name = f"layer {result.sink_layer}"
        line = {"color": RED, "dash": "dash"}
        fig.add_vline(result.sink_layer, line=line, annotation_text=name, annotation_yshift=-40, row=1, col=1)
    fig.update_yaxes(title_text="L2 norm", type="log", exponentformat="power", nticks=8, col=1)


def _draw_neurons(fig: Any, result: FindSinks) -> None:
    frame = result.to_frame()
    names = [str(neuron).replace(".", "<br>") for neuron in result.neurons]
    label = {"textposition": "outside", "cliponaxis": False}
    look: dict[str, Any] = {
        "text": [f"{share:.0%}" for share in frame.share],
        "marker_color": np.where(frame.causal, ORANGE, GREY).tolist(),
        "hovertemplate": "%{x}: norm %{y:.4g}, %{text} of the MLP's<extra></extra>",
    }
    norms = frame.contribution_norm.tolist()
    fig.add_bar(x=names, y=norms, showlegend=False, **label, **look, row=1, col=3)
    fig.update_yaxes(title_text="norm of its contribution", col=3)
    drops, repeat_drops, controls = frame[["ablation_drop", "repeat_drop", "control_drop"]].T.to_numpy().tolist()
    if result.set_drop is not None and result.set_control_drop is not None:
        names.append("all<br>causal")
        drops.append(result.set_drop)
        repeat_drops.append(None)
        controls.append(result.set_control_drop)
    fig.add_bar(x=names, y=drops, name="lost at the spike", marker_color=BLUE, row=1, col=4)
    fig.add_bar(x=names, y=repeat_drops, name="lost at the last repeated token", marker_color=GREEN, row=1, col=4)
    label |= {"text": [f"{drop:.0%}" for drop in controls], "textangle": 0}  # most of these bars are too low to be seen
    name = "lost in the control: largest of 20 random draws"
    fig.add_bar(x=names, y=controls, name=name, marker_color=GREY, **label, row=1, col=4)
    fig.add_hline(CAUSAL_DROP, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=4)
    lowest = max(1.1 * min(0.0, *drops), -1.0)
    fig.update_yaxes(title_text="share of the norm lost", tickformat=".0%", range=[lowest, 1.05], col=4)
    axes = ("neuron (orange: causal; label: share)", "neuron (dotted: least drop of a causal one)")
    for col, title in enumerate(axes, start=3):
        fig.update_xaxes(title_text=title, type="category", tickangle=0, col=col)
