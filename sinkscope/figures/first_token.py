"""The drawings of what makes the sink at the first token, and of the weights, checkpoints and tokens looked through."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from sinkscope.files.notation import neuron_name
from sinkscope.measure.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
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


def draw_find_sinks(result: Any) -> go.Figure:
    """Norms and attention per layer, contributions of the neurons, and their ablation against the control."""
    parts = [_norms(result), _attention(result.attention_sink, len(result.first_token_norm))]
    parts += [_contributions(result.neurons), _ablation(result)] if result.neurons else []
    return drawn(
        result,
        parts,
        [0.24, 0.18, 0.27, 0.31] if result.neurons else None,
        grid={"spacing": 0.06},
        width=1600 if result.neurons else 1000,
        height=460,
        barmode="group",
        bargap=0.25,
    )


def _norms(result: Any) -> Panel:
    layers = list(range(len(result.first_token_norm)))
    known = [i for i in layers if result.typical_low[i] is not None]
    marks = [
        mark
        for layer in (result.norm_spike.step_down if result.norm_spike else ())
        for mark in (upright(layer, GREEN), words(" falls", layer, 0.1, GREEN))
    ]
    if (sink := result.sink_layer) is not None:
        marks += [upright(sink, RED, "dash"), words(f" layer {sink}", sink, 0.5, RED, xanchor="left")]
    traces = [
        band(known, [result.typical_low[i] for i in known], [result.typical_high[i] for i in known]),
        curve(layers, result.typical_norm, "typical text, median", GREY),
        curve(layers, result.first_token_norm, "first token", BLUE, width=3),
    ]
    return Panel("Norm of the residual stream", traces, counted("layer", len(layers)), powers("L2 norm"), marks)


def _attention(sink: Any, layers: int) -> Panel:
    """The sink rate of each layer at position 0 (Gu et al. 2024)."""
    rates = [] if sink is None else list(sink.by_layer)
    hover = "layer %{x}: %{y:.0%} of the heads<extra></extra>"
    return Panel(
        "Heads that attend to the first token",
        [bars(list(range(len(rates))), rates, BLUE, hovertemplate=hover)],
        counted("layer", layers),
        shares("share of the layer's heads", 0.0, 1.02),
    )


def _named(neurons: Any) -> list[str]:
    return [neuron_name(n.layer, n.expert, n.neuron).replace(".", "<br>") for n in neurons]


def _by_neuron(title: str) -> dict[str, Any]:
    return {"title_text": title, "type": "category", "tickangle": 0, "tickfont": {"size": 10}}


def _contributions(neurons: Any) -> Panel:
    written = bars(
        _named(neurons),
        [n.contribution_norm for n in neurons],
        [ORANGE if n.causal else GREY for n in neurons],
        text=["" if n.share is None else f"{n.share:.0%}" for n in neurons],
        hovertemplate="%{x}: norm %{y:.4g}, %{text} of the MLP's<extra></extra>",
    )
    axis = _by_neuron("neuron (orange: causal; label: share)")
    return Panel("What each neuron writes", [written], axis, "norm of its contribution")


def _ablation(result: Any) -> Panel:
    together = ["all<br>causal"] if result.set_drop is not None else []
    series = {
        (name, field, color): [getattr(n, field) for n in result.neurons] + [of_set for _ in together]
        for name, field, color, of_set in (
            ("lost at the first token", "ablation_drop", BLUE, result.set_drop),
            ("lost at the last repeated token", "repeat_drop", GREEN, None),
            ("lost in the control: largest of 20 random draws", "control_drop", GREY, result.set_control_drop),
        )
    }
    lowest = min([0.0, *(v for values in series.values() for v in values if v is not None)])
    traces = [
        bars(
            _named(result.neurons) + together,
            values,
            color,
            name=name,
            # bars of the control are mostly too low to be seen: its number says that it is there
            text=[f"{v:.0%}" if field == "control_drop" and v is not None else "" for v in values],
            textfont_size=10,
            textangle=0,
        )
        for (name, field, color), values in series.items()
        if any(v is not None for v in values)
    ]
    axis = _by_neuron("neuron (dotted: least drop of a causal one)")
    lost = shares("share of the norm lost", max(lowest * 1.1, -1.0), 1.05)
    return Panel("Norm lost by ablation", traces, axis, lost, [across(0.1)])
