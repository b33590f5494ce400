"""The drawing of `detect_attack`."""

from __future__ import annotations

import html
import math
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.attack import nothing
from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE

_DASHES = ("dot", "solid", "dash", "dashdot")


def draw(result: Any) -> go.Figure:
    """Curves of the rules against all harmless text, and false alarms of each text at the fixed threshold."""
    rows = result.detections
    contexts = list(dict.fromkeys(d.context for d in rows))
    if not contexts:
        return nothing(result)
    everything = "all" if any(d.harmless == "all" for d in rows) else rows[0].harmless
    names = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "behind a chat prefix"}
    fig: Any = make_subplots(
        rows=2,
        cols=len(contexts),
        subplot_titles=[names.get(c, html.escape(c)) for c in contexts],
        horizontal_spacing=0.05,
        vertical_spacing=0.14,
        shared_yaxes=True,
    )
    rules = list(dict.fromkeys((d.hits, d.window) for d in rows))
    lowest = 3e-4  # where a rate of zero is drawn on the logarithmic axis
    rates = [max(rate, lowest) for rate in result.false_rates]
    for column, context in enumerate(contexts, 1):
        mine = [d for d in rows if d.context == context]
        longest = max((d.length for d in mine if d.roc), default=None)
        for d in mine:
            if d.length == longest and d.harmless == everything and d.roc:
                color = BLUE if d.attack == "cluster" else GREEN
                name = f"{html.escape(d.attack)}, {d.hits} of {d.window}"
                fig.add_scatter(
                    x=rates,
                    y=d.roc,
                    mode="lines+markers",
                    name=name,
                    legendgroup=name,
                    line={"color": color, "dash": _DASHES[rules.index((d.hits, d.window)) % len(_DASHES)]},
                    showlegend=not any(t.name == name for t in fig.data),
                    hovertemplate=f"{name}: %{{y:.1%}} of {d.attacks} attacks, AUROC {d.auroc:.4f}<extra></extra>",
                    row=1,
                    col=column,
                )
        if longest is None:
            axis = "" if column == 1 else str(column)
            fig.add_annotation(
                text="no attack made a sink",
                x=0.5,
                y=0.5,
                xref=f"x{axis} domain",
                yref=f"y{axis} domain",
                showarrow=False,
            )
            fig.add_scatter(x=[lowest], y=[None], showlegend=False, row=1, col=column)  # else no axes are drawn
        _alarms(fig, [d for d in mine if d.attack == "cluster"], rules, column)
        tokens = f", {longest} tokens" if longest else ""
        fig.update_xaxes(
            title_text=f"false alarms{tokens} (left end: none)",
            type="log",
            range=[math.log10(lowest) - 0.15, 0.1],
            tickvals=[lowest, 1e-3, 1e-2, 0.1, 1],
            ticktext=["0", "0.1%", "1%", "10%", "100%"],
            row=1,
            col=column,
        )
        fig.update_xaxes(title_text="harmless text", row=2, col=column)
    fig.update_yaxes(range=[-0.03, 1.03], tickformat=".0%", row=1)
    highest = max(d.false_alarms.high for d in rows)
    fig.update_yaxes(tickformat=".0%", range=[0, min(1.0, 1.1 * highest)], row=2)
    fig.update_yaxes(title_text="attacks detected", row=1, col=1)
    fig.update_yaxes(title_text=f"pieces that raise the alarm<br>at threshold {result.threshold:g}", row=2, col=1)
    title = f"{html.escape(result.model.name)}: attacks seen in sink neurons at later positions"
    fig.update_layout(
        title={"text": title, "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=420 * len(contexts) + 120,
        height=760,
        margin={"l": 90, "r": 20, "t": 90, "b": 120},
        font={"size": 13},
        barmode="group",
        legend={"orientation": "h", "y": -0.12, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def _alarms(fig: Any, mine: list[Any], rules: list[tuple[int, int]], column: int) -> None:
    longest = max((d.length for d in mine), default=0)
    for rule, color in zip(rules, (GREY, BLUE, ORANGE, GREEN), strict=False):
        ours = [d for d in mine if d.length == longest and (d.hits, d.window) == rule and d.harmless != "all"]
        name = f"false alarms, {rule[0]} of {rule[1]}"
        fig.add_bar(
            x=[html.escape(d.harmless) for d in ours],
            y=[d.false_alarms.share for d in ours],
            name=name,
            legendgroup=name,
            marker_color=color,
            showlegend=not any(t.name == name for t in fig.data),
            error_y={
                "array": [d.false_alarms.high - d.false_alarms.share for d in ours],
                "arrayminus": [d.false_alarms.share - d.false_alarms.low for d in ours],
                "thickness": 1,
                "width": 3,
            },
            row=2,
            col=column,
        )
