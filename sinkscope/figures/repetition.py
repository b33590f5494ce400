"""Drawings of loops in texts."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.measure.style import BLUE, GREY, ORANGE, RED, Panel, across, curve, dots, drawn

_SHOWN = 40  # records with a curve of their own: more cannot be told apart


def draw_loops(result: Any) -> go.Figure:
    """Diversity of the window over the tokens, a line per record, with the onset and the detection of each loop."""
    theta, window = result.settings["theta_ttr"], html.escape(str(result.settings["window"]))
    shown = sorted(result.records, key=lambda r: not r.loop)[:_SHOWN]
    first = {r.loop: i for i, r in reversed(list(enumerate(reversed(shown))))}  # the legend names each kind once
    curves = [_diversity(r, listed=first[r.loop] == i) for i, r in enumerate(reversed(shown))]
    looping = [r for r in shown if r.loop]
    points = _points(looping, "onset", BLUE, "circle-open", "onset of the longest repetition")
    points += _points(looping, "detected", RED, "x", "detected")
    left = f" ({len(shown)} of {len(result.records)} records)" if len(shown) < len(result.records) else ""
    part = Panel(
        "",
        curves + points,
        {"title_text": f"tokens{left}", "rangemode": "tozero"},
        {"title_text": f"type-token ratio of the last {window} tokens", "range": [0, 1.03]},
        [across(theta, GREY, annotation_text=f"threshold {theta:g}")],
    )
    legend = {"y": -0.16, "x": 1.0, "xanchor": "right"}
    return drawn(result, [part], width=1000, height=520, top=70, bottom=90, legend=legend)


def draw_calibration(result: Any) -> go.Figure:
    """False alarms per million held-out tokens of each rule, with the 95 % upper limit, and what was promised."""
    limits = {"type": "data", "array": [r.at_most - r.per_million for r in result.rates], "arrayminus": [0]}
    names, alarms = [html.escape(r.rule) for r in result.rates], [r.per_million for r in result.rates]
    part = Panel(
        "",
        [go.Scatter(x=names, y=alarms, mode="markers", error_y=limits, name="measured")],
        None,
        {"title_text": "false alarms per million tokens", "rangemode": "tozero"},
        [across(result.promised, GREY, annotation_text=f"promised: {result.promised:.3g}")],
    )
    return drawn(result, [part], width=1000, height=520, top=70, bottom=90)


def _diversity(record: Any, *, listed: bool) -> Any:
    kind, color = ("loops", ORANGE) if record.loop else ("does not", GREY)
    hover = f"{html.escape(record.name)}<br>%{{y:.3f}} after %{{x}} tokens<extra></extra>"
    style: dict[str, Any] = {
        "mode": "lines",
        "legendgroup": kind,
        "showlegend": listed,
        "opacity": 0.8,
        "hovertemplate": hover,
    }
    return curve(record.steps, record.curve, kind, color, width=1.5, **style)


def _points(records: list[Any], field: str, color: str, symbol: str, name: str) -> list[Any]:
    there = [(getattr(r, field), r) for r in records if getattr(r, field) is not None]
    heights = [min(zip(r.steps, r.curve, strict=True), key=lambda point, at=at: abs(point[0] - at)) for at, r in there]
    made = dots(
        [at for at, _ in there],
        [height for _, height in heights],  # of the curve, where it is nearest
        name,
        color,
        9,
        marker_symbol=symbol,
        customdata=[[html.escape(r.name), r.period if r.period is not None else "-"] for _, r in there],
        hovertemplate=f"%{{customdata[0]}}<br>{name} at %{{x}}, period %{{customdata[1]}}<extra></extra>",
    )
    return [made] if there else []
