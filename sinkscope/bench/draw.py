"""Drawing of a benchmark table: score beside cost."""

from __future__ import annotations

import html
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np

from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class

_FLATTENS = 10


def logarithmic(scores: Sequence[float]) -> bool:
    """Return whether the largest score would flatten most bars: it is over ten times the median of those above 0."""
    positive = [score for score in scores if score > 0]
    return bool(positive) and max(positive) > _FLATTENS * median(positive)


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
    elif logarithmic([*frame[main]]):
        lowest = frame[main][frame[main] > 0].min()
        shown = np.log10([lowest / 2, frame["high"].max() * 1.1])
        fig.update_yaxes(type="log", title_text=f"{main} (logarithmic)", range=shown)
    return figure_of(fig, result, width=1000, height=560, legend=-0.4, bottom=170, barmode="group")
