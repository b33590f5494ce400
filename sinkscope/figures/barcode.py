"""The drawing of `barcode`."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import ORANGE

_TICKS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0)


def draw(result: Any) -> go.Figure:
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
    fig = make_subplots(
        rows=len(shown),
        cols=len(parts),
        subplot_titles=titles,
        horizontal_spacing=0.045,
        vertical_spacing=0.24 / max(2, len(shown)),
    )
    top = math.sqrt(max([0.05, *(_high(getattr(h, part)) for h in shown for part in parts)]))
    for row, h in enumerate(shown, 1):
        for col, part in enumerate(parts, 1):
            _map(fig, getattr(h, part), top, row, col, scale=row == 1 and col == 1)
        _marks(fig, result, h, row, parts.index("late") + 1)
    ends = (
        "no loop at the end"
        if result.period is None
        else f"loop of period {result.period} from position {result.onset}"
    )
    fig.update_layout(
        title={
            "text": f"{html.escape(result.model.name)}: attention over {result.steps} generated tokens, {ends}",
            "x": 0.01,
            "xanchor": "left",
        },
        template="plotly_white",
        width=350 * len(parts) + 130,
        height=max(420, 265 * len(shown) + 120),
        margin={"l": 60, "r": 90, "t": 90, "b": 60},
        font={"size": 12},
    )
    fig.update_xaxes(title_text="position", row=len(shown))
    fig.update_yaxes(title_text="step", col=1)
    return fig


def _high(picture: Any) -> float:
    """A share that only one cell in a hundred exceeds."""
    cells = sorted(v for line in picture.values() for v in line) if picture is not None else [0.0]
    return cells[-1 - len(cells) // 100]


def _map(fig: Any, picture: Any, top: float, row: int, col: int, *, scale: bool) -> None:
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
    fig.update_yaxes(autorange="reversed", row=row, col=col)


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
