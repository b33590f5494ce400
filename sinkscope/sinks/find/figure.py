"""The drawing of a `find_sinks` result."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.results.style import BLUE, GREY, ORANGE, RED, figure_of, panels

TITLES = ("Norm of the residual stream", "Norm lost by ablation")


def draw(result: Any) -> go.Figure:
    """Norms per layer of a `FindSinks`, and the ablation of the neurons against the control."""
    shown = 2 if result.neurons else 1
    fig = panels(TITLES[:shown])
    _draw_norms(fig, result)
    if result.neurons:
        _draw_neurons(fig, result)
    return figure_of(fig, result, width=600 * shown, height=480, legend=-0.3, bottom=130, barmode="group")


def _draw_norms(fig: Any, result: Any) -> None:
    layers = list(range(len(result.spike_norm)))
    grey, blue = {"color": GREY}, {"color": BLUE, "width": 3}
    fig.add_scatter(x=layers, y=result.typical_norm, name="typical text, median", line=grey, row=1, col=1)
    place = "the first token" if result.spike is None else html.escape(result.spike.place.words)
    fig.add_scatter(x=layers, y=result.spike_norm, name=place, line=blue, row=1, col=1)
    if result.sink_layer is not None:
        fig.add_vline(result.sink_layer, line={"color": RED, "dash": "dash"}, row=1, col=1)
    fig.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 12), col=1)
    fig.update_yaxes(title_text="L2 norm", type="log", exponentformat="power", nticks=8, col=1)


def _draw_neurons(fig: Any, result: Any) -> None:
    names = [str(neuron).replace(".", "<br>") for neuron in result.neurons]
    drops = [neuron.ablation_drop for neuron in result.neurons]
    controls = [neuron.control_drop for neuron in result.neurons]
    colors = [ORANGE if neuron.causal else BLUE for neuron in result.neurons]
    fig.add_bar(x=names, y=drops, name="lost at the spike", marker_color=colors, row=1, col=2)
    name = "lost in the control: largest of 20 random draws"
    fig.add_bar(x=names, y=controls, name=name, marker_color=GREY, row=1, col=2)
    fig.update_yaxes(title_text="share of the norm lost", tickformat=".0%", col=2)
    fig.update_xaxes(title_text="neuron (orange: causal)", type="category", tickangle=0, col=2)
