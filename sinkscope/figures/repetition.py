"""Drawings of repetition: what it does to norms, attention and outputs, divergence, and loops in texts."""

from __future__ import annotations

import html
import math
from itertools import pairwise
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from sinkscope.files.notation import neuron_names
from sinkscope.measure.style import (
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    RED,
    Panel,
    across,
    axes,
    band,
    counted,
    curve,
    dots,
    drawn,
    fill,
    finished,
    panels,
    powers,
    shares,
    upright,
    words,
)

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
    many, typical = len(curves) > 1, result.typical_norm is not None
    named = {"title_text": "repetitions" if len(curves) < 3 else "repeated tokens", "type": "log", "dtick": 1}
    parts = [
        Panel(
            _condition(one) if many else "",
            _norms(result, i) if typical else [],
            named,
            powers(None if i else "L2 norm of the residual stream"),
        )
        for i, one in enumerate(curves)
    ]
    legend = {"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"}
    grid = {"spacing": 0.02, "shared_yaxes": True}
    parts = parts or [Panel("", [], named, powers("L2 norm of the residual stream"))]
    return drawn(result, parts, grid=grid, width=1400 if many else 1000, height=520, legend=legend, bottom=70)


def _condition(one: Any) -> str:
    names = neuron_names(one.sites, 4)
    return _CONDITIONS[one.condition] + (f"<br>({names})" if names else "")


def _norms(result: Any, number: int) -> list[Any]:
    """The curves of all sequences under one condition, and what they are held against."""
    x, listed, first = list(result.counts), number == 0, result.sequences[0].curves[number].first_norm
    ends, half = [x[0], x[-1]], result.first_norm / 2
    low, high = [result.typical_low] * 2, [result.typical_high] * 2
    levels = [
        curve(ends, [y, y], name, color, dash, width, mode="lines", legendgroup=name, showlegend=listed)
        for y, name, color, dash, width in (
            (result.typical_norm, "typical text, median", GREY, "solid", None),
            (first, "first token, in this panel", BLUE, "solid", 3),
            (half, "half of the first token's", BLUE, "dot", None),
        )
    ]
    traces = [band(ends, low, high, legendgroup="band", showlegend=listed), *levels]
    # Curves that lie on each other: wide ones first, and what swings from token to token behind them all.
    for i, sequence in sorted(enumerate(result.sequences), key=lambda one: len(one[1].ids) == 1):
        cycle = len(sequence.ids) > 1
        name = html.escape(f"cycle of {len(sequence.ids)}" if cycle else sequence.label)
        color, width = ("#000000", 1) if cycle else (COLOURS[1 + i % 7], max(1.5, 8 - 1.5 * i))
        style: dict[str, Any] = {"mode": "lines", "width": width, "showlegend": listed, "legendgroup": f"s{i}"}
        traces.append(curve(x, sequence.curves[number].norms, name, color, **style))
        if listed and sequence.repeats is not None:
            hover = f"{name}: {sequence.repeats} repetitions<extra></extra>"
            style = {"marker_symbol": "diamond", "showlegend": False, "legendgroup": f"s{i}", "hovertemplate": hover}
            traces.append(dots([sequence.repeats], [half], None, color, 9, **style))
    return traces


def repeat_attention(result: Any) -> go.Figure:
    """Attention to the first and to all high-norm positions over layers; below, a picture per sequence and layer."""
    shown = [p.layer for p in result.sequences[0].pictures]
    across_all, down = max(len(shown), 1), len(result.sequences)
    left = (across_all + 1) // 2
    specs: list[Any] = [None] * across_all
    specs[0] = {"colspan": left}
    specs[left if across_all > 1 else 0] = {"colspan": across_all - left or 1}
    labels = [html.escape(s.label) for s in result.sequences]
    labels = [labels[0], *(f"{result.max_repeats} x {label}" for label in labels[1:])]
    over = _over_layers(result, labels)[: 2 if across_all > 1 else 1]
    fig = panels(
        [part.title for part in over] + [f"layer {layer}: {label}" for label in labels for layer in shown],
        rows=1 + down,
        cols=across_all,
        specs=[specs, *[[{} for _ in range(across_all)] for _ in range(down)]],
        row_heights=[1.1, *[1.0] * down],
        vertical_spacing=0.3 / (1 + down),
        spacing=0.035,
    )
    for part, col in zip(over, (1, left + 1), strict=False):
        fill(fig, part, 1, col)
    for row, sequence in enumerate(result.sequences, 2):
        for col, picture in enumerate(sequence.pictures, 1):
            fill(fig, _picture(result.edges, picture), row, col)
    axes(fig, 1 + down, None, x="key position")
    axes(fig, None, 1, y="query position")
    axes(fig, y="share of attention")
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


