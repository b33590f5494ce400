"""The drawings of attention over a text or a generation: barcodes, locking, rotary invariance, and lines."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable
from itertools import product
from statistics import median_high
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    at_place,
    axes,
    by_layer,
    counted,
    finished,
    level,
    panels,
    powers,
    shares,
)

_TICKS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)


def draw_barcode(result: Any) -> go.Figure:
    """A row per head: all steps, the control beside them, and the last steps position by position, of both."""
    shown = [h for h in result.heads if h.whole is not None]
    control = any(h.healthy_whole is not None for h in shown)
    parts = ("whole", "healthy_whole", "late", "healthy_late") if control else ("whole", "late")
    names = {
        "whole": "generated",
        "healthy_whole": "ordinary text",
        "late": "generated, last steps",
        "healthy_late": "ordinary text, last steps",
    }
    titles = [f"layer {h.layer}, head {h.head}: {names[part]}" for h in shown for part in parts]
    below = 0.24 / max(2, len(shown))
    fig = panels(titles, rows=len(shown), cols=len(parts), spacing=0.045, vertical_spacing=below)
    top = math.sqrt(max([0.05, *(_high(getattr(h, part)) for h in shown for part in parts)]))
    for row, h in enumerate(shown, 1):
        for col, part in enumerate(parts, 1):
            _steps(fig, getattr(h, part), top, row, col, scale=row == 1 and col == 1)
        _marks(fig, result, h, row, parts.index("late") + 1)
    axes(fig, len(shown), None, x="position")
    axes(fig, None, 1, y="step")
    return finished(
        fig,
        result,
        width=350 * len(parts) + 130,
        height=max(420, 265 * len(shown) + 120),
        margin={"l": 60, "r": 90, "t": 90, "b": 60},
        font={"size": 12},
    )


def _high(picture: Any) -> float:
    """A share that only one cell in a hundred exceeds."""
    cells = sorted(v for line in picture.values() for v in line) if picture is not None else [0.0]
    return cells[-1 - len(cells) // 100]


def _steps(fig: Any, picture: Any, top: float, row: int, col: int, *, scale: bool) -> None:
    if picture is None:
        return
    values = picture.values()
    ticks = [t for t in _TICKS if math.sqrt(t) <= top]
    fig.add_heatmap(
        x=[picture.first_position + (i + 0.5) * picture.positions - 0.5 for i in range(len(values[0]))],
        y=[picture.first_step + (i + 0.5) * picture.steps - 0.5 for i in range(len(values))],
        z=[[math.sqrt(v) for v in line] for line in values],
        customdata=values,
        zmin=0,
        zmax=top,
        colorscale="Greys",
        showscale=scale,
        colorbar={
            "title": {"text": "share"},
            "tickvals": [math.sqrt(t) for t in ticks],
            "thickness": 12,
            "ticktext": [f"{t:g}" for t in ticks],
        },
        hovertemplate="step %{y:.0f}, position %{x:.0f}: %{customdata:.3f}<extra></extra>",
        row=row,
        col=col,
    )
    axes(fig, row, col, y={"autorange": "reversed"})


def _marks(fig: Any, result: Any, h: Any, row: int, late: int) -> None:
    """Lines where interventions acted (in few steps; one that acts all the time would only hide the picture)."""
    kinds: dict[str, list[int]] = {}
    for mark in result.marks:
        kinds.setdefault(mark.kind, []).append(mark.step)
    for kind, steps in kinds.items():
        if len(steps) > 40:
            continue
        for step in steps:
            fig.add_hline(
                step,
                line={"color": ORANGE, "width": 1},
                row=row,
                col=1,
                annotation={
                    "text": html.escape(kind) if step == steps[0] else "",
                    "font": {"size": 9, "color": ORANGE},
                },
            )
            if step >= h.late.first_step:
                fig.add_hline(step, line={"color": ORANGE, "width": 1}, row=row, col=late)
    if result.onset is not None:
        fig.add_vline(result.onset, line={"color": ORANGE, "width": 1, "dash": "dot"}, row=row, col=1)


_BARS = 16


def draw_locking(result: Any) -> go.Figure:
    """What the loop adds to every head, the heads it adds most to, and the scores along the text beside diversity."""
    titles = ["What the loop adds", "Heads it adds most to", "Along the text"]
    specs = [[{}, {}], [{"colspan": 2}, None]]
    fig = panels(titles, spacing=0.1, rows=2, cols=2, specs=specs, vertical_spacing=0.16, row_heights=[0.5, 0.5])
    _gains(fig, result)
    _bars(fig, result)
    _along(fig, result)
    legend = {"y": -0.1, "x": 1, "xanchor": "right"}
    return finished(fig, result, width=1300, height=870, bottom=80, legend=legend, barmode="overlay")


def _gains(fig: Any, result: Any) -> None:
    _heads(
        fig,
        result,
        1,
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
    axes(fig, x=counted("head", 1 + max(h.head for h in result.heads), 16))


def _bars(fig: Any, result: Any) -> None:
    top = result.heads[:_BARS]
    names = [f"{h.layer}.{h.head}" for h in top]
    for name, values, color, width in (
        ("in the loop", [h.score for h in top], BLUE, 0.8),
        ("in ordinary text", [h.healthy_score for h in top], GREY, 0.45),
    ):
        if any(v is not None for v in values):
            fig.add_bar(
                x=names,
                y=values,
                name=f"score {name}",
                marker_color=color,
                width=width,
                customdata=[[h.mass, h.stability] for h in top],
                row=1,
                col=2,
                hovertemplate="%{x}: %{y:.3f}<br>in the loop: mass %{customdata[0]:.2f}, stability %{customdata[1]:.2f}"
                f"<extra>{name}</extra>",
            )
    axes(fig, 1, 2, x={"title_text": "layer.head", "type": "category"}, y={"title_text": "score", "range": [0, 1.02]})


def _along(fig: Any, result: Any) -> None:
    for name, values, color, dash in (
        ("score of the locked heads", result.locked_curve, BLUE, "solid"),
        ("of all others", result.other_curve, GREEN, "solid"),
        ("of the locked heads in ordinary text", result.healthy_curve, GREY, "solid"),
        (f"type-token ratio of {result.window} tokens", result.diversity, RED, "dot"),
    ):
        if values:
            fig.add_scatter(
                x=result.positions,
                y=values,
                mode="lines",
                name=name,
                line={"color": color, "dash": dash},
                row=2,
                col=1,
                hovertemplate="position %{x}: %{y:.3f}<extra>" + name + "</extra>",
            )
    events = (
        ("prompt ends", result.prompt_tokens, GREY, "dash"),
        ("loop begins", result.loop_onset, ORANGE, "dash"),
        ("last new 4-gram", result.last_new, GREEN, "dash"),
        ("heads lock", result.locking_onset, BLUE, "dash"),
        ("diversity has collapsed", result.collapse, RED, "longdash"),
    )
    for name, at, color, dash in events:  # several can be close together: their names stand in the legend
        if at is not None:
            ends = {"x": [at, at], "y": [0, 1.02], "mode": "lines", "name": f"{name}: {at}"}
            fig.add_scatter(**ends, line={"color": color, "dash": dash, "width": 1.5}, hoverinfo="name", row=2, col=1)
    axes(fig, 2, 1, x="position", y={"range": [0, 1.02]})


_SIZES = (0.01, 1.0)
_EXACT = "<br>(10<sup>-6</sup>: exactly the same)"
_EVERY_LAYER = {"title_text": "layer", "dtick": 1}


def draw_ditto(result: Any) -> go.Figure:
    """Draw the probability over copies, with heads ablated and the control, and the scores of all heads."""
    count, ablated = len(result.curves), sum(h.ablated for h in result.heads)
    titles = [
        *(f"{html.escape(c.name.capitalize())}, mean of {c.units}" for c in result.curves),
        "Induction",
        "Previous token",
    ]
    fig = panels(titles, spacing=0.035)
    series = (
        ("intact", "probability", BLUE, "solid"),  # wide, because the control mostly lies on it
        (f"without the {ablated} heads of largest induction score", "ablated", RED, "dash"),
        (f"without {ablated} other heads (median of draws)", "control", GREY, "dot"),
    )
    for (col, curve), (name, field, color, dash) in product(enumerate(result.curves, 1), series):
        fig.add_scatter(
            x=[str(n) for n in curve.copies],
            y=getattr(curve, field),
            name=name,
            mode="lines+markers",
            line={"color": color, "dash": dash, "width": 5 if field == "probability" else 2},
            showlegend=col == 1 and ablated > 0,
            row=1,
            col=col,
        )
        axes(fig, 1, col, x={"title_text": "copies before", "type": "category"}, y={"range": [-0.03, 1.03]})
    axes(fig, y="probability")
    for col, field in ((count + 1, "induction"), (count + 2, "previous_token")):
        bar = {"showscale": col > count + 1, "colorbar": {"thickness": 12}}
        _heads(fig, result, col, lambda h, field=field: (getattr(h, field),), "%{z:.2f}", **bar)
    return finished(fig, result, width=280 * len(titles) + 100, height=450)


def draw_rotary(result: Any) -> go.Figure:
    """How queries and keys repeat, what that does to scores, the tail operator along the sequence, and decay."""
    if result.period is None:
        return finished(go.Figure(), result, width=800, height=260)
    titles = [
        "Queries and keys a shift apart",
        "Scores a shift apart",
        "Tail operator (Eq. 4)",
        "Decay of a disturbance",
    ]
    fig = panels(titles, rows=2, cols=2, vertical_spacing=0.17, spacing=0.11)
    _vectors(fig, result)
    _scores(fig, result)
    _drift(fig, result)
    _decay(fig, result)
    return finished(
        fig,
        result,
        width=1400,
        height=950,
        margin={"l": 70, "r": 260, "t": 90, "b": 60},
        legend={"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"},
        legend2={"x": 1.01, "y": 0.4, "xanchor": "left"},
    )


def _per_head(fig: Any, heads: Any, values: list[float | None], name: str, color: str, row: int, col: int) -> None:
    """A dot per head; heads of a layer stand side by side."""
    width = max(h.head for h in heads) + 1
    fig.add_scatter(
        x=[h.layer + (h.head + 0.5) / width * 0.8 - 0.4 for h in heads],
        y=values,
        mode="markers",
        name=name,
        marker={"color": color, "size": 6, "opacity": 0.8},
        row=row,
        col=col,
        customdata=[[h.layer, h.head] for h in heads],
        hovertemplate="layer %{customdata[0]}, head %{customdata[1]}: %{y:.3g}<extra>" + name + "</extra>",
    )


def _over(heads: Any, field: str, norm: str) -> list[float | None]:
    """A field over another, floored so that an exact repetition still shows on a logarithmic axis."""
    values = [(getattr(h, field), getattr(h, norm)) for h in heads]
    return [None if v is None or not n else max(v / n, 1e-6) for v, n in values]


def _vectors(fig: Any, result: Any) -> None:
    p = result.period
    for prefix, shift, color in (
        ("", f"{p} apart", BLUE),
        ("other_", f"{p + 1} apart", ORANGE),
        ("healthy_", f"{p} apart, ordinary text", GREY),
    ):
        for field, norm, what in (("delta_q", "query_norm", "queries"), ("delta_k", "key_norm", "keys")):
            values = _over(result.heads, prefix + field, norm)
            if any(v is not None for v in values):
                _per_head(fig, result.heads, values, f"{what} {shift}", color, 1, 1)
                fig.data[-1].marker.symbol = "circle" if what == "queries" else "x-thin-open"
    axes(fig, x=_EVERY_LAYER, y=powers(f"largest distance over median length{_EXACT}"))


def _scores(fig: Any, result: Any) -> None:
    p = result.period
    for field, name, color in (
        ("change", f"scores {p} apart", BLUE),
        ("other_change", f"scores {p + 1} apart", ORANGE),
        ("healthy_change", f"scores {p} apart, ordinary text", GREY),
        ("bound", "bound of Eq. 15", GREEN),
    ):
        values = _over(result.heads, field, "spread")
        if any(v is not None for v in values):
            _per_head(fig, result.heads, values, name, color, 1, 2)
            if field == "bound":
                fig.data[-1].marker.symbol = "line-ew-open"
    axes(fig, 1, 2, x=_EVERY_LAYER, y=powers(f"mean difference over spread of scores{_EXACT}"))


def _drift(fig: Any, result: Any) -> None:
    """The median over the layers, each layer faintly behind it."""
    curves = (
        ("period", f"in {result.period} steps", BLUE),
        ("step", "in 1 step", ORANGE),
        ("healthy_period", f"in {result.period} steps, ordinary text", GREY),
    )
    for field, name, color in curves:
        lines = [getattr(d, field) for d in result.drift if getattr(d, field) is not None]
        if not lines:
            continue
        known = [[v for v in at if v is not None] for at in zip(*lines, strict=True)]
        middle = [median_high(values) if values else None for values in known]
        fig.add_scatter(
            x=result.positions,
            y=middle,
            mode="lines",
            name=f"tail operator {name}",
            line={"color": color, "width": 2},
            legend="legend2",
            row=2,
            col=1,
            hovertemplate="position %{x}: %{y:.3g}<extra>median over layers, " + name + "</extra>",
        )
    fig.add_vline(x=result.onset, line={"color": GREY, "dash": "dot"}, row=2, col=1)
    begins = "position (dotted: the loop begins)"
    axes(fig, 2, 1, x=begins, y=powers("movement over length"))


def _decay(fig: Any, result: Any) -> None:
    small, large = _SIZES
    for decays, within, size, name, color in (
        (result.decays, False, small, "orthogonal to the tail subspace", BLUE),
        (result.decays, True, small, "inside it", GREEN),
        (result.healthy_decays, False, small, "ordinary text, orthogonal", GREY),
        (result.decays, False, large, "orthogonal, as large as the state", ORANGE),
    ):
        chosen = [d for d in decays if d.size == size and d.within == within]
        if not chosen:
            continue
        grown = [[v / d.change[0] for v in d.change] for d in chosen]
        middle = [median_high(at) for at in zip(*grown, strict=True)]
        fig.add_scatter(
            x=list(range(len(middle))),
            y=middle,
            mode="lines+markers",
            name=f"disturbed {name}",
            line={"color": color, "width": 2},
            legend="legend2",
            row=2,
            col=2,
            hovertemplate="%{x} periods later: %{y:.3g} of the first change<extra>" + name + "</extra>",
        )
    change = powers("change of the last hidden state, over the first")
    axes(fig, 2, 2, x={"title_text": "periods after the disturbed one", "dtick": 1}, y=change)


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
    p, at = result.picture, result.shown
    titles = (
        "Mean over the heads",
        f"Each head, eta {result.etas[at]:g}",
        f"Layer {p.layer}, head {p.head}, first {len(p.words)} tokens: heaviest {p.eta:.0%} of the lines",
    )
    fig = panels(titles, [0.3, 0.3, 0.4], spacing=0.1)
    _curves(fig, result, _WEIGHTS, 0.9)
    axes(fig, y=shares("share") | {"rangemode": "tozero"})
    _heads(
        fig,
        result,
        2,
        lambda h: (h.mass[at], h.random_mass[at], h.cells[at], h.vertical[at]),
        "%{z:.1%}<br>random lines %{customdata[1]:.1%}, cells %{customdata[2]:.1%}, vertical %{customdata[3]:.0%} of "
        "the lines",
        colorbar={"title": {"text": "mass"}, "tickformat": ".0%", "x": 0.585, "thickness": 12},
    )
    _attention_map(fig, p)
    legend = {"y": -0.14, "x": 0, "xanchor": "left"}
    return finished(fig, result, width=1500, height=600, legend=legend)


def draw_overlap(result: Any) -> go.Figure:
    """Draw the overlap of lines by eta and by head; below, which queries find the tokens that answers attend to."""
    t, eta = result.tokens, result.etas[0]
    titles = ["Lines, mean over the heads", f"Between inputs, eta {eta:g}", f"First half in second, eta {eta:g}"]
    if t is not None:
        titles += ["Question's place: found by the last window", "Found by a block of queries", "Blocks of an answer"]
    rows = 1 if t is None else 2
    fig = panels(titles, rows=rows, cols=3, vertical_spacing=0.16, column_widths=[0.36, 0.32, 0.32])
    _curves(fig, result, _OVERLAPS, 0.5)
    axes(fig, y=shares("lines shared", 0, 1))
    place = {"len": 1.0, "y": 0.5} if t is None else {"len": 0.4, "y": 0.8}
    for col, field in ((2, "inputs"), (3, "segments")):
        bar = {"showscale": col == 3, "colorbar": {"tickformat": ".0%", "thickness": 12, **place}}
        _heads(fig, result, col, lambda h, field=field: (getattr(h, field)[0],), "%{z:.1%}", **bar)
    if t is not None:
        _found(fig, t)
    legend = {"y": -0.25 / rows + 0.02, "x": 0, "xanchor": "left"}
    height = 500 * rows + 100
    return finished(fig, result, width=1500, height=height, legend=legend, bottom=120, barmode="group")


def _curves(fig: Any, result: Any, series: Iterable[tuple[str, str, str, str]], at: float) -> None:
    for name, field, color, dash in series:
        line = {"color": color, "dash": dash}
        hover = "eta %{x}: %{y:.1%}<extra>" + name + "</extra>"
        y = list(getattr(result, field))
        fig.add_scatter(
            x=list(result.etas), y=y, name=name, mode="lines+markers", row=1, col=1, line=line, hovertemplate=hover
        )
    level(fig, at)
    axes(fig, x={"title_text": "share of all lines chosen (eta)", "rangemode": "tozero"})


def _heads(fig: Any, result: Any, col: int, numbers: Any, hover: str, **settings: Any) -> None:
    """A map, layer by head; the first of a head's `numbers` is its colour."""
    cells = {(h.layer, h.head): numbers(h) for h in result.heads}
    layers, heads = (sorted({key[i] for key in cells}) for i in (0, 1))
    grid = [[cells[layer, h] for h in heads] for layer in layers]
    style = {"zmin": 0, "zmax": 1, "colorscale": "Viridis", "row": 1, "col": col} | settings
    fig.add_heatmap(
        x=heads,
        y=layers,
        z=[[cell[0] for cell in row] for row in grid],
        customdata=grid,
        hovertemplate=f"layer %{{y}}, head %{{x}}: {hover}<extra></extra>",
        **style,
    )
    axes(fig, 1, col, x=counted("head", len(heads), 8), y=by_layer(len(layers)))


