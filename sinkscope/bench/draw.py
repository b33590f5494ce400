"""Drawing of a benchmark table: score beside cost."""

from __future__ import annotations

import html
from typing import Any

from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class


def draw_bench(result: Any) -> Any:
    """Draw the score of each method with 95 % intervals, and on each bar the tokens that a decoding step reads.

    Args:
        result: The `BenchTable`.
    """
    import plotly.express as px

    from sinkscope.results.style import COLOURS, figure_of  # with plotly, which a printed table does not need

    main = task_class(result.groups[0].task).main
    frame = result.to_frame()
    frame["set"] = (frame["set"] + ", " + frame["model"]).map(html.escape)
    frame["method"] = frame["method"].map(html.escape)
    frame["above"], frame["below"] = frame["high"] - frame[main], frame[main] - frame["low"]
    fig = px.bar(
        frame,
        x="method",
        y=main,
        color="set",
        text="read",
        error_y="above",
        error_y_minus="below",
        color_discrete_sequence=[*COLOURS],
    )
    fig.update_traces(texttemplate="reads %{text:,.0f}", textposition="inside", insidetextanchor="start")
    fig.update_xaxes(tickangle=-35, title_text="")
    if main in PERCENT:
        fig.update_yaxes(tickformat=".0%", range=[0, 1.05])
    return figure_of(fig, result, width=1000, height=560, legend=-0.4, bottom=170, barmode="group")
