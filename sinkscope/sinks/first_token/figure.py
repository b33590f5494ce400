"""The drawing of a `find_sinks` result."""

from __future__ import annotations

import plotly.graph_objects as go

from sinkscope.measure.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Mark,
    Panel,
    across,
    band,
    bars,
    counted,
    curve,
    drawn,
    powers,
    shares,
    upright,
    words,
)
from sinkscope.sinks.first_token.neurons import CAUSAL_DROP
from sinkscope.sinks.first_token.result import FindSinks


def draw(result: FindSinks) -> go.Figure:
    """Norms and attention per layer, contributions of the neurons, and their ablation against the control."""
    panels = [_norms(result), _attention(result)]
    if not result.neurons:
        return drawn(result, panels, grid={"spacing": 0.06}, width=1000, height=460)
    panels += [_contributions(result), _ablation(result)]
    widths = [0.24, 0.18, 0.27, 0.31]
    return drawn(result, panels, widths, grid={"spacing": 0.06}, width=1600, height=460, barmode="group", bargap=0.25)


def _norms(result: FindSinks) -> Panel:
    marks: list[Mark] = []
    if result.norm_spike is not None:
        for layer in result.norm_spike.step_down:
            marks += [upright(layer, GREEN), words(" falls", layer, 0.1, GREEN)]
    layer = result.sink_layer
    if layer is not None:
        marks += [upright(layer, RED, "dash"), words(f" layer {layer}", layer, 0.5, RED, xanchor="left")]
    layers = list(range(len(result.first_token_norm)))
    read = layers[: result.layers_read]
    traces = [
        band(read, result.typical_low[: len(read)], result.typical_high[: len(read)]),
        curve(layers, result.typical_norm, "typical text, median", GREY),
        curve(layers, result.first_token_norm, "first token", BLUE, width=3),
    ]
    return Panel("Norm of the residual stream", traces, counted("layer", len(layers)), powers("L2 norm"), marks)


def _attention(result: FindSinks) -> Panel:
    """The sink rate of each layer at position 0 (Gu et al. 2024)."""
    rates: list[float] = []
    if result.attention_sink is not None:
        rates += result.attention_sink.by_layer
    hover = "layer %{x}: %{y:.0%} of the heads<extra></extra>"
    return Panel(
        "Heads that attend to the first token",
        [bars(list(range(len(rates))), rates, BLUE, hovertemplate=hover)],
        counted("layer", len(result.first_token_norm)),
        shares("share of the layer's heads", 0.0, 1.02),
    )


def _names(result: FindSinks) -> list[str]:
    return [str(neuron).replace(".", "<br>") for neuron in result.neurons]


def _contributions(result: FindSinks) -> Panel:
    written = bars(
        _names(result),
        [neuron.contribution_norm for neuron in result.neurons],
        [ORANGE if neuron.causal else GREY for neuron in result.neurons],
        text=[f"{neuron.share:.0%}" for neuron in result.neurons],
        hovertemplate="%{x}: norm %{y:.4g}, %{text} of the MLP's<extra></extra>",
    )
    axis = {"title_text": "neuron (orange: causal; label: share)", "type": "category", "tickangle": 0}
    return Panel("What each neuron writes", [written], axis, "norm of its contribution")


def _ablation(result: FindSinks) -> Panel:
    names = _names(result)
    neurons = result.neurons
    drops = [neuron.ablation_drop for neuron in neurons]
    repeat_drops = [neuron.repeat_drop for neuron in neurons]
    controls = [neuron.control_drop for neuron in neurons]
    if result.set_drop is not None and result.set_control_drop is not None:
        names.append("all<br>causal")
        drops.append(result.set_drop)
        repeat_drops.append(None)
        controls.append(result.set_control_drop)
    labels = [f"{drop:.0%}" for drop in controls]  # most bars of the control are too low to be seen
    traces = [
        bars(names, drops, BLUE, name="lost at the first token"),
        bars(names, repeat_drops, GREEN, name="lost at the last repeated token"),
        bars(names, controls, GREY, name="lost in the control: largest of 20 random draws", text=labels, textangle=0),
    ]
    axis = {"title_text": "neuron (dotted: least drop of a causal one)", "type": "category", "tickangle": 0}
    lost = shares("share of the norm lost", max(1.1 * min(0.0, *drops), -1.0), 1.05)
    return Panel("Norm lost by ablation", traces, axis, lost, [across(CAUSAL_DROP)])