def _attention_map(fig: Any, p: Any) -> None:
    values, n = p.values(), len(p.words)
    words = [html.escape(repr(word)) for word in p.words]
    fig.add_heatmap(
        z=[[math.sqrt(v) if k <= q else None for k, v in enumerate(row)] for q, row in enumerate(values)],
        customdata=[[[words[q], words[k], v] for k, v in enumerate(row)] for q, row in enumerate(values)],
        colorscale="Greys",
        showscale=False,
        zmin=0,
        zmax=1,
        row=1,
        col=3,
        hovertemplate="%{customdata[0]} (%{y}) looks at %{customdata[1]} (%{x}): %{customdata[2]:.3f}<extra></extra>",
    )
    for name, color, ends in (
        ("vertical line", BLUE, [((b, b), (b, n - 1)) for b in p.vertical]),
        ("slash line", ORANGE, [((0, o), (n - 1 - o, n - 1)) for o in p.slash]),
    ):
        fig.add_scatter(
            x=[x for start, stop in ends for x in (start[0], stop[0], None)],
            y=[y for start, stop in ends for y in (start[1], stop[1], None)],
            mode="lines",
            name=name,
            line={"color": color, "width": 2},
            opacity=0.5,
            hoverinfo="skip",
            row=1,
            col=3,
        )
    key = {"title_text": "key position", "range": [-0.5, n - 0.5]}
    axes(fig, 1, 3, x=key, y={"title_text": "query position", "range": [n - 0.5, -0.5]})


