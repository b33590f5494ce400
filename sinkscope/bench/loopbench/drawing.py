"""The drawing of LoopBench's tables: loop rates, survival, and when a guard intervened (Figs. 2 b and 4)."""

from __future__ import annotations

import html
from collections import Counter
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.bench.loopbench import paper
from sinkscope.bench.loopbench.tables import title
from sinkscope.bench.methods import block_of
from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED
from sinkscope.loops.signals import THETA_TTR

_LINES = (BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", "#000000")


def draw_shown(result: Any) -> go.Figure:
    """Type-token ratio of the last window over the steps; interventions as triangles, the end as a circle."""
    fig = go.Figure()
    for i, o in enumerate(result.outputs):
        colour = _LINES[i % len(_LINES)]
        fig.add_scatter(
            x=o.steps,
            y=o.window_ttr,
            mode="lines",
            name=f"{html.escape(o.method)} ({o.ended})",
            line={"color": colour},
            legendgroup=o.method,
            hovertemplate="%{x}: %{y:.3f}<extra>%{fullData.name}</extra>",
        )
        fig.add_scatter(
            x=[o.steps[-1]],
            y=[o.window_ttr[-1]],
            mode="markers",
            marker={"color": colour, "size": 8},
            legendgroup=o.method,
            showlegend=False,
            hovertemplate=f"{o.ended} after %{{x}}<extra></extra>",
        )
        near = [min(range(len(o.steps)), key=lambda k, at=at: abs(o.steps[k] - at)) for at in o.interventions]
        if near:
            fig.add_scatter(
                x=list(o.interventions),
                y=[o.window_ttr[k] for k in near],
                mode="markers",
                legendgroup=o.method,
                marker={"color": colour, "size": 10, "symbol": "triangle-down"},
                showlegend=False,
                hovertemplate="intervention at %{x}<extra></extra>",
            )
    fig.add_hline(THETA_TTR, line={"color": GREY, "dash": "dot", "width": 1})
    fig.update_layout(
        title={
            "text": f"{html.escape(result.model.name)}, prompt {html.escape(result.prompt)}: diversity of the last "
            "window (triangles: interventions)",
            "x": 0.01,
            "xanchor": "left",
        },
        template="plotly_white",
        width=1100,
        height=520,
        margin={"l": 70, "r": 20, "t": 70, "b": 60},
        font={"size": 13},
        xaxis={"title": "new tokens", "rangemode": "tozero"},
        yaxis={"title": "type-token ratio", "range": [0, 1.02]},
    )
    return fig


_COLOURS = (BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", "#000000", GREY)
_BINS = 25  # of intervention positions over the cap: 100 tokens of 2,500


def draw(result: Any) -> go.Figure:
    """Loop rate by method with the paper's beside it; survival; counts and positions of interventions."""
    guards = [g for g in result.ablation if g.counts]
    titles = ["Loop rate (diamond: the paper's)", "Runs that have not collapsed, both sets"]
    if guards:
        titles += ["Interventions per run", "Where they were"]
    fig = make_subplots(
        rows=len(titles) // 2, cols=2, subplot_titles=titles, vertical_spacing=0.22, horizontal_spacing=0.08
    )
    methods = list(dict.fromkeys(g.method for g in (*result.groups, *result.ablation)))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(methods)}
    _rates(fig, result)
    _survival(fig, result, colours)
    for g in guards:
        _interventions(fig, g, colours[g.method], len({other.model for other in guards}) > 1)
    if not result.groups:
        fig.add_annotation(text="nothing was run", x=0.5, y=0.5, xref="paper", yref="paper", showarrow=False)
    fig.update_layout(
        title={"text": f"LoopBench: {html.escape(result.model.name)}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400,
        height=900 if guards else 520,
        margin={"l": 70, "r": 20, "t": 90, "b": 90},
        font={"size": 13},
        barmode="group",
        bargap=0.1,
        legend={"x": 1.01, "y": 1},
    )
    return fig


def _rates(fig: Any, result: Any) -> None:
    """A bar per method, a colour per set and model; samplers and stoppers beside the rest."""
    pairs = list(dict.fromkeys((g.bench, g.model) for g in result.groups))
    for i, (bench, model) in enumerate(pairs):
        mine = [g for g in result.groups if (g.bench, g.model) == (bench, model)]
        fig.add_bar(
            x=[html.escape(g.method) for g in mine],
            y=[g.loop for g in mine],
            name=_label(bench, model),
            legendgroup="rates",
            marker_color=_COLOURS[i % len(_COLOURS)],
            opacity=0.75,
            error_y={
                "type": "data",
                "symmetric": False,
                "thickness": 1,
                "array": [g.loop_high - g.loop for g in mine],
                "arrayminus": [g.loop - g.loop_low for g in mine],
            },
            hovertemplate="%{x}: %{y:.1%}<extra></extra>",
            row=1,
            col=1,
        )
        published = paper.TABLE1.get((bench, paper.published_model(model) or ""), {})
        known = [g.method for g in mine if g.method in published]
        if known:
            fig.add_scatter(
                x=known,
                y=[published[name][3] for name in known],
                mode="markers",
                name=f"paper, {_label(bench, model)}",
                marker={
                    "symbol": "diamond",
                    "size": 9,
                    "color": _COLOURS[i % len(_COLOURS)],
                    "line": {"width": 1, "color": "#000000"},
                },
                row=1,
                col=1,
            )
    fig.update_xaxes(tickangle=-35, row=1, col=1)
    fig.update_yaxes(title_text="share of runs", tickformat=".0%", range=[0, 1.05], row=1, col=1)


def _survival(fig: Any, result: Any, colours: dict[str, str]) -> None:
    """A line per method, both sets joined; of several models only the full cache, a line per model (Fig. 2 b)."""
    models = list(dict.fromkeys(g.model for g in result.ablation))
    for g in result.ablation:
        if (g.method != "full") if len(models) > 1 else block_of(g.method) == "stopper":
            continue  # whoever is stopped early never collapses
        colour = _COLOURS[models.index(g.model) % len(_COLOURS)] if len(models) > 1 else colours[g.method]
        fig.add_scatter(
            x=[0, *g.steps],
            y=[1.0, *g.survival],
            mode="lines",
            line={"color": colour, "shape": "hv"},
            name=html.escape(g.model) if len(models) > 1 else g.method,
            hovertemplate="%{x}: %{y:.1%}<extra>%{fullData.name}</extra>",
            row=1,
            col=2,
        )
    fig.update_xaxes(title_text="new tokens", row=1, col=2)
    fig.update_yaxes(title_text="share of runs", tickformat=".0%", range=[0, 1.05], row=1, col=2)


def _interventions(fig: Any, g: Any, colour: str, several: bool) -> None:
    """Both distributions of Fig. 4, of both sets together."""
    name = f"{g.method}, {html.escape(g.model)}" if several else g.method
    style = {"name": name, "legendgroup": name, "marker_color": colour}
    counted = Counter(g.counts)
    fig.add_bar(
        x=list(range(max(g.counts) + 1)),
        y=[counted[i] / len(g.counts) for i in range(max(g.counts) + 1)],
        hovertemplate="%{x}: %{y:.1%} of the runs<extra></extra>",
        row=2,
        col=1,
        showlegend=False,
        **style,
    )
    fig.update_xaxes(title_text="interventions", dtick=1 if max(g.counts) < 12 else None, row=2, col=1)
    fig.update_yaxes(title_text="share of runs", tickformat=".0%", row=2, col=1)
    if g.positions:
        width = max(1, g.steps[-1] // _BINS)
        bins = Counter(step // width for step in g.positions)
        starts = range(g.steps[-1] // width + 1)
        fig.add_bar(
            x=[width * (i + 0.5) for i in starts],
            y=[bins[i] / len(g.positions) for i in starts],
            showlegend=False,
            hovertemplate="around %{x}: %{y:.1%} of the interventions<extra></extra>",
            row=2,
            col=2,
            **style,
        )
    fig.update_xaxes(title_text="new tokens", row=2, col=2)
    fig.update_yaxes(title_text="share of interventions", tickformat=".0%", row=2, col=2)


def _label(bench: str, model: str) -> str:
    return f"{html.escape(title(bench))}, {html.escape(model)}"
