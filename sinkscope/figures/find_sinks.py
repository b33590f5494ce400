"""The drawing of `find_sinks`."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BAND, BLUE, GREEN, GREY, ORANGE, RED, finished, layer_axis, level, panels


def draw(result: Any) -> go.Figure:
    """Norms per layer, contributions of the neurons, and their ablation against the control."""
    titles = ["Norm of the residual stream", "What each neuron writes", "Norm lost by ablation"]
    fig = panels(titles if result.neurons else titles[:1], [0.36, 0.28, 0.36], spacing=0.075)
    _norms(fig, result)
    if result.neurons:
        _contributions(fig, result.neurons)
        _ablation(fig, result)
    found = "no sink" if result.sink_layer is None else f"sink in layer {result.sink_layer}"
    width = 1400 if result.neurons else 800
    return finished(fig, result, found, width=width, height=460, barmode="group", bargap=0.25)


def _norms(fig: Any, result: Any) -> None:
    layers = list(range(len(result.first_token_norm)))
    known = [i for i in layers if result.typical_low[i] is not None]
    style: dict[str, Any] = {"row": 1, "col": 1}
    fig.add_scatter(
        x=known + known[::-1],
        y=[result.typical_high[i] for i in known] + [result.typical_low[i] for i in reversed(known)],
        fill="toself",
        fillcolor=BAND,
        mode="none",
        name="typical text, 5-95 %",
        hoverinfo="skip",
        **style,
    )
    style["mode"] = "lines+markers"
    fig.add_scatter(x=layers, y=result.typical_norm, name="typical text, median", line={"color": GREY}, **style)
    fig.add_scatter(x=layers, y=result.first_token_norm, name="first token", line={"color": BLUE, "width": 3}, **style)
    if result.sink_layer is not None:
        fig.add_vline(result.sink_layer, line={"color": RED, "dash": "dash"}, row=1, col=1)
        fig.add_annotation(
            x=result.sink_layer,
            y=0.5,
            yref="y domain",
            text=f" layer {result.sink_layer}",
            font={"color": RED},
            showarrow=False,
            xanchor="left",
            row=1,
            col=1,
        )
    layer_axis(fig, len(layers))
    fig.update_yaxes(title_text="L2 norm", type="log", exponentformat="power", row=1, col=1)


def _label(neuron: Any) -> str:
    expert = "" if neuron.expert is None else f"<br>expert {neuron.expert}"
    return f"L{neuron.layer}{expert}<br>{neuron.neuron}"


def _contributions(fig: Any, neurons: Any) -> None:
    fig.add_bar(
        x=[_label(n) for n in neurons],
        y=[n.contribution_norm for n in neurons],
        marker_color=[ORANGE if n.causal else GREY for n in neurons],
        text=["" if n.share is None else f"{n.share:.0%}" for n in neurons],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        row=1,
        col=2,
        hovertemplate="%{x}: norm %{y:.4g}, %{text} of the MLP's<extra></extra>",
    )
    fig.update_xaxes(title_text="neuron (orange: causal; label: share)", type="category", tickangle=0, row=1, col=2)
    fig.update_yaxes(title_text="norm of its contribution", row=1, col=2)


def _ablation(fig: Any, result: Any) -> None:
    together = ["all<br>causal"] if result.set_drop is not None else []
    lowest = 0.0
    for name, field, color, of_set in (
        ("lost at the first token", "ablation_drop", BLUE, result.set_drop),
        ("lost at the last repeated token", "repeat_drop", GREEN, None),
        ("lost in the control: largest of 20 random draws", "control_drop", GREY, result.set_control_drop),
    ):
        values = [getattr(n, field) for n in result.neurons] + [of_set for _ in together]
        known = [v for v in values if v is not None]
        lowest = min([lowest, *known])
        if not known:
            continue
        fig.add_bar(
            x=[_label(n) for n in result.neurons] + together,
            y=values,
            name=name,
            marker_color=color,
            # bars of the control are mostly too low to be seen: its number says that it is there
            text=[f"{v:.0%}" if field == "control_drop" and v is not None else "" for v in values],
            textposition="outside",
            textfont_size=10,
            textangle=0,
            cliponaxis=False,
            row=1,
            col=3,
        )
    level(fig, 0.1, col=3)
    title = "neuron (dotted: least drop of a causal one)"
    fig.update_xaxes(title_text=title, type="category", tickangle=0, row=1, col=3)
    span = [max(lowest * 1.1, -1.0), 1.05]
    fig.update_yaxes(title_text="share of the norm lost", tickformat=".0%", range=span, row=1, col=3)
