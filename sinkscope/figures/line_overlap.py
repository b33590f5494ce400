"""The drawing of `line_overlap`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED

_SERIES = (
    ("between inputs", "inputs", BLUE, "solid"),
    ("with i = j (paper)", "inputs_paper", BLUE, "dash"),
    ("between inputs, random lines", "inputs_random", BLUE, "dot"),
    ("first half in second", "segments", ORANGE, "solid"),
    ("within each half", "segments_relative", ORANGE, "dash"),
    ("halves, random lines", "segments_random", ORANGE, "dot"),
)


def draw(result: Any) -> go.Figure:
    """Overlap of lines against eta and by head; below, who finds the tokens that answers attend to."""
    t, eta = result.tokens, result.etas[0]
    titles = ["Lines, mean over the heads", f"Between inputs, eta {eta:g}", f"First half in second, eta {eta:g}"]
    if t is not None:
        titles += ["Question's place: found by the last window", "Found by a block of queries", "Blocks of an answer"]
    rows = 1 if t is None else 2
    fig: Any = make_subplots(
        rows=rows,
        cols=3,
        subplot_titles=titles,
        horizontal_spacing=0.09,
        vertical_spacing=0.16,
        column_widths=[0.36, 0.32, 0.32],
    )
    for name, field, color, dash in _SERIES:
        fig.add_scatter(
            x=list(result.etas),
            y=list(getattr(result, field)),
            name=name,
            mode="lines+markers",
            row=1,
            col=1,
            line={"color": color, "dash": dash},
            hovertemplate="eta %{x}: %{y:.1%}<extra>" + name + "</extra>",
        )
    fig.add_hline(0.5, line={"color": RED, "dash": "dot", "width": 1}, row=1, col=1)
    fig.update_xaxes(title_text="share of all lines chosen (eta)", row=1, col=1)
    fig.update_yaxes(title_text="lines shared", tickformat=".0%", range=[0, 1], row=1, col=1)
    _heads(fig, result, "inputs", 2)
    _heads(fig, result, "segments", 3)
    if t is not None:
        _positions(fig, t)
        _blocks(fig, t)
        _distances(fig, t)
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: how far heavy lines agree", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1500,
        height=500 * rows + 100,
        margin={"l": 70, "r": 20, "t": 90, "b": 120},
        font={"size": 13},
        barmode="group",
        legend={"orientation": "h", "y": -0.25 / rows + 0.02, "x": 0, "xanchor": "left", "yanchor": "top"},
    )
    return fig


def _heads(fig: Any, result: Any, field: str, col: int) -> None:
    cells = {(h.layer, h.head): getattr(h, field)[0] for h in result.heads}
    layers, heads = (sorted({key[i] for key in cells}) for i in (0, 1))
    fig.add_heatmap(
        x=heads,
        y=layers,
        z=[[cells[layer, h] for h in heads] for layer in layers],
        zmin=0,
        zmax=1,
        colorscale="Viridis",
        showscale=col == 3,
        hovertemplate="layer %{y}, head %{x}: %{z:.1%}<extra></extra>",
        colorbar={
            "tickformat": ".0%",
            "thickness": 12,
            "len": 1.0 if result.tokens is None else 0.4,
            "y": 0.5 if result.tokens is None else 0.8,
        },
        row=1,
        col=col,
    )
    fig.update_xaxes(title_text="head", dtick=max(1, len(heads) // 8), row=1, col=col)
    fig.update_yaxes(title_text="layer", dtick=max(1, len(layers) // 16), autorange="reversed", row=1, col=col)


def _positions(fig: Any, t: Any) -> None:
    for budget, color, values in _by_budget(t, [p.overlap for p in t.positions]):
        fig.add_bar(
            x=[html.escape(p.position) for p in t.positions],
            y=values,
            name=f"{budget:.0%} of the tokens",
            marker_color=color,
            row=2,
            col=1,
            hovertemplate="%{x}: %{y:.1%}<extra>" + f"{budget:.0%} of the tokens</extra>",
        )
    for _, color, values in _by_budget(t, [t.random]):
        fig.add_hline(values[0], line={"color": color, "dash": "dot", "width": 1}, row=2, col=1)
    fig.update_yaxes(title_text="important tokens found", tickformat=".0%", range=[0, 1], row=2, col=1)
    fig.update_xaxes(title_text="place of the question (dotted: random tokens)", row=2, col=1)


def _blocks(fig: Any, t: Any) -> None:
    for budget, color, values in _by_budget(t, [b.overlap for b in t.blocks]):
        fig.add_scatter(
            x=[b.block for b in t.blocks],
            y=values,
            line={"color": color},
            mode="lines+markers",
            showlegend=False,
            hovertemplate="block %{x}: %{y:.1%}<extra>" + f"{budget:.0%} of the tokens</extra>",
            row=2,
            col=2,
        )
    own = [b for b in t.blocks if b.block >= 0 and b.apart is not None]
    for budget, color, values in _by_budget(t, [b.apart for b in own]):
        fig.add_scatter(
            x=[b.block for b in own],
            y=values,
            line={"color": color, "dash": "dash"},
            mode="lines+markers",
            name=f"{budget:.0%}, without the block's own queries",
            showlegend=False,
            row=2,
            col=2,
            hovertemplate="block %{x}: %{y:.1%}<extra>" + f"{budget:.0%}, without its own queries</extra>",
        )
    if any(b.block >= 0 for b in t.blocks):
        fig.add_vline(-0.5, line={"color": GREY, "dash": "dot", "width": 1}, row=2, col=2)
    fig.update_xaxes(title_text="block (0: first of the answer; dashed: without its own queries)", row=2, col=2)
    fig.update_yaxes(title_text="important tokens found", tickformat=".0%", range=[0, 1], row=2, col=2)


def _distances(fig: Any, t: Any) -> None:
    for budget, color, values in _by_budget(t, [d.overlap for d in t.distances]):
        fig.add_scatter(
            x=[d.blocks for d in t.distances],
            y=values,
            line={"color": color},
            mode="lines+markers",
            showlegend=False,
            hovertemplate="%{x} apart: %{y:.1%}<extra>" + f"{budget:.0%} of the tokens</extra>",
            row=2,
            col=3,
        )
    fig.update_xaxes(title_text=f"blocks of {t.window} queries apart", dtick=1, row=2, col=3)
    fig.update_yaxes(title_text="important tokens shared", tickformat=".0%", range=[0, 1], row=2, col=3)


def _by_budget(t: Any, series: list[Any]) -> list[tuple[float, str, list[float]]]:
    colors = (GREEN, ORANGE, BLUE, RED, GREY)
    return [(budget, colors[i % 5], [one[i] for one in series]) for i, budget in enumerate(t.budgets)]
