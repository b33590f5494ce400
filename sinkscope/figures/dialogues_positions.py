"""The drawing of `question_positions`: our shares with their intervals, and the paper's."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go

from sinkscope.figures.style import BLUE, GREY


def draw(result: Any) -> go.Figure:
    """A bar for each place of the question, and a diamond for LoopServe's Table 5."""
    names = [html.escape(share.position) for share in result.places]
    there = [share for share in result.places if share.share is not None]
    fig: Any = go.Figure()
    fig.add_bar(
        x=[html.escape(share.position) for share in there],
        y=[share.share for share in there],
        name="this log",
        marker_color=BLUE,
        customdata=[share.count for share in there],
        error_y={
            "type": "data",
            "symmetric": False,
            "thickness": 1,
            "array": [share.high - share.share for share in there],
            "arrayminus": [share.share - share.low for share in there],
        },
        hovertemplate="%{x}: %{y:.1%}, %{customdata} messages<extra></extra>",
    )
    fig.add_scatter(
        x=names,
        y=[share.paper_share for share in result.places],
        mode="markers",
        name="paper: LMSYS-Chat-1M",
        marker={"color": GREY, "size": 11, "symbol": "diamond"},
        customdata=[s.paper_count for s in result.places],
        hovertemplate="%{x}, paper: %{y:.1%}, %{customdata} messages<extra></extra>",
    )
    fig.update_layout(
        title={"text": f"Where questions stand in {html.escape(result.model.name)}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=800,
        height=460,
        font={"size": 13},
        margin={"l": 60, "r": 20, "t": 70, "b": 50},
    )
    fig.update_yaxes(tickformat=".0%", range=[0, 1.03], title_text="share of messages")
    return fig