def _over_layers(result: Any, labels: list[str]) -> list[Panel]:
    """Attention of all queries, and what the tail gives sinks over ordinary positions."""
    layers = list(range(result.model.n_layers))
    axis, shared, ratios = counted("layer", len(layers)), list[Any](), list[Any]()
    for i, (sequence, label) in enumerate(zip(result.sequences, labels, strict=True)):
        color = COLOURS[i % len(COLOURS)]
        shared.append(curve(layers, sequence.first, f"{label}: position 0", color, "dot", 2))
        if sequence.mass is not None:
            uniform, name = [sequence.uniform] * len(layers), f"{label}: these, were it uniform"
            shared.append(curve(layers, sequence.mass, f"{label}: high-norm positions", color, width=2))
            shared.append(curve(layers, uniform, name, color, "dash", 1, mode="lines"))
        if sequence.tail_ratio is not None:
            ratios.append(curve(layers, sequence.tail_ratio, f"{label}: ratio", color, showlegend=False))
    tails = [v for sequence in result.sequences for v in sequence.tail_ratio or ()]
    return [
        Panel("Attention of all queries", shared, axis, shares("share of attention", 0, 1.02)),
        Panel("Tail: a high-norm key over an ordinary one", ratios, axis, powers(None, tails)),
    ]


