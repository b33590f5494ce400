"""The drawing of `cluster_attack`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED

_COLORS = {"cluster": BLUE, "random": GREY, "repeated": GREEN, "greedy": ORANGE, "coordinate": RED}
_WIDTHS = {"cluster": 7, "random": 3, "repeated": 4.5, "greedy": 3, "coordinate": 1.2}  # lines that lie on each other
_WAYS = {
    "cluster": "drawn from one cluster",
    "random": "random tokens",
    "repeated": "one token repeated",
    "greedy": "greedy search in a cluster",
    "coordinate": "coordinate search in a cluster",
}


def draw(result: Any) -> go.Figure:
    """A column for each context: success at each position, sequences that succeed by length, and by threshold."""
    contexts = list(dict.fromkeys(a.context for a in result.attacks))
    if not contexts:
        return nothing(result)
    names = {"BOS": "after BOS", "no BOS": "without BOS", "chat": "behind a chat prefix"}
    rows = (
        "share of sequences above half<br>of BOS's norm, by position",
        "sequences above it at half of<br>their positions or more",
        "sequences above a threshold<br>somewhere, longest",
    )
    fig: Any = make_subplots(
        rows=3,
        cols=len(contexts),
        subplot_titles=[names.get(c, html.escape(c)) for c in contexts],
        horizontal_spacing=0.05,
        vertical_spacing=0.11,
        shared_yaxes=True,
    )
    for column, context in enumerate(contexts, 1):
        mine = [a for a in result.attacks if a.context == context]
        longest = max(a.length for a in mine)
        for source, color in _COLORS.items():
            ours = sorted((a for a in mine if a.source == source), key=lambda a: a.length)
            style: dict[str, Any] = {
                "name": _WAYS[source],
                "legendgroup": source,
                "line": {"color": color, "width": _WIDTHS[source]},
                "marker": {"size": 4 + _WIDTHS[source]},
            }
            if ours and ours[-1].length == longest:
                last = ours[-1]
                start = longest - len(last.by_position) + 1
                fig.add_scatter(
                    x=list(range(start, longest + 1)),
                    y=last.by_position,
                    mode="lines",
                    showlegend=column == 1,
                    row=1,
                    col=column,
                    **style,
                )
                fig.add_scatter(
                    x=result.thresholds,
                    y=last.any_swept,
                    mode="lines+markers",
                    showlegend=False,
                    row=3,
                    col=column,
                    **style,
                )
            fig.add_scatter(
                x=[a.length for a in ours],
                y=[a.most.share for a in ours],
                mode="lines+markers",
                showlegend=False,
                error_y={
                    "array": [a.most.high - a.most.share for a in ours],
                    "arrayminus": [a.most.share - a.most.low for a in ours],
                    "thickness": 1,
                    "width": 3,
                },
                row=2,
                col=column,
                **style,
            )
        lengths = sorted({a.length for a in mine})
        fig.update_xaxes(title_text=f"token of a sequence of {longest}", row=1, col=column)
        fig.update_xaxes(title_text="tokens of a sequence", type="log", tickvals=lengths, row=2, col=column)
        fig.update_xaxes(title_text="threshold, of BOS's norm", row=3, col=column)
        fig.add_vline(result.success, line={"color": GREY, "dash": "dot", "width": 1}, row=3, col=column)
    for row, title in enumerate(rows, 1):
        fig.update_yaxes(title_text=title, row=row, col=1)
    fig.update_yaxes(range=[-0.03, 1.03], tickformat=".0%")
    title = f"{html.escape(result.model.name)}: sinks after layer {result.sink_layer} without a repeated token"
    fig.update_layout(
        title={"text": title, "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=420 * len(contexts) + 120,
        height=960,
        margin={"l": 90, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        legend={"orientation": "h", "y": -0.09, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def nothing(result: Any) -> go.Figure:
    """A picture that says why there is nothing to draw."""
    fig = go.Figure()
    fig.add_annotation(text=html.escape(result.summary()), showarrow=False, font={"size": 16})
    fig.update_layout(template="plotly_white", width=800, height=260)
    fig.update_xaxes(visible=False)
    fig.update_yaxes(visible=False)
    return fig
