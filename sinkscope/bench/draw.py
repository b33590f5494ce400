"""Drawings of a benchmark table: score beside cost, and maps of depth and length."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.bench.table import PERCENT, BenchGroup, BenchTable
from sinkscope.bench.task import task_class
from sinkscope.measure.style import COLOURS, finished, panels


def draw_bench(result: BenchTable) -> go.Figure:
    """Draw the score of each method with 95 % intervals, and the score against the tokens that a step reads."""
    groups = result.groups
    main = task_class(groups[0].task).main
    fig = panels([main, f"{main} over tokens read per decoding step"], [0.6, 0.4])
    titles = list(dict.fromkeys((group.model, group.set) for group in groups))
    for number, title in enumerate(titles):
        alike = [group for group in groups if (group.model, group.set) == title]
        colour = COLOURS[number % len(COLOURS)]
        name = html.escape(f"{title[1]}, {title[0]}")
        methods = [html.escape(group.method) for group in alike]
        scores = [group.score for group in alike]
        errors = _intervals(alike)
        fig.add_bar(x=methods, y=scores, error_y=errors, name=name, marker_color=colour, row=1, col=1)
        fig.add_scatter(
            x=[group.read for group in alike],
            y=scores,
            text=methods,
            mode="markers+text",
            textposition="top center",
            marker_color=colour,
            showlegend=False,
            row=1,
            col=2,
        )
    fig.update_xaxes(tickangle=-35, col=1)
    fig.update_xaxes(title_text="tokens read per decoding step", col=2)
    fig.update_yaxes(title_text=main)
    if main in PERCENT:
        fig.update_yaxes(tickformat=".0%", range=[0, 1.05])
    return finished(fig, result, width=1300, height=560, legend=-0.4, bottom=170, barmode="group")


def _intervals(groups: list[BenchGroup]) -> dict[str, Any]:
    above = [group.high - group.score for group in groups]
    below = [group.score - group.low for group in groups]
    return {"array": above, "arrayminus": below, "thickness": 1, "width": 3}
