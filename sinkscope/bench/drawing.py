"""The drawings of the benchmarks: loops and survival for LoopBench, scores and fidelity for dialogues."""

from __future__ import annotations

import html
import math
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import plotly.graph_objects as go

from sinkscope.bench.dialogues.form import POSITIONS
from sinkscope.bench.dialogues.tables import overall
from sinkscope.bench.loopbench import paper
from sinkscope.bench.loopbench.tables import title
from sinkscope.bench.methods import METHODS, block_of, name_of
from sinkscope.loops.signals import THETA_TTR
from sinkscope.measure.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    RED,
    at_place,
    axes,
    finished,
    intervals,
    level,
    panels,
    powers,
    shares,
)

_COLOURS = (BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", "#000000", GREY)
_BESIDE = {"orientation": "v", "x": 1.01, "y": 1, "xanchor": "left"}  # the legend
_LOOP = ("loop", "loop_low", "loop_high")
_BINS = 25  # of intervention positions over the cap: 100 tokens of 2,500


def draw_shown(result: Any) -> go.Figure:
    """Type-token ratio of the last window over the steps; triangles mark interventions, a circle marks the end."""
    fig = panels([""])
    for i, o in enumerate(result.outputs):
        colour = _COLOURS[i % (len(_COLOURS) - 1)]
        near = [min(range(len(o.steps)), key=lambda k, at=at: abs(o.steps[k] - at)) for at in o.interventions]
        fig.add_scatter(
            x=o.steps,
            y=o.window_ttr,
            mode="lines",
            name=f"{html.escape(o.method)} ({o.ended})",
            line={"color": colour},
            legendgroup=o.method,
            hovertemplate="%{x}: %{y:.3f}<extra>%{fullData.name}</extra>",
        )
        for x, y, symbol, size, hover in (
            ([o.steps[-1]], [o.window_ttr[-1]], "circle", 8, f"{o.ended} after %{{x}}"),
            (list(o.interventions), [o.window_ttr[k] for k in near], "triangle-down", 10, "intervention at %{x}"),
        ):
            if x:
                fig.add_scatter(
                    x=x,
                    y=y,
                    mode="markers",
                    marker={"color": colour, "size": size, "symbol": symbol},
                    legendgroup=o.method,
                    showlegend=False,
                    hovertemplate=f"{hover}<extra></extra>",
                )
    level(fig, THETA_TTR, color=GREY)
    ratio = {"title_text": "type-token ratio", "range": [0, 1.02]}
    axes(fig, x={"title_text": "new tokens", "rangemode": "tozero"}, y=ratio)
    found = f"prompt {result.prompt}: diversity of the last window (triangles: interventions)"
    return finished(fig, result, found, width=1100, height=520, top=70, bottom=60, legend=_BESIDE)


def draw_loopbench(result: Any) -> go.Figure:
    """Draw each method's loop rate next to the paper's, the share of runs not collapsed, and the interventions.

    Temperatures and the loop organism get additional panels if they were run.
    """
    guards = [g for g in result.ablation if g.counts]
    methods = list(dict.fromkeys(g.method for g in (*result.groups, *result.ablation, *result.planted)))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(methods)}
    some, both = bool(result.groups or not result.planted), len({g.model for g in guards}) > 1
    every: list[tuple[Any, str, Callable[..., None]]] = [
        (some, "Loop rate (diamond: the paper's)", _rates),
        (result.ablation, "Runs that have not collapsed, both sets", _survival),
        (guards, "Interventions per run", partial(_interventions, guards, both, _counts, "interventions")),
        (guards, "Where they were", partial(_interventions, guards, both, _places, "new tokens")),
        (any(g.temperature for g in result.groups), "Loop rate over temperature", _temperatures),
        (result.planted, "Loop organism: loops that go on to the end", _planted),
    ]
    wanted = [(name, drawn) for there, name, drawn in every if there]
    rows = -(-len(wanted) // 2)
    fig = panels([name for name, _ in wanted], rows=rows, cols=2, vertical_spacing=0.24 / rows**0.5, spacing=0.08)
    for i, (_, drawn) in enumerate(wanted):
        drawn(fig, result, colours, {"row": i // 2 + 1, "col": i % 2 + 1})
    if not result.groups and not result.planted:
        fig.add_annotation(text="nothing was run", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    more: dict[str, Any] = {"legend": _BESIDE, "bottom": 90, "barmode": "group", "bargap": 0.1}
    return finished(fig, result, "LoopBench", width=1400, height=140 + 380 * rows, **more)


def _rates(fig: Any, result: Any, _colours: dict[str, str], at: dict[str, int]) -> None:
    """A bar per method, a colour per set and model; samplers and stoppers beside the rest."""
    greedy = [g for g in result.groups if not g.temperature]
    for i, (bench, model) in enumerate(dict.fromkeys((g.bench, g.model) for g in greedy)):
        mine = [g for g in greedy if (g.bench, g.model) == (bench, model)]
        name, colour = f"{html.escape(title(bench))}, {html.escape(model)}", _COLOURS[i % len(_COLOURS)]
        fig.add_bar(
            x=[html.escape(g.method) for g in mine],
            y=[g.loop for g in mine],
            name=name,
            legendgroup="rates",
            marker_color=colour,
            opacity=0.75,
            error_y=intervals(mine, *_LOOP),
            hovertemplate="%{x}: %{y:.1%}<extra></extra>",
            **at,
        )
        published = paper.TABLE1.get((bench, paper.published_model(model) or ""), {})
        known = {g.method: published[g.method][3] for g in mine if g.method in published}
        if known:
            fig.add_scatter(
                x=[*known],
                y=[*known.values()],
                mode="markers",
                name=f"paper, {name}",
                marker={"symbol": "diamond", "size": 9, "color": colour, "line": {"width": 1, "color": "#000000"}},
                **at,
            )
    axes(fig, **at, x={"tickangle": -35}, y=shares("share of runs", 0, 1.05))


def _planted(fig: Any, result: Any, colours: dict[str, str], at: dict[str, int]) -> None:
    """A bar per method of the loop organism."""
    fig.add_bar(
        x=[html.escape(p.method) for p in result.planted],
        y=[p.loop for p in result.planted],
        name="loop organism",
        marker_color=[colours[p.method] for p in result.planted],
        showlegend=False,
        error_y=intervals(result.planted, *_LOOP),
        hovertemplate="%{x}: %{y:.1%}<extra></extra>",
        **at,
    )
    axes(fig, **at, x={"tickangle": -35}, y=shares("share of runs", 0, 1.05))


def _temperatures(fig: Any, result: Any, colours: dict[str, str], at: dict[str, int]) -> None:
    """A line per method, set and model, over the temperatures that were run."""
    for i, (bench, model) in enumerate(dict.fromkeys((g.bench, g.model) for g in result.groups)):
        for method, colour in colours.items():
            mine = [g for g in result.groups if (g.bench, g.model, g.method) == (bench, model, method)]
            if len(mine) > 1:
                fig.add_scatter(
                    x=[g.temperature for g in mine],
                    y=[g.loop for g in mine],
                    mode="lines+markers",
                    line={"color": colour, "dash": ("solid", "dash", "dot")[i % 3]},
                    name=", ".join(map(html.escape, (method, title(bench), model))),
                    error_y=intervals(mine, *_LOOP),
                    hovertemplate="%{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
                    **at,
                )
    axes(fig, **at, x="temperature", y=shares("share of runs", 0, 1.05))


def _survival(fig: Any, result: Any, colours: dict[str, str], at: dict[str, int]) -> None:
    """A line per method, both sets joined; of several models only the full cache, a line per model (Fig. 2 b)."""
    models = list(dict.fromkeys(g.model for g in result.ablation))
    several = len(models) > 1
    for g in result.ablation:
        if g.method != "full" if several else block_of(g.method) == "stopper":
            continue  # runs that are stopped early never collapse
        colour = _COLOURS[models.index(g.model) % len(_COLOURS)] if several else colours[g.method]
        width = max(1.5, 9 - 2 * sum(isinstance(trace, go.Scatter) for trace in fig.data))  # curves can coincide
        fig.add_scatter(
            x=[0, *g.steps],
            y=[1.0, *g.survival],
            mode="lines",
            line={"color": colour, "shape": "hv", "width": width},
            name=html.escape(g.model) if several else g.method,
            hovertemplate="%{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
            **at,
        )
    axes(fig, **at, x="new tokens", y=shares("share of runs", 0, 1.05))


def _interventions(
    guards: Sequence[Any],
    several: bool,
    bars: Callable[[Any], tuple[dict[Any, float], str]],
    below: str,
    fig: Any,
    _result: Any,
    colours: dict[str, str],
    at: dict[str, int],
) -> None:
    """How many interventions a run had, or where they were, both sets together (Fig. 4 a, b)."""
    for g in guards:
        name, (found, over) = f"{g.method}, {html.escape(g.model)}" if several else g.method, bars(g)
        fig.add_bar(
            x=[*found],
            y=[*found.values()],
            name=name,
            legendgroup=name,
            marker_color=colours[g.method],
            showlegend=False,
            hovertemplate=f"{over}<extra></extra>",
            **at,
        )
    whole = bars is _counts and max(max(g.counts) for g in guards) < 12
    of = "runs" if bars is _counts else "interventions"
    axes(fig, **at, x={"title_text": below, "dtick": 1 if whole else None}, y=shares(f"share of {of}"))


def _counts(g: Any) -> tuple[dict[Any, float], str]:
    counted = Counter(g.counts)
    found = {i: counted[i] / len(g.counts) for i in range(max(g.counts) + 1)}
    return found, "%{x}: %{y:.1%} of the runs"


def _places(g: Any) -> tuple[dict[Any, float], str]:
    width = max(1, g.steps[-1] // _BINS)
    bins = Counter(step // width for step in g.positions)
    starts = range(g.steps[-1] // width + 1 if g.positions else 0)
    found = {width * (i + 0.5): bins[i] / len(g.positions) for i in starts}
    return found, "around %{x}: %{y:.1%} of the interventions"


_PANELS = (
    ("kl", "KL(full || method), nats a token", BLUE, ".3g"),
    ("agree", "same likeliest token", ORANGE, ".1%"),
    ("kept", "attention mass kept", GREEN, ".1%"),
)


def draw_fidelity(result: Any) -> go.Figure:
    """Draw divergence, top-1 agreement and attention mass kept for each method; one row per task and model."""
    rows = [overall(part) for part in result.parts()]
    titles = [
        (f"{html.escape(mine[0].title)}<br>" if field == "kl" else "") + name
        for mine in rows
        for field, name, _, _ in _PANELS
    ]
    heights = [len(mine) + 3 for mine in rows]
    fig = panels(
        titles,
        rows=len(rows),
        cols=3,
        spacing=0.04,
        shared_yaxes=True,
        vertical_spacing=min(0.3, 4 / (sum(heights) + 4)),
        row_heights=heights,
    )
    for row, mine in enumerate(rows, 1):
        nats = _nats(mine)
        for col, (field, name, colour, form) in enumerate(_PANELS, 1):
            least = 10.0 ** nats["range"][0] if field == "kl" else 0.0  # 0 does not exist on a logarithmic axis
            fig.add_bar(
                y=[html.escape(g.label) for g in mine],
                x=[None if (value := getattr(g, field)) is None else max(value, least) for g in mine],
                name=name,
                orientation="h",
                marker_color=colour,
                showlegend=False,
                text=[_text(g, field, form) for g in mine],
                textposition="outside",
                cliponaxis=False,
                customdata=[(g.tokens, g.questions) for g in mine],
                hovertemplate="%{y}: %{text}<br>%{customdata[0]} tokens of %{customdata[1]} answers<extra></extra>",
                row=row,
                col=col,
            )
            axes(fig, row, col, x=nats if field == "kl" else shares(None, 0, 1.15), y={"autorange": "reversed"})
    told = "beside full attention, along the same text"
    margin = {"l": 20, "r": 50, "t": 110, "b": 50}
    return finished(fig, result, told, width=1300, height=130 + 30 * sum(heights), margin=margin)


def _nats(groups: Sequence[Any]) -> dict[str, Any]:
    """The axis of a divergence: logarithmic, because a method can lose a thousand times as much as another."""
    low, high = min((g.kl for g in groups if g.kl > 0), default=1.0), max([g.kl for g in groups] or [1.0])
    low, high = math.floor(math.log10(low)), math.log10(high or 1.0)
    every = math.ceil((high - low) / 5)
    ticks = {"tickvals": [10.0**n for n in range(low, math.ceil(high) + 1, every)]}
    return powers() | ticks | {"range": [low, high + 0.6 * (high - low) + 0.1]}  # with room for the numbers


def _text(group: Any, field: str, form: str) -> str:
    value = getattr(group, field)
    error = f" ± {1.96 * group.kl_error:.2g}" if field == "kl" and group.kl_error else ""
    return "-" if value is None else f"{value:{form}}{error}"


def draw_positions(result: Any) -> go.Figure:
    """Draw one bar per position of the question, and a diamond for LoopServe's Table 5."""
    there = [share for share in result.places if share.share is not None]
    fig = panels([""])
    fig.add_bar(
        x=[html.escape(at_place(share.position)) for share in there],
        y=[share.share for share in there],
        name="this log",
        marker_color=BLUE,
        customdata=[share.count for share in there],
        error_y=intervals(there),
        hovertemplate="%{x}: %{y:.1%}, %{customdata} messages<extra></extra>",
    )
    fig.add_scatter(
        x=[html.escape(at_place(share.position)) for share in result.places],
        y=[share.paper_share for share in result.places],
        mode="markers",
        name="paper: LMSYS-Chat-1M",
        marker={"color": GREY, "size": 11, "symbol": "diamond"},
        customdata=[s.paper_count for s in result.places],
        hovertemplate="%{x}, paper: %{y:.1%}, %{customdata} messages<extra></extra>",
    )
    axes(fig, y=shares("share of messages", 0, 1.03))
    return finished(fig, result, "where questions stand", width=800, height=460, top=70, bottom=50, legend=_BESIDE)


_PLACES: dict[str, str] = dict(zip(POSITIONS, (BLUE, ORANGE, GREEN), strict=True))
_DOTS = (
    *("#000000", GREY, RED, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", "#b8a000", "#00a08a", "#882255"),
    *("#3f6f2a", "#1f4fd8", "#ff7f6b", "#9a6bff", "#5c8a8a"),
)
_SYMBOLS = ("diamond", "circle", "square", "cross", "x", "triangle-up", "star")


def draw_dialogues(result: Any) -> go.Figure:
    """One row per task, model, history and cache: bars with 95 % intervals; score against tokens read."""
    parts = result.parts()
    titles = [t for mine in parts for t in (f"{html.escape(mine[0].title)}: score", "Score over tokens read per step")]
    fig = panels(titles, [0.62, 0.38], rows=len(parts), cols=2, spacing=0.08, vertical_spacing=0.3 / len(parts))
    dots = _dots([g.method for g in result.groups])
    for row, mine in enumerate(parts, 1):
        for place, colour in _PLACES.items():
            if bars := [g for g in mine if g.position == place]:
                fig.add_bar(
                    x=[html.escape(g.label) for g in bars],
                    y=[g.score for g in bars],
                    name=f"question at {place}",
                    legendgroup=place,
                    showlegend=row == 1,
                    marker_color=colour,
                    error_y=intervals(bars, "score"),
                    customdata=[g.questions for g in bars],
                    hovertemplate="%{x}: %{y:.1%} of %{customdata}<extra></extra>",
                    row=row,
                    col=1,
                )
        for g in (g for g in overall(mine) if g.read is not None):
            fig.add_scatter(
                x=[g.read],
                y=[g.score],
                mode="markers",
                name=html.escape(g.method),
                legendgroup=g.method,
                showlegend=not any(trace.legendgroup == g.method for trace in fig.data),
                text=[html.escape(g.label)],
                marker=dots[g.method],
                hovertemplate="%{text}: %{y:.1%} at %{x:.4g} tokens<extra></extra>",
                row=row,
                col=2,
            )
        names = list(dict.fromkeys(html.escape(g.label) for g in mine))
        axes(fig, row, 1, x={"categoryorder": "array", "categoryarray": names})
        axes(fig, row, 2, x="tokens read per decoding step")
        axes(fig, row, None, y=shares(None, -0.05, 1.08))
    entries = {trace.legendgroup for trace in fig.data} | {*POSITIONS}
    height = max(130 + 380 * len(parts), 200 + 31 * len(entries))
    told = "scores by position of the question"
    return finished(fig, result, told, width=1300, height=height, legend=_BESIDE, bottom=90, barmode="group")


def _dots(methods: list[str]) -> dict[str, dict[str, Any]]:
    """A colour for every method, a symbol for every way it is set; later ones are smaller, so that none is covered."""
    kinds: dict[str, list[str]] = {name: [] for name in METHODS}
    for method in dict.fromkeys(methods):
        kinds.setdefault(name_of(method), []).append(method)
    shown = [(i, k, method) for i, kind in enumerate(kinds.values()) for k, method in enumerate(kind)]
    sizes = {method: 20 - 12 * n / len(shown) for n, (_, _, method) in enumerate(shown)}
    return {
        method: {"color": _DOTS[i % len(_DOTS)], "size": sizes[method], "symbol": _SYMBOLS[k % len(_SYMBOLS)]}
        for i, k, method in shown
    }


def draw_needle(result: Any) -> go.Figure:
    """Draw accuracy by depth and length of the prompt, one map for each task (rows) and method (columns)."""
    methods, tasks = result.methods(), list(dict.fromkeys(g.task for g in result.groups))
    titles = [f"{html.escape(name).replace(':', '<br>')}<br>{result.mean(name):.0%}" for name in methods]
    shared: dict[str, Any] = {"shared_xaxes": True, "shared_yaxes": True, "vertical_spacing": 0.1 / len(tasks)}
    fig = panels(
        titles,
        rows=len(tasks),
        cols=len(methods),
        spacing=0.06 / len(methods),
        row_titles=[*map(html.escape, tasks)],
        **shared,
    )
    for row, task in enumerate(tasks, 1):
        for col, method in enumerate(methods, 1):
            mine = [c for c in result.cells if (c.method, c.task) == (method, task)]
            fig.add_heatmap(
                x=[f"{c.length:,}" for c in mine],
                y=[f"{c.depth:.0%}" for c in mine],
                z=[c.score for c in mine],
                coloraxis="coloraxis",
                xgap=1,
                ygap=1,
                hovertemplate="%{x} tokens, depth %{y}: %{z:.0%}<extra></extra>",
                row=row,
                col=col,
            )
    fig.update_yaxes(autorange="reversed", type="category")
    fig.update_xaxes(type="category", tickangle=90)
    axes(fig, None, 1, y="depth")
    axes(fig, len(tasks), (len(methods) + 1) // 2, x="prompt tokens")
    scale = [[0.0, RED], [0.5, "#f7f3e8"], [1.0, BLUE]]
    bar = {"title": "score", "tickformat": ".0%", "thickness": 14, "len": 0.8}
    wide = 240 + 80 * len(methods)
    colours = {"colorscale": scale, "cmin": 0, "cmax": 1, "colorbar": bar}
    top = 75 + 18 * max(title.count("<br>") for title in titles)
    size: dict[str, Any] = {"width": wide, "height": top + 80 + 85 * len(tasks), "top": top, "bottom": 80}
    fig = finished(fig, None, result.conclusion(), coloraxis=colours, font={"size": 11}, **size)
    return fig.update_annotations(font_size=13)
