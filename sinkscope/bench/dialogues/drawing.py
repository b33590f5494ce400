"""The drawing of dialogues: score by method and position of the question, and against what decoding read."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.bench.dialogues import fidelity_table
from sinkscope.bench.dialogues.form import POSITIONS
from sinkscope.bench.dialogues.tables import head_of, label, overall, title
from sinkscope.bench.methods import METHODS, name_of
from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED

_PANELS = (
    ("kl", "KL(full || method), nats a token", BLUE, ".3g"),
    ("agree", "same likeliest token", ORANGE, ".1%"),
    ("kept", "attention mass kept", GREEN, ".1%"),
)


def draw_fidelity(result: Any) -> go.Figure:
    """A row per task, model and answers: three panels of bars, a bar per method, over all positions."""
    heads = list(dict.fromkeys(map(fidelity_table.head_of, result.groups)))
    rows = [overall([g for g in result.groups if fidelity_table.head_of(g) == head]) for head in heads]
    titles = [
        (f"{html.escape(fidelity_table.title(head))}<br>" if field == "kl" else "") + name
        for head in heads
        for field, name, _, _ in _PANELS
    ]
    heights = [len(mine) + 3 for mine in rows]
    fig = make_subplots(
        rows=len(heads),
        cols=3,
        subplot_titles=titles,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=min(0.3, 4 / (sum(heights) + 4)),
        row_heights=heights,
    )
    for row, mine in enumerate(rows, 1):
        names = [html.escape(label(g)) for g in mine]
        for col, (field, name, colour, form) in enumerate(_PANELS, 1):
            fig.add_bar(
                y=names,
                x=[getattr(g, field) for g in mine],
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
            if field != "kl":
                fig.update_xaxes(tickformat=".0%", range=[0, 1.15], row=row, col=col)
            else:
                fig.update_xaxes(range=[0, 1.4 * max(g.kl for g in mine) or 1], row=row, col=col)
        fig.update_yaxes(autorange="reversed", row=row)
    fig.update_layout(
        title={"text": "Beside full attention, along the same text", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1300,
        height=130 + 30 * sum(heights),
        font={"size": 13},
        margin={"l": 20, "r": 50, "t": 110, "b": 50},
    )
    return fig


def _text(group: Any, field: str, form: str) -> str:
    value = getattr(group, field)
    if value is None:
        return "-"
    error = f" ± {1.96 * group.kl_error:.2g}" if field == "kl" and group.kl_error else ""
    return f"{value:{form}}{error}"


def draw_positions(result: Any) -> go.Figure:
    """A bar for each place of the question, and a diamond for LoopServe's Table 5."""
    names = [html.escape(share.position) for share in result.places]
    there = [share for share in result.places if share.share is not None]
    fig: Any = go.Figure()
    fig.add_bar(
        x=[html.escape(share.position) for share in there],
        y=[share.share for share in there],
        name="this log",
        marker_color=BLUE,
        customdata=[share.count for share in there],
        error_y={
            "type": "data",
            "symmetric": False,
            "thickness": 1,
            "array": [share.high - share.share for share in there],
            "arrayminus": [share.share - share.low for share in there],
        },
        hovertemplate="%{x}: %{y:.1%}, %{customdata} messages<extra></extra>",
    )
    fig.add_scatter(
        x=names,
        y=[share.paper_share for share in result.places],
        mode="markers",
        name="paper: LMSYS-Chat-1M",
        marker={"color": GREY, "size": 11, "symbol": "diamond"},
        customdata=[s.paper_count for s in result.places],
        hovertemplate="%{x}, paper: %{y:.1%}, %{customdata} messages<extra></extra>",
    )
    fig.update_layout(
        title={"text": f"Where questions stand in {html.escape(result.model.name)}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=800,
        height=460,
        font={"size": 13},
        margin={"l": 60, "r": 20, "t": 70, "b": 50},
    )
    fig.update_yaxes(tickformat=".0%", range=[0, 1.03], title_text="share of messages")
    return fig


_COLOURS: dict[str, str] = dict(zip(POSITIONS, (BLUE, ORANGE, GREEN), strict=True))
_DOTS = (
    "#000000",
    GREY,
    RED,
    "#cc79a7",
    "#56b4e9",
    "#7a5c00",
    "#4b3f8f",
    "#b8a000",
    "#00a08a",
    "#882255",
    "#3f6f2a",
    "#1f4fd8",
    "#ff7f6b",
    "#9a6bff",
    "#5c8a8a",
)
_SYMBOLS = ("diamond", "circle", "square", "cross", "x", "triangle-up", "star")


def draw(result: Any) -> go.Figure:
    """A row per task, model, history and cache: bars with 95 % intervals; score against tokens read."""
    heads = list(dict.fromkeys(map(head_of, result.groups)))
    titles = [
        text for head in heads for text in (f"{html.escape(title(head))}: score", "Score over tokens read per step")
    ]
    fig = make_subplots(
        rows=len(heads),
        cols=2,
        subplot_titles=titles,
        column_widths=[0.62, 0.38],
        horizontal_spacing=0.08,
        vertical_spacing=0.3 / len(heads),
    )
    dots, shown = _dots([g.method for g in result.groups]), set[str]()
    for row, head in enumerate(heads, 1):
        mine = [g for g in result.groups if head_of(g) == head]
        for place in POSITIONS:
            bars = [g for g in mine if g.position == place]
            if bars:
                _bars(fig, bars, place, row)
        for g in overall(mine):
            if g.read is not None:
                fig.add_scatter(
                    x=[g.read],
                    y=[g.score],
                    mode="markers",
                    name=html.escape(g.method),
                    legendgroup=g.method,
                    showlegend=g.method not in shown,
                    text=[html.escape(label(g))],
                    marker=dots[g.method],
                    hovertemplate="%{text}: %{y:.1%} at %{x:.4g} tokens<extra></extra>",
                    row=row,
                    col=2,
                )
                shown.add(g.method)
        fig.update_yaxes(tickformat=".0%", range=[-0.05, 1.08], row=row)
        fig.update_xaxes(title_text="tokens read per decoding step", row=row, col=2)
        names = list(dict.fromkeys(html.escape(label(g)) for g in mine))
        fig.update_xaxes(categoryorder="array", categoryarray=names, row=row, col=1)
    fig.update_layout(
        title={"text": "Dialogues, by position of the question", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1300,
        barmode="group",
        font={"size": 13},
        height=max(130 + 380 * len(heads), 200 + 31 * (len(POSITIONS) + len(shown))),
        margin={"l": 70, "r": 20, "t": 90, "b": 90},
        legend={"x": 1.01, "y": 1},
    )
    return fig


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


def _bars(fig: Any, bars: list[Any], place: str, row: int) -> None:
    fig.add_bar(
        x=[html.escape(label(g)) for g in bars],
        y=[g.score for g in bars],
        name=f"question at {place}",
        legendgroup=place,
        showlegend=row == 1,
        marker_color=_COLOURS[place],
        error_y={
            "type": "data",
            "symmetric": False,
            "thickness": 1,
            "array": [g.high - g.score for g in bars],
            "arrayminus": [g.score - g.low for g in bars],
        },
        customdata=[g.questions for g in bars],
        hovertemplate="%{x}: %{y:.1%} of %{customdata}<extra></extra>",
        row=row,
        col=1,
    )
