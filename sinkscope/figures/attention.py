"""The drawings of attention over a text or a generation: barcodes, locking, rotary invariance, and lines."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from sinkscope.measure.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    Panel,
    across,
    at_place,
    axes,
    by_layer,
    counted,
    curve,
    drawn,
    fill,
    finished,
    panels,
    shares,
    upright,
)

_TICKS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)
_PARTS = {
    "whole": "generated",
    "healthy_whole": "ordinary text",
    "late": "generated, last steps",
    "healthy_late": "ordinary text, last steps",
}


def draw_barcode(result: Any) -> go.Figure:
    """A row per head: all steps, the control beside them, and the last steps position by position, of both."""
    shown = [h for h in result.heads if h.whole is not None]
    control = any(h.healthy_whole is not None for h in shown)
    parts = [part for part in _PARTS if control or not part.startswith("healthy")]
    top = math.sqrt(max([0.05, *(_high(getattr(h, part)) for h in shown for part in parts)]))
    grid = {"rows": len(shown), "cols": len(parts), "spacing": 0.045, "vertical_spacing": 0.24 / max(2, len(shown))}
    fig = drawn(
        result,
        [
            Panel(f"layer {h.layer}, head {h.head}: {_PARTS[part]}", *_steps(result, h, part, top, first=not i + j))
            for i, h in enumerate(shown)
            for j, part in enumerate(parts)
        ],
        grid=grid,
        width=350 * len(parts) + 130,
        height=max(420, 265 * len(shown) + 120),
        margin={"l": 60, "r": 90, "t": 90, "b": 60},
        font={"size": 12},
    )
    axes(fig, len(shown), None, x="position")
    axes(fig, None, 1, y="step")
    return fig


def _high(picture: Any) -> float:
    """A share that only one cell in a hundred exceeds."""
    cells = sorted(v for line in picture.values() for v in line) if picture is not None else [0.0]
    return cells[-1 - len(cells) // 100]


def _steps(result: Any, head: Any, part: str, top: float, *, first: bool) -> tuple[Any, ...]:
    """Traces, axes and marks of one picture of a head; the scale stands beside the first."""
    picture = getattr(head, part)
    marks = _acts(result, head, part)
    if picture is None:
        return [], None, None, marks
    values = picture.values()
    ticks = [t for t in _TICKS if math.sqrt(t) <= top]
    found = go.Heatmap(
        x=[picture.first_position + (i + 0.5) * picture.positions - 0.5 for i in range(len(values[0]))],
        y=[picture.first_step + (i + 0.5) * picture.steps - 0.5 for i in range(len(values))],
        z=[[math.sqrt(v) for v in line] for line in values],
        customdata=values,
        zmin=0,
        zmax=top,
        colorscale="Greys",
        showscale=first,
        colorbar={
            "title": {"text": "share"},
            "tickvals": [math.sqrt(t) for t in ticks],
            "thickness": 12,
            "ticktext": [f"{t:g}" for t in ticks],
        },
        hovertemplate="step %{y:.0f}, position %{x:.0f}: %{customdata:.3f}<extra></extra>",
    )
    return [found], None, {"autorange": "reversed"}, marks


def _acts(result: Any, head: Any, part: str) -> list[Any]:
    """Lines where interventions acted (in few steps; one that acts all the time would only hide the picture)."""
    kinds: dict[str, list[int]] = {}
    for mark in result.marks:
        kinds.setdefault(mark.kind, []).append(mark.step)
    few = {kind: steps for kind, steps in kinds.items() if len(steps) <= 40}
    if part == "late":
        late = (step for steps in few.values() for step in steps if step >= head.late.first_step)
        return [across(step, ORANGE, "solid") for step in late]
    if part != "whole":
        return []
    begins = [] if result.onset is None else [upright(result.onset, ORANGE, width=1)]
    font = {"size": 9, "color": ORANGE}
    return begins + [
        across(step, ORANGE, "solid", annotation={"text": "" if i else html.escape(kind), "font": font})
        for kind, steps in few.items()
        for i, step in enumerate(steps)
    ]


_BARS = 16


def draw_locking(result: Any) -> go.Figure:
    """What the loop adds to every head, the heads it adds most to, and the scores along the text beside diversity."""
    titles = ["What the loop adds", "Heads it adds most to", "Along the text"]
    specs = [[{}, {}], [{"colspan": 2}, None]]
    fig = panels(titles, spacing=0.1, rows=2, cols=2, specs=specs, vertical_spacing=0.16, row_heights=[0.5, 0.5])
    gains = _heads(
        titles[0],
        result,
        lambda h: (h.gain, h.score, h.mass, h.width),
        "gain %{z:.2f}<br>score %{customdata[1]:.2f}, mass on the suffix %{customdata[2]:.2f}, on %{customdata[3]:.1f} "
        "positions",
        zmid=0,
        zmin=-1,
        colorscale=[[0, ORANGE], [0.5, "#f7f7f7"], [1, BLUE]],
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "gain"}, "x": 0.455, "y": 0.79, "len": 0.46, "thickness": 12},
    )
    fill(fig, gains._replace(x=counted("head", 1 + max(h.head for h in result.heads), 16)))
    fill(fig, _most(titles[1], result), 1, 2)
    fill(fig, _along(titles[2], result), 2, 1)
    legend = {"y": -0.1, "x": 1, "xanchor": "right"}
    return finished(fig, result, width=1300, height=870, bottom=80, legend=legend, barmode="overlay")


def _most(title: str, result: Any) -> Panel:
    top = result.heads[:_BARS]
    series = (
        ("in the loop", [h.score for h in top], BLUE, 0.8),
        ("in ordinary text", [h.healthy_score for h in top], GREY, 0.45),
    )
    traces = [
        go.Bar(
            x=[f"{h.layer}.{h.head}" for h in top],
            y=values,
            name=f"score {name}",
            marker_color=color,
            width=width,
            customdata=[[h.mass, h.stability] for h in top],
            hovertemplate="%{x}: %{y:.3f}<br>in the loop: mass %{customdata[0]:.2f}, stability %{customdata[1]:.2f}"
            f"<extra>{name}</extra>",
        )
        for name, values, color, width in series
        if any(v is not None for v in values)
    ]
    names = {"title_text": "layer.head", "type": "category"}
    return Panel(title, traces, names, {"title_text": "score", "range": [0, 1.02]})


def _along(title: str, result: Any) -> Panel:
    hover = "position %{x}: %{y:.3f}<extra>%{fullData.name}</extra>"
    scores = [
        curve(result.positions, values, name, color, dash, mode="lines", hovertemplate=hover)
        for name, values, color, dash in (
            ("score of the locked heads", result.locked_curve, BLUE, "solid"),
            ("of all others", result.other_curve, GREEN, "solid"),
            ("of the locked heads in ordinary text", result.healthy_curve, GREY, "solid"),
            (f"type-token ratio of {result.window} tokens", result.diversity, RED, "dot"),
        )
        if values
    ]
    events = [  # several can be close together: their names stand in the legend
        curve([at, at], [0, 1.02], f"{name}: {at}", color, dash, 1.5, mode="lines", hoverinfo="name")
        for name, at, color, dash in (
            ("prompt ends", result.prompt_tokens, GREY, "dash"),
            ("loop begins", result.loop_onset, ORANGE, "dash"),
            ("last new 4-gram", result.last_new, GREEN, "dash"),
            ("heads lock", result.locking_onset, BLUE, "dash"),
            ("diversity has collapsed", result.collapse, RED, "longdash"),
        )
        if at is not None
    ]
    return Panel(title, [*scores, *events], "position", {"range": [0, 1.02]})


_WEIGHTS = (
    ("chosen lines, each cell once", "mass", BLUE, "solid"),
    ("line by line, crossings twice", "line_sums", ORANGE, "solid"),
    ("random lines of the same length", "random_mass", GREY, "dash"),
    ("cells covered", "cells", GREEN, "dot"),
)
_OVERLAPS = (
    ("between inputs", "inputs", BLUE, "solid"),
    ("with i = j (paper)", "inputs_paper", BLUE, "dash"),
    ("between inputs, random lines", "inputs_random", BLUE, "dot"),
    ("first half in second", "segments", ORANGE, "solid"),
    ("within each half", "segments_relative", ORANGE, "dash"),
    ("halves, random lines", "segments_random", ORANGE, "dot"),
)


def draw_weights(result: Any) -> go.Figure:
    """Draw mass against eta over all heads, each head at the paper's eta, and an attention map with its lines."""
    at = result.shown
    heads = _heads(
        f"Each head, eta {result.etas[at]:g}",
        result,
        lambda h: (h.mass[at], h.random_mass[at], h.cells[at], h.vertical[at]),
        "%{z:.1%}<br>random lines %{customdata[1]:.1%}, cells %{customdata[2]:.1%}, vertical %{customdata[3]:.0%} of "
        "the lines",
        colorbar={"title": {"text": "mass"}, "tickformat": ".0%", "x": 0.585, "thickness": 12},
    )
    mean = _curves("Mean over the heads", result, _WEIGHTS, 0.9, shares("share") | {"rangemode": "tozero"})
    parts, widths = [mean, heads, _attention_map(result.picture)], [0.3, 0.3, 0.4]
    legend = {"y": -0.14, "x": 0, "xanchor": "left"}
    return drawn(result, parts, widths, grid={"spacing": 0.1}, width=1500, height=600, legend=legend)


