"""The drawings of a patch and of what it costs."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BAND, BLUE, GREEN, GREY, ORANGE, RED, axes, finished, level, panels
from sinkscope.notation import neuron_names


def draw_make(result: Any) -> go.Figure:
    """Norms of held-out tokens without and with the patch, the sets that were tried, the cost, and later layers."""
    titles = ["Held-out tokens, repeated", "Sets that were tried", "Perplexity"]
    if result.later:
        titles += ["Norm, later layers", "Attention to first token"]
    fig = panels(titles, [0.3, 0.18, 0.12, 0.2, 0.2] if result.later else [0.5, 0.3, 0.2], spacing=0.06)
    if result.held_out:
        _norms(fig, result)
    if result.tried:
        _tried(fig, result)
    if result.perplexity is not None:
        _cost(fig, result)
    if result.later:
        _later(fig, result)
    return finished(
        fig,
        result,
        width=1900 if result.later else 1350,
        height=480,
        bottom=120,
        legend={"x": 0.4},
    )


def _norms(fig: Any, result: Any) -> None:
    names = [html.escape(repr(t.token)) for t in result.held_out]
    place = {"row": 1, "col": 1}
    for name, color in (("intact", BLUE), ("patched", ORANGE)):
        fig.add_scatter(
            x=names,
            y=[getattr(t, name) for t in result.held_out],
            mode="markers",
            name=name,
            marker={"color": color, "size": 10},
            **place,
        )
    lines = (("first token", result.first_norm, GREEN), ("counts as typical up to", result.ceiling, RED))
    for text, y, color in lines:
        fig.add_scatter(
            x=names,
            y=[y] * len(names),
            mode="lines",
            name=text,
            line={"color": color, "dash": "dash", "width": 1},
            **place,
        )
    # after the traces: a subplot without any takes no rectangle
    fig.add_hrect(y0=result.typical_low, y1=result.typical_high, fillcolor=BAND, line_width=0, layer="below", **place)
    times = f"token, {result.held_out[0].repeats} times (band: typical text, 5-95 %)"
    axes(fig, x=times, y={"title_text": f"largest norm, layer {result.layer}", "type": "log", "dtick": 1})


def _tried(fig: Any, result: Any) -> None:
    chosen = {n.site for n in result.neurons}
    fig.add_scatter(
        x=[len(t.neurons) for t in result.tried],
        y=[t.norm for t in result.tried],
        mode="markers",
        showlegend=False,
        marker={"size": 9, "color": [ORANGE if set(t.neurons) == chosen else GREY for t in result.tried]},
        text=[neuron_names(t.neurons) for t in result.tried],
        hovertemplate="%{text}<br>norm %{y:.4g}<extra></extra>",
        row=1,
        col=2,
    )
    largest = max(len(t.neurons) for t in result.tried)
    fig.add_scatter(
        x=[-0.5, largest + 0.5],
        y=[result.ceiling] * 2,
        mode="lines",
        showlegend=False,
        hoverinfo="skip",
        line={"color": RED, "dash": "dash", "width": 1},
        row=1,
        col=2,
    )
    neurons = {"title_text": "neurons in the set (orange: chosen)", "dtick": 1, "range": [-0.5, largest + 0.5]}
    axes(fig, 1, 2, x=neurons, y={"title_text": "largest norm left", "type": "log", "dtick": 1})


def _cost(fig: Any, result: Any) -> None:
    p = result.perplexity
    fig.add_scatter(  # no bar: one of height 0, the best there is, could not be seen
        x=["patched"],
        y=[p.difference / p.before],
        mode="markers",
        showlegend=False,
        row=1,
        col=3,
        marker={"color": ORANGE, "size": 10},
        error_y={"type": "data", "array": [2 * (p.se or 0) / p.before], "visible": True, "color": ORANGE},
        hovertemplate=f"{p.before:.5g} to {p.after:.5g}<extra></extra>",
    )
    level(fig, result.limit, col=3, dash="dash", annotation_text="limit", annotation_font_color=RED)
    reach = 1.3 * max(result.limit, abs(p.difference) / p.before)
    fig.update_yaxes(title_text="rise, 2 standard errors", tickformat=".2%", range=[-reach, reach], row=1, col=3)


def _later(fig: Any, result: Any) -> None:
    """Norms and attention of the held-out tokens, layer by layer, beside what is typical."""
    layers = [one.layer for one in result.later]
    lines = (("patched", ORANGE, "solid"), ("intact", BLUE, "solid"))
    for col, name, usual, usual_color in ((4, "{}", "ceiling", RED), (5, "{}_attention", "ordinary_attention", GREY)):
        for field, color, dash in (*((name.format(n), c, d) for n, c, d in lines), (usual, usual_color, "dash")):
            fig.add_scatter(
                x=layers,
                y=[getattr(one, field) for one in result.later],
                mode="lines+markers",
                line={"color": color, "dash": dash},
                showlegend=field == "ordinary_attention",
                name="ordinary text" if field == "ordinary_attention" else f"{field}, by layer",
                row=1,
                col=col,
            )
    ticks: dict[str, Any] = {"title_text": "layer", "dtick": max(1, len(layers) // 6)}
    axes(fig, 1, 4, x=ticks, y={"title_text": "largest norm", "type": "log", "dtick": 1})
    axes(fig, 1, 5, x=ticks, y={"title_text": "mean over heads", "rangemode": "tozero"})


def draw_eval(result: Any) -> go.Figure:
    """Differences from the original, patched and random, with two standard errors."""
    text = [s for s in result.scores if s.metric == "perplexity"]
    tasks = [s for s in result.scores if s.metric != "perplexity"]
    shown = [p for p in (("perplexity", text), ("benchmarks", tasks)) if p[1]]
    fig = panels(
        [f"{name}<br>(bars: two standard errors; below: the original)" for name, _ in shown], [0.3, 0.7], spacing=0.12
    )
    for col, (name, scores) in enumerate(shown, 1):
        ppl = name == "perplexity"
        unit = [s.original / 100 if ppl else 0.01 for s in scores]  # per cent of the perplexity, points of a score
        names = [f"{html.escape(s.task)}<br>{html.escape(s.metric)}<br>{s.original:.4g}" for s in scores]
        for label, value, se, color in (
            ("patch", "difference", "difference_se", ORANGE),
            ("random patch", "random_difference", "random_se", GREY),
        ):
            shift = -0.12 if color == ORANGE else 0.12
            fig.add_scatter(
                x=[i + shift for i in range(len(names))],
                mode="markers",
                name=label,
                showlegend=col == 1,
                y=[getattr(s, value) / u for s, u in zip(scores, unit, strict=True)],
                marker={"color": color, "size": 11},
                row=1,
                col=col,
                hovertemplate="%{y:+.3f}<extra></extra>",
                error_y={
                    "type": "data",
                    "visible": True,
                    "color": color,
                    "thickness": 2,
                    "array": [2 * (getattr(s, se) or 0) / u for s, u in zip(scores, unit, strict=True)],
                },
            )
        ticks = {"tickvals": list(range(len(names))), "ticktext": names, "tickangle": 0}
        change = {"title_text": "change, %" if ppl else "change, points", "zeroline": True, "zerolinecolor": GREY}
        beside = {"range": [-0.6, len(names) - 0.4], "showgrid": False, "zeroline": False}
        axes(fig, 1, col, x=ticks | beside, y=change)
    return finished(fig, result, width=700 + 90 * len(tasks), height=480, bottom=100, legend=-0.25)
