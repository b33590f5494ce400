"""Drawing of a benchmark table: score beside cost."""

from __future__ import annotations

import html
from typing import Any

import numpy as np

from sinkscope.bench.scores import PERCENT
from sinkscope.bench.task import task_class


def draw_bench(result: Any) -> Any:
    """Draw the score of each method with 95 % intervals, and the score against the tokens that a step reads.

    Args:
        result: The `BenchTable`.
    """
    from sinkscope.results.style import COLOURS, figure_of, panels  # with plotly, which a printed table does not need

    main = task_class(result.groups[0].task).main
    fig = panels([main, f"{main} over tokens read per decoding step"], [0.6, 0.4])
    frame = result.to_frame()
    titles = frame["set"] + ", " + frame["model"]
    for number, (title, rows) in enumerate(frame.groupby(titles, sort=False)):
        colour = COLOURS[number % len(COLOURS)]
        methods = rows["method"].map(html.escape).tolist()
        read = rows["read"].astype(object).replace(np.nan, None).tolist()
        errors = {
            "array": (rows["high"] - rows[main]).tolist(),
            "arrayminus": (rows[main] - rows["low"]).tolist(),
            "thickness": 1,
            "width": 3,
        }
        scores = rows[main].tolist()
        name = html.escape(str(title))
        fig.add_bar(x=methods, y=scores, error_y=errors, name=name, marker_color=colour, row=1, col=1)
        fig.add_scatter(
            x=read,
            y=scores,
            text=methods,
            mode="markers+text",
            cliponaxis=False,
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
    return figure_of(fig, result, width=1300, height=560, legend=-0.4, bottom=170, barmode="group")
