"""The drawings of what makes the sink at the first token."""

from __future__ import annotations

import html
from collections import Counter
from itertools import product
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import (
    BAND,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    axes,
    counted,
    finished,
    level,
    panels,
    powers,
    shares,
)
from sinkscope.notation import neuron_name
from sinkscope.results import cell


def draw_find_sinks(result: Any) -> go.Figure:
    """Norms and attention per layer, contributions of the neurons, and their ablation against the control."""
    titles = ["Norm of the residual stream", "Heads that attend to the first token"]
    titles += ["What each neuron writes", "Norm lost by ablation"] if result.neurons else []
    fig = panels(titles, [0.27, 0.2, 0.22, 0.31] if result.neurons else None, spacing=0.06)
    _norms(fig, result)
    _attention(fig, result.attention_sink, len(result.first_token_norm))
    if result.neurons:
        _contributions(fig, result.neurons)
        _ablation(fig, result)
    width = 1600 if result.neurons else 1000
    return finished(fig, result, width=width, height=460, barmode="group", bargap=0.25)


def _attention(fig: Any, sink: Any, layers: int) -> None:
    """The sink rate of each layer at position 0 (Gu et al. 2024)."""
    rates = () if sink is None else sink.by_layer
    fig.add_bar(
        x=list(range(len(rates))),
        y=list(rates),
        marker_color=BLUE,
        showlegend=False,
        hovertemplate="layer %{x}: %{y:.0%} of the heads<extra></extra>",
        row=1,
        col=2,
    )
    axes(fig, 1, 2, x=counted("layer", layers), y=shares("share of the layer's heads", 0.0, 1.02))


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
    for layer in result.norm_spike.step_down if result.norm_spike else ():
        fig.add_vline(layer, line={"color": GREEN, "dash": "dot"}, row=1, col=1)
        fig.add_annotation(
            x=layer, y=0.1, yref="y domain", text=" falls", font={"color": GREEN}, showarrow=False, row=1, col=1
        )
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
    axes(fig, x=counted("layer", len(layers)), y=powers("L2 norm"))


def _neuron(neuron: Any) -> str:
    return neuron_name(neuron.layer, neuron.expert, neuron.neuron).replace(".", "<br>")


def _contributions(fig: Any, neurons: Any) -> None:
    fig.add_bar(
        x=[_neuron(n) for n in neurons],
        y=[n.contribution_norm for n in neurons],
        marker_color=[ORANGE if n.causal else GREY for n in neurons],
        text=["" if n.share is None else f"{n.share:.0%}" for n in neurons],
        textposition="outside",
        cliponaxis=False,
        showlegend=False,
        row=1,
        col=3,
        hovertemplate="%{x}: norm %{y:.4g}, %{text} of the MLP's<extra></extra>",
    )
    neuron = {"title_text": "neuron (orange: causal; label: share)", "type": "category", "tickangle": 0}
    axes(fig, 1, 3, x=neuron, y="norm of its contribution")


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
            x=[_neuron(n) for n in result.neurons] + together,
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
            col=4,
        )
    level(fig, 0.1, col=4)
    neuron = {"title_text": "neuron (dotted: least drop of a causal one)", "type": "category", "tickangle": 0}
    axes(fig, 1, 4, x=neuron, y=shares("share of the norm lost", max(lowest * 1.1, -1.0), 1.05))


def draw_massive_activations(result: Any) -> go.Figure:
    """A row per condition: magnitudes per layer, norms of value vectors, and where secondary sinks begin."""
    count = len(result.conditions)
    names = ["with BOS" if c.bos else "without BOS" for c in result.conditions]
    kinds = ("largest activations", "first token's values over others'", "secondary sinks")
    titles = [f"{kind}, {name}" for name in names for kind in kinds]
    fig = panels(titles, spacing=0.075, rows=count, cols=3, vertical_spacing=0.16)
    for row, condition in enumerate(result.conditions, start=1):
        _magnitudes(fig, condition, row)
        _values(fig, condition, row)
        _secondary_sinks(fig, condition, row)
    return finished(
        fig,
        result,
        width=1400,
        height=120 + 340 * count,
        bottom=90,
        legend=-0.12 if count > 1 else -0.2,
    )


def _magnitudes(fig: Any, condition: Any, row: int) -> None:
    layers = [one.layer for one in condition.layers]
    style: dict[str, Any] = {"row": row, "col": 1, "mode": "lines+markers", "showlegend": row == 1}
    sizes = [(*one.top[:3], one.median) for one in condition.layers]
    names = (("top 1", BLUE), ("top 2", ORANGE), ("top 3", GREEN), ("median", GREY))
    for (name, color), y in zip(names, zip(*sizes, strict=True), strict=True):
        fig.add_scatter(x=layers, y=list(y), name=name, line={"color": color}, **style)
    axes(fig, row, 1, x=counted("layer", len(layers)), y=powers("magnitude"))


def _values(fig: Any, condition: Any, row: int) -> None:
    if not condition.values:
        fig.add_annotation(text="this architecture shows no value vectors", showarrow=False, row=row, col=2)
        return
    layers = [v.layer for v in condition.values]
    for head in range(len(condition.values[0].sink)):
        ratios = [v.sink[head] / v.others[head] if v.others[head] else None for v in condition.values]
        fig.add_scatter(
            x=layers,
            y=ratios,
            mode="markers",
            marker={"color": GREY, "size": 5, "opacity": 0.6},
            row=row,
            col=2,
            name="a kv head",
            showlegend=row == 1 and head == 0,
            hovertemplate=f"kv head {head}: %{{y:.3g}}",
        )
    fig.add_scatter(
        x=layers,
        y=[v.ratio for v in condition.values],
        mode="lines+markers",
        line={"color": RED, "width": 2.5},
        name="mean over kv heads",
        showlegend=row == 1,
        row=row,
        col=2,
    )
    level(fig, 1.0, row, 2, color=GREY)
    axes(fig, row, 2, x=counted("layer", len(layers)), y=powers("ratio of norms"))


