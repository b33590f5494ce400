"""The drawings of what makes the sink at the first token, and of the weights, checkpoints and tokens looked through."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go

from sinkscope.files.result import cell
from sinkscope.measure.style import (
    BLUE,
    GREY,
    ORANGE,
    Panel,
    across,
    bars,
    by_layer,
    counted,
    dots,
    drawn,
    shares,
    upright,
)


def draw_heads(result: Any) -> go.Figure:
    """What each layer's heads carry, which head marks which first token, and how the heads look at themselves."""
    marked = result.marking_layer is not None
    parts = [_head_layers(result)] if result.layer_drops else [Panel("")]
    parts += [_head_tokens(result), _self_attention(result)] if marked else []
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    size = {"width": 1400 if marked else 800, "height": 560, "bottom": 100}
    return drawn(result, parts, [0.16, 0.42, 0.42], grid={"spacing": 0.12}, legend=legend, **size)


def _head_layers(result: Any) -> Panel:
    layers = list(range(len(result.layer_drops)))
    dropped = bars(
        layers,
        result.layer_drops,
        [ORANGE if i == result.marking_layer else GREY for i in layers],
        text=[f"{d:.0%}".replace("-0%", "0%") for d in result.layer_drops],
        hovertemplate="layer %{x}: %{y:.1%} lost<extra></extra>",
    )
    lowest = min([0.0, *(d - 0.1 for d in result.layer_drops)])
    lost = shares("share of the sink neurons' activation lost", lowest, 1.15)
    return Panel("All heads of a layer replaced", [dropped], counted("layer", len(layers)), lost)


