"""The drawing of `loops.check`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREY, ORANGE, RED, axes, finished, level, panels

_SHOWN = 40  # records with a curve of their own: more cannot be told apart


def draw(result: Any) -> go.Figure:
    """Diversity of the window over the tokens, a line per record, with the onset and the detection of each loop."""
    theta, window = result.settings["theta_ttr"], html.escape(str(result.settings["window"]))
    fig = panels([""])
    shown = sorted(result.records, key=lambda r: not r.loop)[:_SHOWN]
    for record in reversed(shown):
        _curve(fig, record)
    looping = [r for r in shown if r.loop]
    _points(fig, looping, "onset", BLUE, "circle-open", "onset of the longest repetition")
    _points(fig, looping, "detected", RED, "x", "detected")
    level(fig, theta, color=GREY, annotation_text=f"threshold {theta:g}")
    ratio = {"title_text": f"type-token ratio of the last {window} tokens", "range": [0, 1.03]}
    axes(fig, x={"title_text": "tokens", "rangemode": "tozero"}, y=ratio)
    left = f", {len(shown)} of them drawn" if len(shown) < len(result.records) else ""
    found = f"{result.loops} of {len(result.records)} loop{left}"
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    return finished(fig, result, found, width=1000, height=520, top=70, bottom=90, legend=legend)


def _curve(fig: Any, record: Any) -> None:
    kind = "loops" if record.loop else "does not"
    fig.add_scatter(
        x=record.steps,
        y=record.curve,
        mode="lines",
        name=kind,
        legendgroup=kind,
        showlegend=not any(curve.name == kind for curve in fig.data),
        line={"color": ORANGE if record.loop else GREY, "width": 1.5},
        opacity=0.8,
        hovertemplate=f"{html.escape(record.name)}<br>%{{y:.3f}} after %{{x}} tokens<extra></extra>",
    )


def _points(fig: Any, records: list[Any], field: str, color: str, symbol: str, name: str) -> None:
    there = [(getattr(r, field), r) for r in records if getattr(r, field) is not None]
    if not there:
        return
    fig.add_scatter(
        x=[at for at, _ in there],
        y=[_height(r, at) for at, r in there],
        mode="markers",
        name=name,
        marker={"color": color, "symbol": symbol, "size": 9},
        customdata=[[html.escape(r.name), r.period if r.period is not None else "-"] for _, r in there],
        hovertemplate=f"%{{customdata[0]}}<br>{name} at %{{x}}, period %{{customdata[1]}}<extra></extra>",
    )


def _height(record: Any, at: int) -> float:
    """The curve where it is nearest."""
    return min(zip(record.steps, record.curve, strict=True), key=lambda point: abs(point[0] - at))[1]
