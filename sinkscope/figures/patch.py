"""The drawings of a patch and of what it costs."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.files.notation import neuron_names
from sinkscope.measure.style import BAND, BLUE, GREEN, GREY, ORANGE, RED, Panel, across, curve, dots, drawn


def draw_make(result: Any) -> go.Figure:
    """Norms of held-out tokens without and with the patch, the sets that were tried, the cost, and later layers."""
    parts = [
        _norms("Held-out tokens, repeated", result) if result.held_out else Panel("Held-out tokens, repeated"),
        _tried("Sets that were tried", result) if result.tried else Panel("Sets that were tried"),
        _cost("Perplexity", result) if result.perplexity is not None else Panel("Perplexity"),
    ]
    parts += _later(result) if result.later else []
    widths = [0.3, 0.18, 0.12, 0.2, 0.2] if result.later else [0.5, 0.3, 0.2]
    size = {"width": 1900 if result.later else 1350, "height": 480, "bottom": 120}
    return drawn(result, parts, widths, grid={"spacing": 0.06}, legend={"x": 0.4}, **size)


def _norms(title: str, result: Any) -> Panel:
    names = [html.escape(repr(t.token)) for t in result.held_out]
    tokens = [
        dots(names, [getattr(t, name) for t in result.held_out], name, color, 10)
        for name, color in (("intact", BLUE), ("patched", ORANGE))
    ]
    lines = [
        curve(names, [y] * len(names), text, color, "dash", 1, mode="lines")
        for text, y, color in (
            ("first token", result.first_norm, GREEN),
            ("counts as typical up to", result.ceiling, RED),
        )
    ]
    area = {"y0": result.typical_low, "y1": result.typical_high, "fillcolor": BAND, "line_width": 0, "layer": "below"}
    times = f"token, {result.held_out[0].repeats} times (band: typical text, 5-95 %)"
    return Panel(title, [*tokens, *lines], times, _norm(f"largest norm, layer {result.layer}"), [("hrect", area)])


def _norm(title: str) -> dict[str, Any]:
    return {"title_text": title, "type": "log", "dtick": 1}


def _tried(title: str, result: Any) -> Panel:
    chosen = {n.site for n in result.neurons}
    sets = dots(
        [len(t.neurons) for t in result.tried],
        [t.norm for t in result.tried],
        None,
        [ORANGE if set(t.neurons) == chosen else GREY for t in result.tried],
        9,
        showlegend=False,
        text=[neuron_names(t.neurons) for t in result.tried],
        hovertemplate="%{text}<br>norm %{y:.4g}<extra></extra>",
    )
    ends = [-0.5, max(len(t.neurons) for t in result.tried) + 0.5]
    style = {"mode": "lines", "showlegend": False, "hoverinfo": "skip"}
    ceiling = curve(ends, [result.ceiling] * 2, None, RED, "dash", 1, **style)
    neurons = {"title_text": "neurons in the set (orange: chosen)", "dtick": 1, "range": ends}
    return Panel(title, [sets, ceiling], neurons, _norm("largest norm left"))


def _cost(title: str, result: Any) -> Panel:
    p = result.perplexity
    rise = dots(  # no bar: one of height 0, the best there is, could not be seen
        ["patched"],
        [p.difference / p.before],
        None,
        ORANGE,
        10,
        showlegend=False,
        error_y={"type": "data", "array": [2 * (p.se or 0) / p.before], "visible": True, "color": ORANGE},
        hovertemplate=f"{p.before:.5g} to {p.after:.5g}<extra></extra>",
    )
    reach = 1.3 * max(result.limit, abs(p.difference) / p.before)
    axis = {"title_text": "rise, 2 standard errors", "tickformat": ".2%", "range": [-reach, reach]}
    limit = across(result.limit, dash="dash", annotation_text="limit", annotation_font_color=RED)
    return Panel(title, [rise], None, axis, [limit])


def _later(result: Any) -> list[Panel]:
    """Norms and attention of the held-out tokens, layer by layer, beside what is typical."""
    layers = [one.layer for one in result.later]
    ticks: dict[str, Any] = {"title_text": "layer", "dtick": max(1, len(layers) // 6)}
    norms: list[tuple[Any, ...]] = [("patched", ORANGE, "solid"), ("intact", BLUE, "solid"), ("ceiling", RED, "dash")]
    attention: list[tuple[Any, ...]] = [("patched_attention", ORANGE, "solid"), ("intact_attention", BLUE, "solid")]
    attention.append(("ordinary_attention", GREY, "dash"))
    return [
        Panel(
            title,
            [
                curve(
                    layers,
                    [getattr(one, field) for one in result.later],
                    "ordinary text" if field == "ordinary_attention" else f"{field}, by layer",
                    *style,
                    showlegend=field == "ordinary_attention",
                )
                for field, *style in fields
            ],
            ticks,
            y,
        )
        for title, fields, y in (
            ("Norm, later layers", norms, _norm("largest norm")),
            ("Attention to first token", attention, {"title_text": "mean over heads", "rangemode": "tozero"}),
        )
    ]


def draw_eval(result: Any) -> go.Figure:
    """Differences from the original, patched and random, with two standard errors."""
    text = [s for s in result.scores if s.metric == "perplexity"]
    tasks = [s for s in result.scores if s.metric != "perplexity"]
    shown = [scores for scores in (text, tasks) if scores]
    parts = [_changes(scores, ppl=scores is text, listed=scores is shown[0]) for scores in shown]
    size = {"width": 700 + 90 * len(tasks), "height": 480, "bottom": 100, "legend": -0.25}
    return drawn(result, parts, [0.3, 0.7], grid={"spacing": 0.12}, **size)


def _changes(scores: list[Any], *, ppl: bool, listed: bool) -> Panel:
    unit = [s.original / 100 if ppl else 0.01 for s in scores]  # per cent of the perplexity, points of a score
    names = [f"{html.escape(s.task)}<br>{html.escape(s.metric)}<br>{s.original:.4g}" for s in scores]
    traces = [
        dots(
            [i + shift for i in range(len(names))],
            [getattr(s, value) / u for s, u in zip(scores, unit, strict=True)],
            label,
            color,
            11,
            showlegend=listed,
            hovertemplate="%{y:+.3f}<extra></extra>",
            error_y={
                "type": "data",
                "visible": True,
                "color": color,
                "thickness": 2,
                "array": [2 * (getattr(s, se) or 0) / u for s, u in zip(scores, unit, strict=True)],
            },
        )
        for label, value, se, color, shift in (
            ("patch", "difference", "difference_se", ORANGE, -0.12),
            ("random patch", "random_difference", "random_se", GREY, 0.12),
        )
    ]
    ticks = {"tickvals": list(range(len(names))), "ticktext": names, "tickangle": 0}
    beside = {"range": [-0.6, len(names) - 0.4], "showgrid": False, "zeroline": False}
    change = {"title_text": "change, %" if ppl else "change, points", "zeroline": True, "zerolinecolor": GREY}
    title = "perplexity" if ppl else "benchmarks"
    return Panel(f"{title}<br>(bars: two standard errors; below: the original)", traces, ticks | beside, change)
