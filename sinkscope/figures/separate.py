"""The drawing of `separability`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREY, finished, panels


def draw(result: Any) -> go.Figure:
    """First and later tokens along the plane's direction, and by the best neurons."""
    plane, neurons = result.separators[0], result.separators[2:]
    titles = [f"LDA: AUROC {plane.auroc:.4f} on held-out tokens and texts" + _control([plane])]
    if neurons:
        titles.append("; ".join(f"{_name(s)}: AUROC {s.auroc:.4f}" for s in neurons) + _control(neurons))
    fig = panels(titles)
    axes = [("plane", "across"), ("gate", "position" if len(neurons) == 1 else "up")][: len(titles)]
    for first in (False, True):
        for held in (False, True):
            points = [p for p in result.points if p.first == first and p.held_out == held]
            for col, (x, y) in enumerate(axes, 1):
                _scatter(fig, points, first, held, x, y, col)
    fig.add_vline(0.0, line={"color": GREY, "dash": "dot", "width": 1}, row=1, col=1)
    fig.update_xaxes(title_text="along LDA's direction (means at -0.5 and 0.5)", row=1, col=1)
    fig.update_yaxes(title_text="along the widest direction across it", row=1, col=1)
    if neurons:
        fig.update_xaxes(title_text=f"pre-activation of {_name(neurons[0])}", row=1, col=2)
        other = f"pre-activation of {_name(neurons[1])}" if len(neurons) > 1 else "position"
        fig.update_yaxes(title_text=other, row=1, col=2)
    found = f"after the attention of layer {result.layer}"
    return finished(fig, result, found, width=1300 if neurons else 750, height=560, top=110, legend=-0.17)


def _control(separators: Any) -> str:
    return "<br>with random labels: " + ", ".join(f"{s.shuffled_auroc:.4f}" for s in separators)


def _name(separator: Any) -> str:
    expert = "" if separator.expert is None else f" of expert {separator.expert}"
    return f"{html.escape(separator.method)} {separator.neuron}{expert}"


def _scatter(fig: Any, points: Any, first: bool, held: bool, x: str, y: str, col: int) -> None:
    name = f"{'first' if first else 'later'}, {'held out' if held else 'trained on'}"
    fig.add_scatter(
        x=[getattr(p, x) for p in points],
        y=[getattr(p, y) for p in points],
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