def _secondary_sinks(fig: Any, condition: Any, row: int) -> None:
    n = len(condition.layers)
    created = counted("created after layer", n) | {"range": [-0.5, n - 0.5]}
    axes(fig, row, 3, x=created, y=counted("lifetime in layers", n) | {"range": [0.5, n + 0.5]})
    if not condition.secondary:
        fig.add_annotation(x=(n - 1) / 2, y=(n + 1) / 2, text="none", showarrow=False, row=row, col=3)
        return
    counts = Counter((s.created, s.lifetime) for s in condition.secondary)
    cells = [[counts.get((x, y)) for x in range(n)] for y in range(1, n + 1)]
    fig.add_heatmap(
        x=list(range(n)),
        y=list(range(1, n + 1)),
        z=cells,
        colorscale="Blues",
        showscale=False,
        zmin=0,
        xgap=1,
        ygap=1,
        text=[[str(v) if v else "" for v in line] for line in cells] if n <= 16 else None,
        texttemplate="%{text}",
        hovertemplate="created after layer %{x}, %{y} layers: %{z} positions<extra></extra>",
        row=row,
        col=3,
    )


def draw_heads(result: Any) -> go.Figure:
    """What each layer's heads carry, which head marks which first token, and how the heads look at themselves."""
    marked = result.marking_layer is not None
    titles = ["All heads of a layer replaced", "One head replaced, by first token", "Attention to itself"]
    shown = titles if marked else titles[:1] if result.layer_drops else [""]
    fig = panels(shown, [0.16, 0.42, 0.42], spacing=0.12)
    if result.layer_drops:
        _head_layers(fig, result)
    if marked:
        _head_tokens(fig, result)
        _self_attention(fig, result)
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    return finished(fig, result, width=1400 if marked else 800, height=560, bottom=100, legend=legend)


def _head_layers(fig: Any, result: Any) -> None:
    layers = list(range(len(result.layer_drops)))
    fig.add_bar(
        x=layers,
        y=result.layer_drops,
        showlegend=False,
        row=1,
        col=1,
        marker_color=[ORANGE if i == result.marking_layer else GREY for i in layers],
        text=[f"{d:.0%}".replace("-0%", "0%") for d in result.layer_drops],
        textposition="outside",
        cliponaxis=False,
        hovertemplate="layer %{x}: %{y:.1%} lost<extra></extra>",
    )
    lowest = min([0.0, *(d - 0.1 for d in result.layer_drops)])
    axes(fig, x=counted("layer", len(layers)), y=shares("share of the sink neurons' activation lost", lowest, 1.15))


def _head_tokens(fig: Any, result: Any) -> None:
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
    axes(
        fig,
        1,
        2,
        x={
            "title_text": f"head of layer {result.marking_layer}",
            "tickvals": [*shown, heads + 0.5],
            "ticktext": [*map(str, shown), "random"],
        },
        y={"tickvals": places, "ticktext": names, "tickfont": {"size": 9}, "autorange": "reversed"},
    )


def _self_attention(fig: Any, result: Any) -> None:
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
    head, uniform = f"head of layer {result.marking_layer}", "over uniform attention (dotted)"
    axes(fig, 1, 3, x=counted(head, len(here)), y={"title_text": uniform, "rangemode": "tozero"})


def draw_separability(result: Any) -> go.Figure:
    """First and later tokens along the plane's direction, and by the best neurons."""
    plane, neurons = result.separators[0], result.separators[2:]
    titles = [f"LDA: AUROC {plane.auroc:.4f} on held-out tokens and texts" + _control([plane])]
    if neurons:
        titles.append(
            "; ".join(f"{html.escape(result.named(s))}: AUROC {s.auroc:.4f}" for s in neurons) + _control(neurons)
        )
    fig = panels(titles)
    fields = [("plane", "across"), ("gate", "position" if len(neurons) == 1 else "up")][: len(titles)]
    for first, held in product((False, True), repeat=2):
        points = [p for p in result.points if p.first == first and p.held_out == held]
        for col, (x, y) in enumerate(fields, 1):
            _scatter(fig, points, first, held, x, y, col)
    fig.add_vline(0.0, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    axes(fig, x="along LDA's direction (means at -0.5 and 0.5)", y="along the widest direction across it")
    named = [*(f"pre-activation of {html.escape(result.named(s))}" for s in neurons), "position"]
    if neurons:
        axes(fig, 1, 2, x=named[0], y=named[1])
    return finished(fig, result, width=1300 if neurons else 750, height=560, top=110, legend=-0.17)


def _control(separators: Any) -> str:
    return "<br>with random labels: " + ", ".join(f"{s.shuffled_auroc:.4f}" for s in separators)


def _scatter(fig: Any, points: Any, first: bool, held: bool, x: str, y: str, col: int) -> None:
    name = f"{'first' if first else 'later'}, {'held out' if held else 'trained on'}"
    fig.add_scatter(
        x=[getattr(p, x) for p in points],
        y=[getattr(p, y) for p in points],
        mode="markers",
        name=name,
        legendgroup=name,
        showlegend=col == 1,
        row=1,
        col=col,
        marker={
            "color": BLUE if first else GREY,
            "symbol": "circle" if held else "circle-open",
            "size": 7 if first else 5,
            "opacity": 0.75,
        },
        text=[f"{html.escape(repr(p.token))} at {p.position}" for p in points],
        hovertemplate="%{text}<br>%{x:.3f}, %{y:.3f}<extra>" + name + "</extra>",
    )
