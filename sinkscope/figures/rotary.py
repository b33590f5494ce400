"""The drawing of `rotary_invariance`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE

_SIZES = (0.01, 1.0)


def draw(result: Any) -> go.Figure:
    """How queries and keys repeat, what that does to scores, the tail operator along the sequence, and decay."""
    name = html.escape(result.model.name)
    if result.period is None:
        fig = go.Figure()
        fig.update_layout(title={"text": f"{name}: no loop in {result.tokens} tokens"}, template="plotly_white")
        return fig
    titles = [
        "Queries and keys a shift apart",
        "Scores a shift apart",
        "Tail operator (Eq. 4)",
        "Decay of a disturbance",
    ]
    fig = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.09, vertical_spacing=0.17)
    _vectors(fig, result)
    _scores(fig, result)
    _drift(fig, result)
    _decay(fig, result)
    fig.update_layout(
        title={
            "text": f"{name}: loop of period {result.period} from position {result.onset}, "
            f"{html.escape(repr(result.repeated))}",
            "x": 0.01,
            "xanchor": "left",
        },
        template="plotly_white",
        width=1400,
        height=950,
        margin={"l": 70, "r": 260, "t": 90, "b": 60},
        font={"size": 13},
        legend={"x": 1.01, "y": 1, "xanchor": "left"},
        legend2={"x": 1.01, "y": 0.4, "xanchor": "left"},
    )
    return fig


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
    fig.update_yaxes(type="log", title_text="largest distance over median length", row=1, col=1)
    fig.update_xaxes(title_text="layer", dtick=1, row=1, col=1)


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
    fig.update_yaxes(type="log", title_text="mean difference over spread of scores", row=1, col=2)
    fig.update_xaxes(title_text="layer", dtick=1, row=1, col=2)


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
        middle = [
            sorted(known)[len(known) // 2] if (known := [v for v in at if v is not None]) else None
            for at in zip(*lines, strict=True)
        ]
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
    fig.update_xaxes(title_text="position (dotted: the loop begins)", row=2, col=1)
    fig.update_yaxes(title_text="movement over length", type="log", row=2, col=1)


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
        middle = [
            sorted(c[i] / c[0] for c in (d.change for d in chosen))[len(chosen) // 2]
            for i in range(len(chosen[0].change))
        ]
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
    fig.update_xaxes(title_text="periods after the disturbed one", dtick=1, row=2, col=2)
    fig.update_yaxes(title_text="change of the last hidden state, over the first", type="log", row=2, col=2)