def _found(fig: Any, t: Any) -> None:
    """The second row of `draw_overlap`, with a colour for each budget."""
    own = [b for b in t.blocks if b.block >= 0 and b.apart is not None]
    curves = (
        (2, "block", "", [b.block for b in t.blocks], [b.overlap for b in t.blocks]),
        (2, "block", "dash", [b.block for b in own], [b.apart for b in own]),
        (3, "", "", [d.blocks for d in t.distances], [d.overlap for d in t.distances]),
    )
    for i, budget in enumerate(t.budgets):
        color, tokens = (GREEN, ORANGE, BLUE, RED, GREY)[i % 5], f"{budget:.0%} of the tokens"
        fig.add_bar(
            x=[html.escape(at_place(p.position)) for p in t.positions],
            y=[p.overlap[i] for p in t.positions],
            name=tokens,
            marker_color=color,
            row=2,
            col=1,
            hovertemplate="%{x}: %{y:.1%}<extra>" + tokens + "</extra>",
        )
        level(fig, t.random[i], 2, 1, color=color)
        for col, before, dash, x, values in curves:
            where = "block %{x}" if before else "%{x} apart"
            fig.add_scatter(
                x=x,
                y=[value[i] for value in values],
                line={"color": color, "dash": dash or "solid"},
                mode="lines+markers",
                showlegend=False,
                hovertemplate=f"{where}: %{{y:.1%}}<extra>{tokens}</extra>",
                row=2,
                col=col,
            )
    if own:
        fig.add_vline(-0.5, line={"color": GREY, "dash": "dot", "width": 1}, row=2, col=2)
    for col, x, y in (
        (1, "question (dotted: random tokens)", "important tokens found"),
        (2, "block (0: first of the answer; dashed: without its own queries)", "important tokens found"),
        (3, f"blocks of {t.window} queries apart", "important tokens shared"),
    ):
        axes(fig, 2, col, x={"title_text": x, "dtick": 1 if col == 3 else None}, y=shares(y, 0, 1))