def draw_overlap(result: Any) -> go.Figure:
    """Draw the overlap of lines by eta and by head; below, which queries find the tokens that answers attend to."""
    t, eta = result.tokens, result.etas[0]
    rows, place = (1, {"len": 1.0, "y": 0.5}) if t is None else (2, {"len": 0.4, "y": 0.8})
    parts = [_curves("Lines, mean over the heads", result, _OVERLAPS, 0.5, shares("lines shared", 0, 1))]
    parts += [
        _heads(
            f"{title}, eta {eta:g}",
            result,
            lambda h, field=field: (getattr(h, field)[0],),
            "%{z:.1%}",
            showscale=field == "segments",
            colorbar={"tickformat": ".0%", "thickness": 12, **place},
        )
        for title, field in (("Between inputs", "inputs"), ("First half in second", "segments"))
    ]
    parts += [] if t is None else _found(t)
    return drawn(
        result,
        parts,
        grid={"rows": rows, "cols": 3, "vertical_spacing": 0.16, "column_widths": [0.36, 0.32, 0.32]},
        width=1500,
        height=500 * rows + 100,
        legend={"y": -0.25 / rows + 0.02, "x": 0, "xanchor": "left"},
        bottom=120,
        barmode="group",
    )


def _curves(
    title: str, result: Any, series: Iterable[tuple[str, str, str, str]], at: float, y: dict[str, Any]
) -> Panel:
    etas, hover = list(result.etas), "eta %{x}: %{y:.1%}<extra>%{fullData.name}</extra>"
    traces = [
        curve(etas, list(getattr(result, field)), name, color, dash, hovertemplate=hover)
        for name, field, color, dash in series
    ]
    chosen = {"title_text": "share of all lines chosen (eta)", "rangemode": "tozero"}
    return Panel(title, traces, chosen, y, [across(at)])


