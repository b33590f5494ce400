"""The drawing of `find_sinks`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BAND, BLUE, GREEN, GREY, ORANGE, RED


def draw(result: Any) -> go.Figure:
    """Norms per layer, contributions of the neurons, and their ablation against the control."""
    layer = result.sink_layer
    found = "no sink" if layer is None else f"sink in layer {layer}"
    titles = ["Norm of the residual stream", "What each neuron writes", "Norm lost by ablation"]
    widths = [0.36, 0.28, 0.36]
    shown = 3 if result.neurons else 1
    fig = make_subplots(
        cols=shown, subplot_titles=titles[:shown], column_widths=widths[:shown], horizontal_spacing=0.075
    )
    _norms(fig, result)
    if result.neurons:
        _contributions(fig, result.neurons)
        _ablation(fig, result)
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: {found}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400 if shown == 3 else 800,
        height=460,
        margin={"l": 70, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        barmode="group",
        bargap=0.25,
        legend={"orientation": "h", "y": -0.27, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


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
    fig.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 12), row=1, col=1)
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
    names = [_label(n) for n in result.neurons] + together
    bars = (
        ("lost at the first token", "ablation_drop", BLUE, result.set_drop),
        ("lost at the last repeated token", "repeat_drop", GREEN, None),
        ("lost in the control: largest of 20 random draws", "control_drop", GREY, result.set_control_drop),
    )
    lowest = 0.0
    for name, field, color, of_set in bars:
        values = [getattr(n, field) for n in result.neurons] + [of_set for _ in together]
        lowest = min([lowest, *(v for v in values if v is not None)])
        if any(value is not None for value in values):
            # bars of the control are mostly too low to be seen: its number says that it is there
            text = [f"{v:.0%}" if field == "control_drop" and v is not None else "" for v in values]
            fig.add_bar(
                x=names,
                y=values,
                name=name,
                marker_color=color,
                text=text,
                textposition="outside",
                textfont_size=10,
                textangle=0,
                cliponaxis=False,
                row=1,
                col=3,
            )
    fig.add_hline(0.1, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=3)
    fig.update_xaxes(
        title_text="neuron (dotted: least drop of a causal one)", type="category", tickangle=0, row=1, col=3
    )
    fig.update_yaxes(
        title_text="share of the norm lost", tickformat=".0%", range=[max(lowest * 1.1, -1.0), 1.05], row=1, col=3
    )
