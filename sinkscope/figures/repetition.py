"""Drawings of repetition: what it does to norms, attention and outputs, divergence, and loops in texts."""

from __future__ import annotations

import html
import math
from itertools import pairwise
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from sinkscope.figures.style import (
    BAND,
    BLUE,
    COLOURS,
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
from sinkscope.notation import neuron_names

_CONDITIONS = {
    "intact": "intact",
    "one": "largest sink neuron zeroed",
    "set": "all causal neurons zeroed",
    "control": "as many random neurons zeroed",
}
_REPETITIONS = {"title_text": "repetitions n", "type": "log", "dtick": 1}


def repeat_norms(result: Any) -> go.Figure:
    """Norm at the sink layer over the number of repetitions, a panel per condition on one scale."""
    curves = result.sequences[0].curves if result.sequences else ()
    many = len(curves) > 1
    fig = panels([_condition(c) for c in curves] if many else [""], spacing=0.02, shared_yaxes=True)
    if result.typical_norm is not None:
        for column in range(1, len(curves) + 1):
            _norms(fig, result, column)
    named = "repetitions" if len(curves) < 3 else "repeated tokens"
    axes(fig, None, None, x={"title_text": named, "type": "log", "dtick": 1}, y=powers())
    axes(fig, y="L2 norm of the residual stream")
    legend = {"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"}
    return finished(fig, result, width=1400 if many else 1000, height=520, legend=legend, bottom=70)


def _condition(curve: Any) -> str:
    names = neuron_names(curve.sites, 4)
    return _CONDITIONS[curve.condition] + (f"<br>({names})" if names else "")


def _norms(fig: Any, result: Any, column: int) -> None:
    place: dict[str, Any] = {"row": 1, "col": column}
    x, listed, first = list(result.counts), column == 1, result.sequences[0].curves[column - 1].first_norm
    low, high = result.typical_low, result.typical_high
    fig.add_scatter(
        x=[x[0], x[-1], x[-1], x[0]],
        y=[high, high, low, low],
        fill="toself",
        fillcolor=BAND,
        mode="none",
        name="typical text, 5-95 %",
        hoverinfo="skip",
        legendgroup="band",
        showlegend=listed,
        **place,
    )
    lines = [
        (result.typical_norm, "typical text, median", {"color": GREY}),
        (first, "first token, in this panel", {"color": BLUE, "width": 3}),
        (result.first_norm / 2, "half of the first token's", {"color": BLUE, "dash": "dot"}),
    ]
    for y, name, line in lines:
        ends = {"x": [x[0], x[-1]], "y": [y, y], "mode": "lines"}
        fig.add_scatter(**ends, name=name, line=line, legendgroup=name, showlegend=listed, **place)
    # Curves that lie on each other: wide ones first, and what swings from token to token behind them all.
    order = sorted(enumerate(result.sequences), key=lambda one: len(one[1].ids) == 1)
    for i, sequence in order:
        cycle = len(sequence.ids) > 1
        name = html.escape(f"cycle of {len(sequence.ids)}" if cycle else sequence.label)
        width = 1 if cycle else max(1.5, 8 - 1.5 * i)
        line = {"color": "#000000" if cycle else COLOURS[1 + i % 7], "width": width}
        group: dict[str, Any] = {"legendgroup": f"s{i}", **place}
        y = sequence.curves[column - 1].norms
        fig.add_scatter(x=x, y=y, mode="lines", name=name, line=line, showlegend=listed, **group)
        if column == 1 and sequence.repeats is not None:
            fig.add_scatter(
                x=[sequence.repeats],
                y=[result.first_norm / 2],
                mode="markers",
                showlegend=False,
                marker={"color": line["color"], "size": 9, "symbol": "diamond"},
                hovertemplate=f"{name}: {sequence.repeats} repetitions<extra></extra>",
                **group,
            )


def repeat_attention(result: Any) -> go.Figure:
    """Attention to the first and to all high-norm positions over layers; below, a picture per sequence and layer."""
    shown = [p.layer for p in result.sequences[0].pictures]
    across, down = max(len(shown), 1), len(result.sequences)
    left = (across + 1) // 2
    specs: list[Any] = [None] * across
    specs[0] = {"colspan": left}
    specs[left if across > 1 else 0] = {"colspan": across - left or 1}
    labels = [html.escape(s.label) for s in result.sequences]
    labels = [labels[0], *(f"{result.max_repeats} x {label}" for label in labels[1:])]
    titles = ["Attention of all queries", "Tail: a high-norm key over an ordinary one"][: 2 if across > 1 else 1]
    fig = panels(
        titles + [f"layer {layer}: {label}" for label in labels for layer in shown],
        rows=1 + down,
        cols=across,
        specs=[specs, *[[{} for _ in range(across)] for _ in range(down)]],
        row_heights=[1.1, *[1.0] * down],
        vertical_spacing=0.3 / (1 + down),
        spacing=0.035,
    )
    layers = list(range(result.model.n_layers))
    for row, (sequence, label) in enumerate(zip(result.sequences, labels, strict=True)):
        _over_layers(fig, layers, sequence, label, COLOURS[row % len(COLOURS)], left + 1 if across > 1 else None)
        for column, picture in enumerate(sequence.pictures, 1):
            _picture(fig, result.edges, picture, row + 2, column)
    axes(fig, 1 + down, None, x="key position")
    axes(fig, None, 1, y="query position")
    axes(fig, x=counted("layer", len(layers)), y=shares("share of attention", 0, 1.02))
    if across > 1:
        tails = [v for sequence in result.sequences for v in sequence.tail_ratio or ()]
        axes(fig, 1, left + 1, x=counted("layer", len(layers)), y=powers(None, tails))
    bar = {
        "title": {"text": "share of attention<br>(queries of a row,<br>keys of a column)"},
        "tickvals": [-3, -2, -1, 0],
        "ticktext": ["0.001", "0.01", "0.1", "1"],
        "len": 0.9 * down / (1 + down),
        "y": 0,
        "yanchor": "bottom",
    }
    return finished(
        fig,
        result,
        width=1400,
        height=400 + 330 * down,
        top=100,
        bottom=60,
        legend={"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left", "font": {"size": 11}},
        coloraxis={"colorscale": "Viridis", "cmin": -3, "cmax": 0, "colorbar": bar},
    )


def _over_layers(fig: Any, layers: list[int], sequence: Any, label: str, color: str, ratios: int | None) -> None:
    """Attention of all queries, and in the column `ratios` what the tail gives sinks over ordinary positions."""
    lines = [(sequence.first, "position 0", "dot", 2)]
    if sequence.mass is not None:
        lines.append((sequence.mass, "high-norm positions", "solid", 2))
        lines.append(([sequence.uniform] * len(layers), "these, were it uniform", "dash", 1))
    for values, what, dash, width in lines:
        style = {"mode": "lines" if dash == "dash" else "lines+markers", "name": f"{label}: {what}"}
        fig.add_scatter(x=layers, y=values, line={"color": color, "dash": dash, "width": width}, row=1, col=1, **style)
    if ratios is not None and sequence.tail_ratio is not None:
        style = {"mode": "lines+markers", "name": f"{label}: ratio", "showlegend": False}
        fig.add_scatter(x=layers, y=sequence.tail_ratio, line={"color": color}, row=1, col=ratios, **style)


def _picture(fig: Any, edges: Any, picture: Any, row: int, column: int) -> None:
    ends = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    fig.add_heatmap(
        z=[[math.log10(max(v, 1e-6)) if v > 0 else None for v in line] for line in picture.cells],
        coloraxis="coloraxis",
        row=row,
        col=column,
        customdata=[
            [(q, k, v) for k, v in zip(ends, line, strict=True)] for q, line in zip(ends, picture.cells, strict=True)
        ],
        hovertemplate="queries %{customdata[0]}, keys %{customdata[1]}: %{customdata[2]:.3g}<extra></extra>",
    )
    ticks = [*range(0, len(ends) - 2, max(1, len(ends) // 4)), len(ends) - 1]
    named = {"tickvals": ticks, "ticktext": [str(edges[i]) for i in ticks]}
    axes(fig, row, column, x=named, y={"autorange": "reversed", **named})


def convergence(result: Any) -> go.Figure:
    """Distance and bound over n, each head's distance against its bound, and the distances of all layers."""
    deep = result.layers_read > 1
    titles = ["First layer: distance to the token alone", f"Its heads at n = {result.counts[-1]}"]
    fig = panels([*titles, *(["Every layer (median over tokens)"] if deep else [])], spacing=0.075)
    for i, whole in enumerate(result.wholes()):
        _whole(fig, result, whole, COLOURS[i % len(COLOURS)], max(1.5, 6 - 1.5 * i))
    if result.outside is None:
        note = {"name": "dotted: bound, sum over heads", "line": {"color": GREY, "dash": "dot"}}
        fig.add_scatter(x=[None], y=[None], mode="lines", **note, row=1, col=1)
    if result.window is not None:
        fig.add_vline(result.window, line={"color": RED, "dash": "dash"}, row=1, col=1)
        fig.add_annotation(
            x=0.03,
            y=0.05,
            xref="x domain",
            yref="y domain",
            showarrow=False,
            font={"color": RED},
            row=1,
            col=1,
            text=f"from n = {result.window} the prefix is out of the window:<br>the distance is 0",
            align="left",
            xanchor="left",
        )
    axes(fig, x=_REPETITIONS, y=powers("L2 distance of the outputs"))
    heads = counted("head (dot: measured, bar: bound)", 1 + max(c.head for c in result.curves if c.head is not None))
    axes(fig, 1, 2, x=heads, y=powers())
    if deep:
        _layers(fig, result)
    legend2 = {"orientation": "h", "y": -0.24, "x": 1, "xanchor": "right", "yanchor": "top"}
    legend = {"y": -0.24, "x": 0.3}
    return finished(fig, result, width=1400 if deep else 1000, height=480, legend=legend, legend2=legend2)


def _whole(fig: Any, result: Any, whole: Any, color: str, width: float) -> None:
    """The curve of a token in the first layer, and its heads; curves that lie on each other get thinner."""
    label = html.escape(repr(whole.token), quote=False)
    label += "" if len(result.prefixes) == 1 else f", k = {result.prefixes[whole.prefix].k}"
    style: dict[str, Any] = {"x": result.counts, "row": 1, "col": 1, "mode": "lines"}
    y = [d if d > 0 else None for d in whole.distance]
    fig.add_scatter(y=y, name=label, line={"color": color, "width": width}, **style)
    if whole.bound is not None:
        line = {"color": color, "dash": "dot", "width": 1.5}
        fig.add_scatter(y=whole.bound, line=line, showlegend=False, name=f"{label}: bound", **style)
    heads = [c for c in result.curves if c.head is not None and c.layer == 0]
    heads = [c for c in heads if (c.id, c.prefix) == (whole.id, whole.prefix) and c.distance[-1] > 0]
    at: dict[str, Any] = {"x": [c.head for c in heads], "mode": "markers", "showlegend": False, "row": 1, "col": 2}
    fig.add_scatter(y=[c.distance[-1] for c in heads], name=label, marker={"color": color, "size": 8}, **at)
    if any(c.bound is not None for c in heads):
        bars = {"color": color, "symbol": "line-ew-open", "size": 16, "line": {"width": 2}}
        bounds = [None if c.bound is None else c.bound[-1] for c in heads]
        fig.add_scatter(y=bounds, name=f"{label}: bound", marker=bars, **at)


def _layers(fig: Any, result: Any) -> None:
    count = result.layers_read
    scale = sample_colorscale("viridis", [0.9 * i / max(1, count - 1) for i in range(count)])
    named = set(range(count)) if count <= 8 else {0, count // 2, count - 1}
    for layer in range(count):
        y = [median(c.distance[i] for c in result.wholes(layer)) for i in range(len(result.counts))]
        fig.add_scatter(
            x=result.counts,
            y=[v if v > 0 else None for v in y],
            name=f"layer {layer}",
            mode="lines",
            line={"color": scale[layer]},
            showlegend=layer in named,
            legend="legend2",
            row=1,
            col=3,
        )
    axes(fig, 1, 3, x=_REPETITIONS, y=powers())


def divergence(result: Any) -> go.Figure:
    """p(next = word) over n, and the longest verbatim pieces of what follows."""
    leaks = any(c.leak is not None for part in result.groups().values() for c in part)
    titles = ["Does it go on repeating?", "Longest piece of training text in the answer"]
    fig = panels(titles[: 1 + leaks], [0.48, 0.52], spacing=0.1)
    for prefix, patched in sorted({(c.prefix, c.patched) for c in result.curves}):
        _probabilities(fig, result, prefix, patched)
    # Models that hardly repeat at all are told apart by powers of ten only.
    top = max(max(c.p) for c in result.curves)
    scale: dict[str, Any] = {"range": [-0.02, 1.02]} if top > 0.1 else {"type": "log", "dtick": 1}
    times = {**_REPETITIONS, "title_text": "repetitions n (thick: median over words)"}
    axes(fig, x=times, y={"title_text": "p(next = word)", "exponentformat": "power", **scale})
    if leaks:
        _leaks(fig, result)
    legend = {"y": -0.25, "x": 0.3}
    return finished(fig, result, width=1400 if leaks else 850, height=480, legend=legend)


def _probabilities(fig: Any, result: Any, prefix: bool, patched: bool) -> None:
    part = [c for c in result.curves if (c.prefix, c.patched) == (prefix, patched)]
    line = {"color": ORANGE if patched else BLUE, "dash": "dash" if prefix else "solid"}
    style: dict[str, Any] = {"mode": "lines", "row": 1, "col": 1}
    for c in part:
        hover = f"{html.escape(repr(c.word))}, n %{{x}}: p %{{y:.3g}}<extra></extra>"
        thin = {"line": {**line, "width": 1}, "opacity": 0.3, "showlegend": False, "hovertemplate": hover}
        fig.add_scatter(x=c.repeats, y=c.p, **thin, **style)
    common = sorted(set.intersection(*(set(c.repeats) for c in part)))
    at = [dict(zip(c.repeats, c.p, strict=True)) for c in part]
    middle = [median(values[n] for values in at) for n in common]
    name = ("patched" if patched else "intact") + (f", behind {html.escape(repr(result.prefix))}" if prefix else "")
    fig.add_scatter(x=common, y=middle, line={**line, "width": 3}, name=name, **style)


def _leaks(fig: Any, result: Any) -> None:
    longest = 0
    for name, part in result.groups().items():
        color = GREY if part[0].word is None else ORANGE if part[0].patched else BLUE
        found = [c for c in part if c.leak is not None]
        longest = max([longest, *(c.leak.length for c in found)])
        fig.add_box(
            y=[c.leak.length for c in found],
            name=f"{name} ({len(found)})".replace(", ", "<br>").replace(" (", "<br>("),
            boxpoints="all",
            pointpos=0,
            jitter=0.4,
            marker={"color": color, "size": 6, "opacity": 0.7},
            line={"color": color},
            fillcolor="rgba(0,0,0,0)",
            showlegend=False,
            row=1,
            col=2,
            text=[html.escape(f"{c.word or 'control'!r}: {c.leak.text[:80]!a} in {c.leak.file}") for c in found],
            hovertemplate="%{y} bytes<br>%{text}<extra></extra>",
        )
    axes(fig, 1, 2, x={"tickangle": 0}, y={"title_text": "bytes, word for word", "range": [0, 1.08 * longest]})


_SHOWN = 40  # records with a curve of their own: more cannot be told apart


def draw_loops(result: Any) -> go.Figure:
    """Diversity of the window over the tokens, a line per record, with the onset and the detection of each loop."""
    theta, window = result.settings["theta_ttr"], html.escape(str(result.settings["window"]))
    fig = panels([""])
    shown = sorted(result.records, key=lambda r: not r.loop)[:_SHOWN]
    for record in reversed(shown):
        _curve(fig, record)
    looping = [r for r in shown if r.loop]
    _points(fig, looping, "onset", BLUE, "circle-open", "onset of the longest repetition")
    _points(fig, looping, "detected", RED, "x", "detected")
    level(fig, theta, color=GREY, annotation_text=f"threshold {theta:g}")
    left = f" ({len(shown)} of {len(result.records)} records)" if len(shown) < len(result.records) else ""
    ratio = {"title_text": f"type-token ratio of the last {window} tokens", "range": [0, 1.03]}
    axes(fig, x={"title_text": f"tokens{left}", "rangemode": "tozero"}, y=ratio)
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    return finished(fig, result, width=1000, height=520, top=70, bottom=90, legend=legend)


def draw_calibration(result: Any) -> go.Figure:
    """False alarms per million held-out tokens of each rule, with the 95 % upper limit, and what was promised."""
    fig = panels([""])
    limits = {"type": "data", "array": [r.at_most - r.per_million for r in result.rates], "arrayminus": [0]}
    names = [html.escape(r.rule) for r in result.rates]
    fig.add_scatter(x=names, y=[r.per_million for r in result.rates], mode="markers", error_y=limits, name="measured")
    level(fig, result.promised, color=GREY, annotation_text=f"promised: {result.promised:.3g}")
    axes(fig, x={}, y={"title_text": "false alarms per million tokens", "rangemode": "tozero"})
    return finished(fig, result, width=1000, height=520, top=70, bottom=90)


def _curve(fig: Any, record: Any) -> None:
    kind = "loops" if record.loop else "does not"
    fig.add_scatter(
        x=record.steps,
        y=record.curve,
        mode="lines",
        name=kind,
        legendgroup=kind,
        showlegend=not any(curve.name == kind for curve in fig.data),
        line={"color": ORANGE if record.loop else GREY, "width": 1.5},
        opacity=0.8,
        hovertemplate=f"{html.escape(record.name)}<br>%{{y:.3f}} after %{{x}} tokens<extra></extra>",
    )


def _points(fig: Any, records: list[Any], field: str, color: str, symbol: str, name: str) -> None:
    there = [(getattr(r, field), r) for r in records if getattr(r, field) is not None]
    if not there:
        return
    fig.add_scatter(
        x=[at for at, _ in there],
        y=[_height(r, at) for at, r in there],
        mode="markers",
        name=name,
        marker={"color": color, "symbol": symbol, "size": 9},
        customdata=[[html.escape(r.name), r.period if r.period is not None else "-"] for _, r in there],
        hovertemplate=f"%{{customdata[0]}}<br>{name} at %{{x}}, period %{{customdata[1]}}<extra></extra>",
    )


def _height(record: Any, at: int) -> float:
    """The curve where it is nearest."""
    return min(zip(record.steps, record.curve, strict=True), key=lambda point: abs(point[0] - at))[1]
