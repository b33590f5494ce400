"""The drawing of a `find_sinks` result."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.results.style import BAND, BLUE, GREEN, GREY, ORANGE, RED, figure_of, panels
from sinkscope.sinks.find.neurons import CAUSAL_DROP

TITLES = ("Norm of the residual stream", "Heads that attend to the sink", "Norm lost by ablation")
WIDTHS = (0.35, 0.25, 0.4)


def draw(result: Any) -> go.Figure:
    """Norms and attention per layer of a `FindSinks`, and the ablation of the neurons against the control."""
    shown = 3 if result.neurons else 2
    fig = panels(TITLES[:shown], WIDTHS[:shown], spacing=0.06)
    _draw_norms(fig, result)
    rates = []
    if result.sink is not None:
        rates += result.sink.layer_rates
    hover = "layer %{x}: %{y:.0%} of the heads<extra></extra>"
    layers = list(range(len(rates)))
    fig.add_bar(x=layers, y=rates, marker_color=BLUE, hovertemplate=hover, showlegend=False, row=1, col=2)
    fig.update_yaxes(title_text="share of the layer's heads", tickformat=".0%", range=[0.0, 1.02], col=2)
    dtick = max(1, len(result.spike_norm) // 12)
    for col in (1, 2):
        fig.update_xaxes(title_text="layer", dtick=dtick, col=col)
    if result.neurons:
        _draw_neurons(fig, result)
    return figure_of(fig, result, width=500 * shown, height=480, legend=-0.36, bottom=130, barmode="group", bargap=0.25)


def _place(result: Any) -> str:
    """Where the blue line is measured."""
    if result.spike is None:
        return "the first token"
    return html.escape(result.spike.place.words)


def _draw_norms(fig: Any, result: Any) -> None:
    layers = list(range(len(result.spike_norm)))
    read = layers[: result.layers_read]
    outline = [*result.typical_high[: len(read)], *result.typical_low[: len(read)][::-1]]
    area = {"fill": "toself", "fillcolor": BAND, "mode": "none", "hoverinfo": "skip"}
    fig.add_scatter(x=[*read, *read[::-1]], y=outline, name="typical text, 5-95 %", **area, row=1, col=1)
    grey, blue = {"color": GREY}, {"color": BLUE, "width": 3}
    fig.add_scatter(x=layers, y=result.typical_norm, name="typical text, median", line=grey, row=1, col=1)
    fig.add_scatter(x=layers, y=result.spike_norm, name=_place(result), line=blue, row=1, col=1)
    if result.spike is not None:
        for layer in result.spike.step_down:
            fig.add_vline(layer, line={"color": GREEN, "dash": "dot"}, annotation_text="falls", row=1, col=1)
    if result.sink_layer is not None:
        name = f"layer {result.sink_layer}"
        line = {"color": RED, "dash": "dash"}
        fig.add_vline(result.sink_layer, line=line, annotation_text=name, annotation_yshift=-40, row=1, col=1)
    fig.update_yaxes(title_text="L2 norm", type="log", exponentformat="power", nticks=8, col=1)


def _draw_neurons(fig: Any, result: Any) -> None:
    names = [str(neuron).replace(".", "<br>") for neuron in result.neurons]
    drops = [neuron.ablation_drop for neuron in result.neurons]
    controls = [neuron.control_drop for neuron in result.neurons]
    colors = [ORANGE if neuron.causal else BLUE for neuron in result.neurons]
    fig.add_bar(x=names, y=drops, name="lost at the spike", marker_color=colors, row=1, col=3)
    shown = [f"{drop:.0%}" for drop in controls]  # most of these bars are too low to be seen
    label = {"textposition": "outside", "cliponaxis": False, "text": shown, "textangle": 0}
    name = "lost in the control: largest of 20 random draws"
    fig.add_bar(x=names, y=controls, name=name, marker_color=GREY, **label, row=1, col=3)
    fig.add_hline(CAUSAL_DROP, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=3)
    lowest = max(1.1 * min(0.0, *drops), -1.0)
    fig.update_yaxes(title_text="share of the norm lost", tickformat=".0%", range=[lowest, 1.05], col=3)
    title = "neuron (orange: causal;<br>dotted: least drop of a causal one)"
    fig.update_xaxes(title_text=title, type="category", tickangle=0, col=3)
