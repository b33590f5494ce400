"""The drawing of `massive_activations`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED, finished, layer_axis, level, panels


def draw(result: Any) -> go.Figure:
    """A row per condition: magnitudes per layer, norms of value vectors, and where secondary sinks begin."""
    count = len(result.conditions)
    names = ["with BOS" if c.bos else "without BOS" for c in result.conditions]
    kinds = ("largest activations", "first token's values over others'", "secondary sinks")
    titles = [f"{kind}, {name}" for name in names for kind in kinds]
    fig = panels(titles, spacing=0.075, rows=count, cols=3, vertical_spacing=0.16)
    for row, condition in enumerate(result.conditions, start=1):
        _magnitudes(fig, condition, row)
        _values(fig, condition, row)
        _secondary(fig, condition, row)
    return finished(
        fig,
        result,
        "massive activations, value drain, secondary sinks",
        width=1400,
        height=120 + 340 * count,
        bottom=90,
        legend=-0.12 if count > 1 else -0.2,
    )


def _magnitudes(fig: Any, condition: Any, row: int) -> None:
    layers = [one.layer for one in condition.layers]
    style: dict[str, Any] = {"row": row, "col": 1, "mode": "lines+markers", "showlegend": row == 1}
    for i, (name, color) in enumerate((("top 1", BLUE), ("top 2", ORANGE), ("top 3", GREEN))):
        fig.add_scatter(x=layers, y=[one.top[i] for one in condition.layers], name=name, line={"color": color}, **style)
    fig.add_scatter(x=layers, y=[one.median for one in condition.layers], name="median", line={"color": GREY}, **style)
    layer_axis(fig, len(layers), row, 1)
    fig.update_yaxes(title_text="magnitude", type="log", dtick=1, exponentformat="power", row=row, col=1)


def _values(fig: Any, condition: Any, row: int) -> None:
    if not condition.values:
        fig.add_annotation(text="this architecture shows no value vectors", showarrow=False, row=row, col=2)
        return
    layers = [v.layer for v in condition.values]
    for head in range(len(condition.values[0].sink)):
        ratios = [v.sink[head] / v.others[head] if v.others[head] else None for v in condition.values]
        fig.add_scatter(
            x=layers,
            y=ratios,
            mode="markers",
            marker={"color": GREY, "size": 5, "opacity": 0.6},
            row=row,
            col=2,
            name="a kv head",
            showlegend=row == 1 and head == 0,
            hovertemplate=f"kv head {head}: %{{y:.3g}}",
        )
    fig.add_scatter(
        x=layers,
        y=[v.ratio for v in condition.values],
        mode="lines+markers",
        line={"color": RED, "width": 2.5},
        name="mean over kv heads",
        showlegend=row == 1,
        row=row,
        col=2,
    )
    level(fig, 1.0, row, 2, color=GREY)
    layer_axis(fig, len(layers), row, 2)
    fig.update_yaxes(title_text="ratio of norms", rangemode="tozero", row=row, col=2)


def _secondary(fig: Any, condition: Any, row: int) -> None:
    n = len(condition.layers)
    fig.update_xaxes(title_text="created after layer", range=[-0.5, n - 0.5], dtick=max(1, n // 12), row=row, col=3)
    fig.update_yaxes(title_text="lifetime in layers", range=[0.5, n + 0.5], dtick=max(1, n // 12), row=row, col=3)
    if not condition.secondary:
        fig.add_annotation(x=(n - 1) / 2, y=(n + 1) / 2, text="none", showarrow=False, row=row, col=3)
        return
    counts = Counter((s.created, s.lifetime) for s in condition.secondary)
    cells = [[counts.get((x, y)) for x in range(n)] for y in range(1, n + 1)]
    fig.add_heatmap(
        x=list(range(n)),
        y=list(range(1, n + 1)),
        z=cells,
        colorscale="Blues",
        showscale=False,
        zmin=0,
        xgap=1,
        ygap=1,
        text=[[str(v) if v else "" for v in line] for line in cells] if n <= 16 else None,
        texttemplate="%{text}",
        hovertemplate="created after layer %{x}, %{y} layers: %{z} positions<extra></extra>",
        row=row,
        col=3,
    )
