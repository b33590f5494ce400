"""The drawing of `marking_heads`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREY, ORANGE, finished, layer_axis, level, panels
from sinkscope.results import cell


def draw(result: Any) -> go.Figure:
    """What each layer's heads carry, which head marks which first token, and how the heads look at themselves."""
    marked = result.marking_layer is not None
    found = "no sink" if result.sink_layer is None else result.answer
    found = f"first token marked by heads of layer {result.marking_layer} ({found})" if marked else found
    titles = ["All heads of a layer replaced", "One head replaced, by first token", "Attention to itself"]
    shown = titles if marked else titles[:1] if result.layer_drops else [""]
    fig = panels(shown, [0.16, 0.42, 0.42], spacing=0.12)
    if result.layer_drops:
        _layers(fig, result)
    if marked:
        _tokens(fig, result)
        _attention(fig, result)
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    return finished(fig, result, found, width=1400 if marked else 800, height=560, bottom=100, legend=legend)


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
    layer_axis(fig, len(layers))
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
    places = [f"{name} ({t.id})" for name, t in zip(names, tokens, strict=True)]
    scale: dict[str, Any] = {"y": places, "zmin": 0, "zmax": 1, "colorscale": [[0, "#f7f7f7"], [1, BLUE]]}
    scale |= {"ygap": 1, "row": 1, "col": 2}
    heads = len(tokens[0].drops)
    fig.add_heatmap(
        x=list(range(heads)),
        z=[t.drops for t in tokens],
        xgap=1,
        colorbar={"title": {"text": "lost"}, "tickformat": ".0%", "x": 0.575, "thickness": 12},
        hovertemplate="%{y} first, head %{x}: %{z:.1%} lost<extra></extra>",
        **scale,
    )
    fig.add_heatmap(  # the control, a column of its own
        x=[heads + 0.5],
        z=[[t.control_drop] for t in tokens],
        showscale=False,
        hovertemplate="%{y} first, as many other heads, largest of 20 draws: %{z:.1%} lost<extra></extra>",
        **scale,
    )
    shown = list(range(0, heads, max(1, heads // 16)))
    fig.update_xaxes(
        title_text=f"head of layer {result.marking_layer}",
        tickvals=[*shown, heads + 0.5],
        ticktext=[*map(str, shown), "random"],
        row=1,
        col=2,
    )
    fig.update_yaxes(tickvals=places, ticktext=names, tickfont={"size": 9}, autorange="reversed", row=1, col=2)


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
    level(fig, 1.0, col=3)
    layer_axis(fig, len(here), col=3, title=f"head of layer {result.marking_layer}")
    fig.update_yaxes(title_text="over uniform attention (dotted)", rangemode="tozero", row=1, col=3)
