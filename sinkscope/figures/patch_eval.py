"""The drawing of `evaluate_patch`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import GREY, ORANGE, finished, panels


def draw(result: Any) -> go.Figure:
    """Differences from the original, patched and random, with two standard errors."""
    text = [s for s in result.scores if s.metric == "perplexity"]
    tasks = [s for s in result.scores if s.metric != "perplexity"]
    shown = [p for p in (("perplexity", text), ("benchmarks", tasks)) if p[1]]
    fig = panels([name for name, _ in shown], [0.3, 0.7], spacing=0.12)
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
        fig.update_yaxes(
            title_text="change, %" if ppl else "change, points", zeroline=True, zerolinecolor=GREY, row=1, col=col
        )
        fig.update_xaxes(
            tickvals=list(range(len(names))),
            ticktext=names,
            range=[-0.6, len(names) - 0.4],
            showgrid=False,
            zeroline=False,
            tickangle=0,
            row=1,
            col=col,
        )
    found = "cost of the patch (bars: two standard errors; below: original)"
    return finished(fig, result, found, width=700 + 90 * len(tasks), height=480, bottom=100, legend=-0.25)