def _heads(title: str, result: Any, numbers: Any, hover: str, **settings: Any) -> Panel:
    """A map, layer by head; the first of a head's `numbers` is its colour."""
    cells = {(h.layer, h.head): numbers(h) for h in result.heads}
    layers, heads = (sorted({key[i] for key in cells}) for i in (0, 1))
    grid = [[cells[layer, h] for h in heads] for layer in layers]
    shown = go.Heatmap(
        x=heads,
        y=layers,
        z=[[cell[0] for cell in row] for row in grid],
        customdata=grid,
        hovertemplate=f"layer %{{y}}, head %{{x}}: {hover}<extra></extra>",
        **{"zmin": 0, "zmax": 1, "colorscale": "Viridis"} | settings,
    )
    return Panel(title, [shown], counted("head", len(heads), 8), by_layer(len(layers)))


def _attention_map(p: Any) -> Panel:
    values, n = p.values(), len(p.words)
    words = [html.escape(repr(word)) for word in p.words]
    shown = go.Heatmap(
        z=[[math.sqrt(v) if k <= q else None for k, v in enumerate(row)] for q, row in enumerate(values)],
        customdata=[[[words[q], words[k], v] for k, v in enumerate(row)] for q, row in enumerate(values)],
        colorscale="Greys",
        showscale=False,
        zmin=0,
        zmax=1,
        hovertemplate="%{customdata[0]} (%{y}) looks at %{customdata[1]} (%{x}): %{customdata[2]:.3f}<extra></extra>",
    )
    lines = [
        curve(
            [x for start, stop in ends for x in (start[0], stop[0], None)],
            [y for start, stop in ends for y in (start[1], stop[1], None)],
            name,
            color,
            width=2,
            mode="lines",
            opacity=0.5,
            hoverinfo="skip",
        )
        for name, color, ends in (
            ("vertical line", BLUE, [((b, b), (b, n - 1)) for b in p.vertical]),
            ("slash line", ORANGE, [((0, o), (n - 1 - o, n - 1)) for o in p.slash]),
        )
    ]
    return Panel(
        f"Layer {p.layer}, head {p.head}, first {n} tokens: heaviest {p.eta:.0%} of the lines",
        [shown, *lines],
        {"title_text": "key position", "range": [-0.5, n - 0.5]},
        {"title_text": "query position", "range": [n - 0.5, -0.5]},
    )


