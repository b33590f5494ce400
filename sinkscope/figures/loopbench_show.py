"""The drawing of one prompt of LoopBench: how diverse each method's output was over its length (Fig. 2 a)."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED
from sinkscope.loops.signals import THETA_TTR

_COLOURS = (BLUE, ORANGE, GREEN, RED, "#cc79a7", "#56b4e9", "#7a5c00", "#4b3f8f", "#000000")


def draw(result: Any) -> go.Figure:
    """Type-token ratio of the last window over the steps; interventions as triangles, the end as a circle."""
    fig = go.Figure()
    for i, o in enumerate(result.outputs):
        colour = _COLOURS[i % len(_COLOURS)]
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
