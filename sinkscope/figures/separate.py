"""The drawing of `separability`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREY


def draw(result: Any) -> go.Figure:
    """First and later tokens along the plane's direction, and by the best neurons."""
    plane, neurons = result.separators[0], result.separators[2:]
    titles = [f"LDA: AUROC {plane.auroc:.4f} on held-out tokens and texts" + _control([plane])]
    if neurons:
        titles.append("; ".join(f"{_name(s)}: AUROC {s.auroc:.4f}" for s in neurons) + _control(neurons))
    fig: Any = make_subplots(cols=len(titles), subplot_titles=titles, horizontal_spacing=0.09)
    for first in (False, True):
        for held in (False, True):
            points = [p for p in result.points if p.first == first and p.held_out == held]
            name = f"{'first' if first else 'later'}, {'held out' if held else 'trained on'}"
            _scatter(fig, points, name, first, held, [p.plane for p in points], [p.across for p in points], 1)
            if len(neurons) == 1:
                places = [p.position for p in points]
                _scatter(fig, points, name, first, held, [p.gate for p in points], places, 2)
            elif neurons:
                _scatter(fig, points, name, first, held, [p.gate for p in points], [p.up for p in points], 2)
    fig.add_vline(0.0, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    fig.update_xaxes(title_text="along LDA's direction (means at -0.5 and 0.5)", row=1, col=1)
    fig.update_yaxes(title_text="along the widest direction across it", row=1, col=1)
    if neurons:
        fig.update_xaxes(title_text=f"pre-activation of {_name(neurons[0])}", row=1, col=2)
        other = f"pre-activation of {_name(neurons[1])}" if len(neurons) > 1 else "position"
        fig.update_yaxes(title_text=other, row=1, col=2)
    fig.update_layout(
        title={
            "text": f"{html.escape(result.model.name)}: after the attention of layer {result.layer}",
            "x": 0.01,
            "xanchor": "left",
        },
        template="plotly_white",
        width=1300 if neurons else 750,
        height=560,
        margin={"l": 70, "r": 20, "t": 110, "b": 110},
        font={"size": 13},
        legend={"orientation": "h", "y": -0.17, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def _control(separators: Any) -> str:
    return "<br>with random labels: " + ", ".join(f"{s.shuffled_auroc:.4f}" for s in separators)


def _name(separator: Any) -> str:
    expert = "" if separator.expert is None else f" of expert {separator.expert}"
    return f"{html.escape(separator.method)} {separator.neuron}{expert}"


def _scatter(fig: Any, points: Any, name: str, first: bool, held: bool, x: Any, y: Any, col: int) -> None:
    fig.add_scatter(
        x=x,
        y=y,
        mode="markers",
        name=name,
        legendgroup=name,
        showlegend=col == 1,
        row=1,
        col=col,
        marker={
            "color": BLUE if first else GREY,
            "symbol": "circle" if held else "circle-open",
            "size": 7 if first else 5,
            "opacity": 0.75,
        },
        text=[f"{html.escape(repr(p.token))} at {p.position}" for p in points],
        hovertemplate="%{text}<br>%{x:.3f}, %{y:.3f}<extra>" + name + "</extra>",
    )
