"""The drawing of `marking_heads`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREY, ORANGE, RED
from sinkscope.results import cell


def draw(result: Any) -> go.Figure:
    """What each layer's heads carry, which head marks which first token, and how the heads look at themselves."""
    found = "no sink" if result.sink_layer is None else html.escape(result.answer)
    if result.marking_layer is not None:
        found = f"first token marked by heads of layer {result.marking_layer} ({found})"
    marked = result.marking_layer is not None
    titles = ["All heads of a layer replaced", "One head replaced, by first token", "Attention to itself"]
    shown = 3 if marked else 1
    fig = make_subplots(
        cols=shown,
        subplot_titles=titles[:shown] if result.layer_drops else None,
        column_widths=[0.16, 0.42, 0.42][:shown],
        horizontal_spacing=0.12,
    )
    if result.layer_drops:
        _layers(fig, result)
    if marked:
        _tokens(fig, result)
        _attention(fig, result)
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: {found}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400 if shown == 3 else 800,
        height=560,
        margin={"l": 70, "r": 20, "t": 90, "b": 100},
        font={"size": 13},
        legend={"orientation": "h", "y": -0.16, "x": 1.0, "xanchor": "right", "yanchor": "top"},
    )
    return fig


def _layers(fig: Any, result: Any) -> None:
    layers = list(range(len(result.layer_drops)))
    fig.add_bar(
        x=layers,
        y=result.layer_drops,
        showlegend=False,
        row=1,
        col=1,
        marker_color=[ORANGE if i == result.marking_layer else GREY for i in layers],
        text=[f"{d:.0%}" for d in result.layer_drops],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="layer %{x}: %{y:.1%} lost<extra></extra>",
    )
    fig.update_xaxes(title_text="layer", dtick=max(1, len(layers) // 12), row=1, col=1)
    fig.update_yaxes(
        title_text="share of the sink neurons' activation lost",
        tickformat=".0%",
        range=[min([0.0, *(d - 0.1 for d in result.layer_drops)]), 1.15],
        row=1,
        col=1,
    )


def _tokens(fig: Any, result: Any) -> None:
    """Tokens that share a head lie beside each other."""
    tokens = sorted((t for t in result.first_tokens if t.drops), key=lambda t: (t.heads, t.id))
    names = [html.escape(repr(t.token)) for t in tokens]
    fig.add_heatmap(
        x=list(range(len(tokens[0].drops))),
        y=[f"{name} ({t.id})" for name, t in zip(names, tokens, strict=True)],
        z=[t.drops for t in tokens],
        zmin=0,
        zmax=1,
        colorscale=[[0, "#f7f7f7"], [1, BLUE]],
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "lost"}, "tickformat": ".0%", "x": 0.575, "thickness": 12},
        hovertemplate="%{y} first, head %{x}: %{z:.1%} lost<extra></extra>",
        row=1,
        col=2,
    )
    heads = len(tokens[0].drops)
    fig.add_heatmap(  # the control, a column of its own
        x=[heads + 0.5],
        y=[f"{name} ({t.id})" for name, t in zip(names, tokens, strict=True)],
        z=[[t.control_drop] for t in tokens],
        zmin=0,
        zmax=1,
        colorscale=[[0, "#f7f7f7"], [1, BLUE]],
        ygap=1,
        showscale=False,
        row=1,
        col=2,
        hovertemplate="%{y} first, as many other heads, largest of 20 draws: %{z:.1%} lost<extra></extra>",
    )
    shown = list(range(0, heads, max(1, heads // 16)))
    fig.update_xaxes(
        title_text=f"head of layer {result.marking_layer}",
        tickvals=[*shown, heads + 0.5],
        ticktext=[*map(str, shown), "random"],
        row=1,
        col=2,
    )
    fig.update_yaxes(
        tickvals=[f"{name} ({t.id})" for name, t in zip(names, tokens, strict=True)],
        ticktext=names,
        tickfont={"size": 9},
        autorange="reversed",
        row=1,
        col=2,
    )


def _attention(fig: Any, result: Any) -> None:
    here = [h for h in result.heads if h.layer == result.marking_layer]
    heads = [h.head for h in here]
    for name, field, color, symbol in (
        ("all later tokens", "self_attention", GREY, "circle"),
        ("tokens that the head serves", "served_self_attention", ORANGE, "diamond"),
    ):
        fig.add_scatter(
            x=heads,
            y=[getattr(h, field) for h in here],
            mode="markers",
            name=name,
            row=1,
            col=3,
            marker={"color": color, "symbol": symbol, "size": 11},
            customdata=[[cell(h.self_cosine), cell(h.served_self_cosine)] for h in here],
            hovertemplate="head %{x}: %{y:.3f} of uniform<br>cosine of query and key %{customdata[0]}, at tokens it "
            "serves %{customdata[1]}<extra></extra>",
        )
    fig.add_hline(1.0, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=3)
    fig.update_xaxes(title_text=f"head of layer {result.marking_layer}", dtick=max(1, len(here) // 12), row=1, col=3)
    fig.update_yaxes(title_text="over uniform attention (dotted)", rangemode="tozero", row=1, col=3)