def _head_tokens(result: Any) -> Panel:
    """Tokens that share a head lie beside each other."""
    tokens = sorted((t for t in result.first_tokens if t.drops), key=lambda t: (t.heads, t.id))
    names = [html.escape(repr(t.token)) for t in tokens]
    places = [f"{name} ({t.id})" for name, t in zip(names, tokens, strict=True)]
    scale: dict[str, Any] = {"y": places, "zmin": 0, "zmax": 1, "colorscale": [[0, "#f7f7f7"], [1, BLUE]], "ygap": 1}
    heads = len(tokens[0].drops)
    drops = go.Heatmap(
        x=list(range(heads)),
        z=[t.drops for t in tokens],
        xgap=1,
        colorbar={"title": {"text": "lost"}, "tickformat": ".0%", "x": 0.575, "thickness": 12},
        hovertemplate="%{y} first, head %{x}: %{z:.1%} lost<extra></extra>",
        **scale,
    )
    control = go.Heatmap(  # a column of its own
        x=[heads + 0.5],
        z=[[t.control_drop] for t in tokens],
        showscale=False,
        hovertemplate="%{y} first, as many other heads, largest of 20 draws: %{z:.1%} lost<extra></extra>",
        **scale,
    )
    shown = list(range(0, heads, max(1, heads // 16)))
    ticks = {"tickvals": [*shown, heads + 0.5], "ticktext": [*map(str, shown), "random"]}
    return Panel(
        "One head replaced, by first token",
        [drops, control],
        {"title_text": f"head of layer {result.marking_layer}"} | ticks,
        {"tickvals": places, "ticktext": names, "tickfont": {"size": 9}, "autorange": "reversed"},
    )


def _self_attention(result: Any) -> Panel:
    here = [h for h in result.heads if h.layer == result.marking_layer]
    traces = [
        dots(
            [h.head for h in here],
            [getattr(h, field) for h in here],
            name,
            color,
            11,
            marker_symbol=symbol,
            customdata=[[cell(h.self_cosine), cell(h.served_self_cosine)] for h in here],
            hovertemplate="head %{x}: %{y:.3f} of uniform<br>cosine of query and key %{customdata[0]}, at tokens it "
            "serves %{customdata[1]}<extra></extra>",
        )
        for name, field, color, symbol in (
            ("all later tokens", "self_attention", GREY, "circle"),
            ("tokens that the head serves", "served_self_attention", ORANGE, "diamond"),
        )
    ]
    head = counted(f"head of layer {result.marking_layer}", len(here))
    uniform = {"title_text": "over uniform attention (dotted)", "rangemode": "tozero"}
    return Panel("Attention to itself", traces, head, uniform, [across(1.0)])


def draw_separability(result: Any) -> go.Figure:
    """First and later tokens along the plane's direction, and by the best neurons."""
    plane, neurons = result.separators[0], result.separators[2:]
    title = f"LDA: AUROC {plane.auroc:.4f} on held-out tokens and texts{_control([plane])}"
    along, across_it = "along LDA's direction (means at -0.5 and 0.5)", "along the widest direction across it"
    middle = upright(0.0, GREY, width=1)
    parts = [Panel(title, _points(result, "plane", "across", listed=True), along, across_it, [middle])]
    if neurons:
        told = "; ".join(f"{html.escape(result.named(s))}: AUROC {s.auroc:.4f}" for s in neurons)
        x, y, *_ = [*(f"pre-activation of {html.escape(result.named(s))}" for s in neurons), "position"]
        other = _points(result, "gate", "position" if len(neurons) == 1 else "up", listed=False)
        parts.append(Panel(told + _control(neurons), other, x, y))
    return drawn(result, parts, width=1300 if neurons else 750, height=560, top=110, legend=-0.17)


def _control(separators: Any) -> str:
    return "<br>with random labels: " + ", ".join(f"{s.shuffled_auroc:.4f}" for s in separators)


def _points(result: Any, x: str, y: str, *, listed: bool) -> list[Any]:
    """First and later tokens, trained on and held out, by two of their numbers."""
    groups = {
        (first, held): [p for p in result.points if p.first == first and p.held_out == held]
        for first in (False, True)
        for held in (False, True)
    }
    names = {key: f"{('later', 'first')[key[0]]}, {('trained on', 'held out')[key[1]]}" for key in groups}
    return [
        dots(
            [getattr(p, x) for p in points],
            [getattr(p, y) for p in points],
            names[first, held],
            BLUE if first else GREY,
            7 if first else 5,
            legendgroup=names[first, held],
            showlegend=listed,
            marker_symbol="circle" if held else "circle-open",
            marker_opacity=0.75,
            text=[f"{html.escape(repr(p.token))} at {p.position}" for p in points],
            hovertemplate="%{text}<br>%{x:.3f}, %{y:.3f}<extra>%{fullData.name}</extra>",
        )
        for (first, held), points in groups.items()
    ]


def draw_positions(result: Any) -> go.Figure:
    """Norm over the typical one and attention received, layer by position."""
    names = [f"{i} {html.escape(repr(token.text))}" for i, token in enumerate(result.tokens)]
    layers, places = list(range(len(result.norm))), list(range(len(names)))
    ratio = [[v / usual for v in row] for row, usual in zip(result.norm, result.typical_norm, strict=True)]
    given = [[None if math.isnan(v) else v for v in row] for row in result.attention.tolist()]
    ticks = list(range(-3, 8))
    bar = {"tickvals": ticks, "ticktext": [f"{10.0**t:g}" for t in ticks], "x": 0.44, "thickness": 12}
    few = {"tickvals": places, "ticktext": names, "tickangle": -60, "tickfont": {"size": 10}}
    parts = [
        Panel(
            title,
            [
                go.Heatmap(
                    x=places,
                    y=layers,
                    z=z,
                    text=[[f"{name}: {cell(v)}" for name, v in zip(names, row, strict=True)] for row in text],
                    hovertemplate="layer %{y}, %{text}<extra></extra>",
                    colorscale=[[0, "#f7f7f7"], [1, color]],
                    zmin=0,
                    colorbar=scale,
                )
            ],
            {"title_text": "position"} | (few if len(names) <= 40 else {}),
            by_layer(len(layers)),
        )
        for title, z, text, color, scale in (
            ("Norm over the typical one", [[math.log10(max(v, 1e-3)) for v in row] for row in ratio], ratio, BLUE, bar),
            ("Attention received, mean of heads and later queries", given, given, ORANGE, {"thickness": 12}),
        )
    ]
    bottom = 150 if len(names) <= 40 else 80
    return drawn(result, parts, grid={"spacing": 0.12}, width=1400, height=520, bottom=bottom)