def _picture(edges: Any, picture: Any) -> Panel:
    ends = [f"{a}" if b == a + 1 else f"{a}-{b - 1}" for a, b in pairwise(edges)]
    shown = go.Heatmap(
        z=[[math.log10(max(v, 1e-6)) if v > 0 else None for v in line] for line in picture.cells],
        coloraxis="coloraxis",
        customdata=[
            [(q, k, v) for k, v in zip(ends, line, strict=True)] for q, line in zip(ends, picture.cells, strict=True)
        ],
        hovertemplate="queries %{customdata[0]}, keys %{customdata[1]}: %{customdata[2]:.3g}<extra></extra>",
    )
    ticks = [*range(0, len(ends) - 2, max(1, len(ends) // 4)), len(ends) - 1]
    named = {"tickvals": ticks, "ticktext": [str(edges[i]) for i in ticks]}
    return Panel("", [shown], named, {"autorange": "reversed", **named})


def convergence(result: Any) -> go.Figure:
    """Distance and bound over n, each head's distance against its bound, and the distances of all layers."""
    deep, wholes = result.layers_read > 1, list(enumerate(result.wholes()))
    styles = [(whole, COLOURS[i % len(COLOURS)], max(1.5, 6 - 1.5 * i)) for i, whole in wholes]
    marks = []
    if (window := result.window) is not None:
        out = f"from n = {window} the prefix is out of the window:<br>the distance is 0"
        place = {"xref": "x domain", "align": "left", "xanchor": "left"}
        marks = [upright(window, RED, "dash"), words(out, 0.03, 0.05, RED, **place)]
    bound = "dotted: bound, sum over heads"
    note = [go.Scatter(x=[None], y=[None], mode="lines", name=bound, line={"color": GREY, "dash": "dot"})]
    tokens = [trace for style in styles for trace in _whole(result, *style)]
    heads = counted("head (dot: measured, bar: bound)", 1 + max(c.head for c in result.curves if c.head is not None))
    parts = [
        Panel(
            "First layer: distance to the token alone",
            tokens + (note if result.outside is None else []),
            _REPETITIONS,
            powers("L2 distance of the outputs"),
            marks,
        ),
        Panel(
            f"Its heads at n = {result.counts[-1]}",
            [trace for whole, color, _ in styles for trace in _its_heads(result, whole, color)],
            heads,
            powers(),
        ),
    ]
    legend2 = {"orientation": "h", "y": -0.24, "x": 1, "xanchor": "right", "yanchor": "top"}
    return drawn(
        result,
        parts + ([_layers(result)] if deep else []),
        grid={"spacing": 0.075},
        width=1400 if deep else 1000,
        height=480,
        legend={"y": -0.24, "x": 0.3},
        legend2=legend2,
    )


def _label(result: Any, whole: Any) -> str:
    label = html.escape(repr(whole.token), quote=False)
    return label + ("" if len(result.prefixes) == 1 else f", k = {result.prefixes[whole.prefix].k}")


def _whole(result: Any, whole: Any, color: str, width: float) -> list[Any]:
    """The curve of a token in the first layer; curves that lie on each other get thinner."""
    label, distance = _label(result, whole), [d if d > 0 else None for d in whole.distance]
    traces = [curve(result.counts, distance, label, color, width=width, mode="lines")]
    if whole.bound is not None:
        style = {"mode": "lines", "showlegend": False}
        traces.append(curve(result.counts, whole.bound, f"{label}: bound", color, "dot", 1.5, **style))
    return traces


def _its_heads(result: Any, whole: Any, color: str) -> list[Any]:
    heads = [c for c in result.curves if c.head is not None and c.layer == 0]
    heads = [c for c in heads if (c.id, c.prefix) == (whole.id, whole.prefix) and c.distance[-1] > 0]
    label, at = _label(result, whole), [c.head for c in heads]
    traces = [dots(at, [c.distance[-1] for c in heads], label, color, 8, showlegend=False)]
    if any(c.bound is not None for c in heads):
        bounds = [None if c.bound is None else c.bound[-1] for c in heads]
        style: dict[str, Any] = {"marker_symbol": "line-ew-open", "marker_line": {"width": 2}, "showlegend": False}
        traces.append(dots(at, bounds, f"{label}: bound", color, 16, **style))
    return traces


def _layers(result: Any) -> Panel:
    count = result.layers_read
    scale: Any = sample_colorscale("viridis", [0.9 * i / max(1, count - 1) for i in range(count)])
    named = set(range(count)) if count <= 8 else {0, count // 2, count - 1}
    traces: list[Any] = []
    for layer in range(count):
        y = [median(c.distance[i] for c in result.wholes(layer)) for i in range(len(result.counts))]
        style: dict[str, Any] = {"mode": "lines", "showlegend": layer in named, "legend": "legend2"}
        y = [v if v > 0 else None for v in y]
        traces.append(curve(result.counts, y, f"layer {layer}", scale[layer], **style))
    return Panel("Every layer (median over tokens)", traces, _REPETITIONS, powers())


def divergence(result: Any) -> go.Figure:
    """p(next = word) over n, and the longest verbatim pieces of what follows."""
    leaks = any(c.leak is not None for part in result.groups().values() for c in part)
    groups = sorted({(c.prefix, c.patched) for c in result.curves})
    # Models that hardly repeat at all are told apart by powers of ten only.
    top = max(max(c.p) for c in result.curves)
    scale: dict[str, Any] = {"range": [-0.02, 1.02]} if top > 0.1 else {"type": "log", "dtick": 1}
    going_on = Panel(
        "Does it go on repeating?",
        [trace for group in groups for trace in _probabilities(result, *group)],
        {**_REPETITIONS, "title_text": "repetitions n (thick: median over words)"},
        {"title_text": "p(next = word)", "exponentformat": "power", **scale},
    )
    parts = [going_on] + ([_leaks(result)] if leaks else [])
    size = {"width": 1400 if leaks else 850, "height": 480, "legend": {"y": -0.25, "x": 0.3}}
    return drawn(result, parts, [0.48, 0.52], grid={"spacing": 0.1}, **size)


def _probabilities(result: Any, prefix: bool, patched: bool) -> list[Any]:
    part = [c for c in result.curves if (c.prefix, c.patched) == (prefix, patched)]
    style = (ORANGE if patched else BLUE, "dash" if prefix else "solid")
    thin: dict[str, Any] = {"width": 1, "mode": "lines", "opacity": 0.3, "showlegend": False}
    hovers = [f"{html.escape(repr(c.word))}, n %{{x}}: p %{{y:.3g}}<extra></extra>" for c in part]
    traces = [
        curve(c.repeats, c.p, None, *style, hovertemplate=hover, **thin) for c, hover in zip(part, hovers, strict=True)
    ]
    common = sorted(set.intersection(*(set(c.repeats) for c in part)))
    at = [dict(zip(c.repeats, c.p, strict=True)) for c in part]
    middle = [median(values[n] for values in at) for n in common]
    name = ("patched" if patched else "intact") + (f", behind {html.escape(repr(result.prefix))}" if prefix else "")
    return [*traces, curve(common, middle, name, *style, width=3, mode="lines")]


def _leaks(result: Any) -> Panel:
    groups = {name: [c for c in part if c.leak is not None] for name, part in result.groups().items()}
    kinds = {name: part[0] for name, part in result.groups().items()}
    colors = {name: GREY if c.word is None else ORANGE if c.patched else BLUE for name, c in kinds.items()}
    traces = [
        go.Box(
            y=[c.leak.length for c in found],
            name=f"{name} ({len(found)})".replace(", ", "<br>").replace(" (", "<br>("),
            boxpoints="all",
            pointpos=0,
            jitter=0.4,
            marker={"color": colors[name], "size": 6, "opacity": 0.7},
            line={"color": colors[name]},
            fillcolor="rgba(0,0,0,0)",
            showlegend=False,
            text=[html.escape(f"{c.word or 'control'!r}: {c.leak.text[:80]!a} in {c.leak.file}") for c in found],
            hovertemplate="%{y} bytes<br>%{text}<extra></extra>",
        )
        for name, found in groups.items()
    ]
    longest = max((c.leak.length for found in groups.values() for c in found), default=0)
    pieces = {"title_text": "bytes, word for word", "range": [0, 1.08 * longest]}
    return Panel("Longest piece of training text in the answer", traces, {"tickangle": 0}, pieces)


_SHOWN = 40  # records with a curve of their own: more cannot be told apart


def draw_loops(result: Any) -> go.Figure:
    """Diversity of the window over the tokens, a line per record, with the onset and the detection of each loop."""
    theta, window = result.settings["theta_ttr"], html.escape(str(result.settings["window"]))
    shown = sorted(result.records, key=lambda r: not r.loop)[:_SHOWN]
    first = {r.loop: i for i, r in reversed(list(enumerate(reversed(shown))))}  # the legend names each kind once
    curves = [_diversity(r, listed=first[r.loop] == i) for i, r in enumerate(reversed(shown))]
    looping = [r for r in shown if r.loop]
    points = _points(looping, "onset", BLUE, "circle-open", "onset of the longest repetition")
    points += _points(looping, "detected", RED, "x", "detected")
    left = f" ({len(shown)} of {len(result.records)} records)" if len(shown) < len(result.records) else ""
    part = Panel(
        "",
        curves + points,
        {"title_text": f"tokens{left}", "rangemode": "tozero"},
        {"title_text": f"type-token ratio of the last {window} tokens", "range": [0, 1.03]},
        [across(theta, GREY, annotation_text=f"threshold {theta:g}")],
    )
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    return drawn(result, [part], width=1000, height=520, top=70, bottom=90, legend=legend)


def draw_calibration(result: Any) -> go.Figure:
    """False alarms per million held-out tokens of each rule, with the 95 % upper limit, and what was promised."""
    limits = {"type": "data", "array": [r.at_most - r.per_million for r in result.rates], "arrayminus": [0]}
    names, alarms = [html.escape(r.rule) for r in result.rates], [r.per_million for r in result.rates]
    part = Panel(
        "",
        [go.Scatter(x=names, y=alarms, mode="markers", error_y=limits, name="measured")],
        None,
        {"title_text": "false alarms per million tokens", "rangemode": "tozero"},
        [across(result.promised, GREY, annotation_text=f"promised: {result.promised:.3g}")],
    )
    return drawn(result, [part], width=1000, height=520, top=70, bottom=90)


def _diversity(record: Any, *, listed: bool) -> Any:
    kind, color = ("loops", ORANGE) if record.loop else ("does not", GREY)
    hover = f"{html.escape(record.name)}<br>%{{y:.3f}} after %{{x}} tokens<extra></extra>"
    style: dict[str, Any] = {
        "mode": "lines",
        "legendgroup": kind,
        "showlegend": listed,
        "opacity": 0.8,
        "hovertemplate": hover,
    }
    return curve(record.steps, record.curve, kind, color, width=1.5, **style)


def _points(records: list[Any], field: str, color: str, symbol: str, name: str) -> list[Any]:
    there = [(getattr(r, field), r) for r in records if getattr(r, field) is not None]
    heights = [min(zip(r.steps, r.curve, strict=True), key=lambda point, at=at: abs(point[0] - at)) for at, r in there]
    made = dots(
        [at for at, _ in there],
        [height for _, height in heights],  # of the curve, where it is nearest
        name,
        color,
        9,
        marker_symbol=symbol,
        customdata=[[html.escape(r.name), r.period if r.period is not None else "-"] for _, r in there],
        hovertemplate=f"%{{customdata[0]}}<br>{name} at %{{x}}, period %{{customdata[1]}}<extra></extra>",
    )
    return [made] if there else []