def _found(t: Any) -> list[Panel]:
    """The second row of `draw_overlap`, with a colour for each budget."""
    own = [b for b in t.blocks if b.block >= 0 and b.apart is not None]
    colors = [(GREEN, ORANGE, BLUE, RED, GREY)[i % 5] for i in range(len(t.budgets))]
    names = [f"{budget:.0%} of the tokens" for budget in t.budgets]
    places = [
        go.Bar(
            x=[html.escape(at_place(p.position)) for p in t.positions],
            y=[p.overlap[i] for p in t.positions],
            name=name,
            marker_color=color,
            hovertemplate="%{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
        )
        for i, (name, color) in enumerate(zip(names, colors, strict=True))
    ]

    def by(where: str, x: list[Any], values: list[Any], dash: str = "solid") -> list[Any]:
        """The shares found at each place, a curve per budget."""
        return [
            curve(
                x,
                [value[i] for value in values],
                None,
                color,
                dash,
                showlegend=False,
                hovertemplate=f"{where}: %{{y:.1%}}<extra>{name}</extra>",
            )
            for i, (name, color) in enumerate(zip(names, colors, strict=True))
        ]

    blocks = by("block %{x}", [b.block for b in t.blocks], [b.overlap for b in t.blocks])
    blocks += by("block %{x}", [b.block for b in own], [b.apart for b in own], "dash")
    apart = by("%{x} apart", [d.blocks for d in t.distances], [d.overlap for d in t.distances])
    random = [across(level, color) for level, color in zip(t.random, colors, strict=False)]
    found, shared = (shares(f"important tokens {what}", 0, 1) for what in ("found", "shared"))
    queries = "block (0: first of the answer; dashed: without its own queries)"
    steps = {"title_text": f"blocks of {t.window} queries apart", "dtick": 1}
    answer = [upright(-0.5, GREY, width=1)] if own else []
    return [
        Panel("Question's place: found by the last window", places, "question (dotted: random tokens)", found, random),
        Panel("Found by a block of queries", blocks, queries, found, answer),
        Panel("Blocks of an answer", apart, steps, shared),
    ]
