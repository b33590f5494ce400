"""The figure of `check`; plotly is loaded when it is drawn."""

from __future__ import annotations

import html
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHOWN_RECORDS = 60  # lines


def draw_check(result: Any) -> go.Figure:
    """Diversity of the window over the tokens, a line per record, with the detection of each repetition.

    Args:
        result: A `LoopCheck`.
    """
    import pandas as pd
    import plotly.express as px

    from sinkscope.results.style import BLUE, GREY, ORANGE, RED, figure_of

    colours = {"clean": GREY, "suspicious": BLUE, "looped": ORANGE, "loops": RED}
    if result.model.family == "session":
        first = result.records[:SHOWN_RECORDS]
        names = [html.escape(record.name) for record in first]
        wasted = [record.wasted or 0 for record in first]
        useful = [record.tokens - (record.wasted or 0) for record in first]
        figure = px.bar(x=names, y=[useful, wasted], color_discrete_sequence=[GREY, RED])
        figure.for_each_trace(lambda bar: bar.update(name="wasted" if bar.marker.color == RED else "other tokens"))
        figure.update_layout(xaxis_title_text="", yaxis_title_text="tokens", legend_title_text="")
        return figure_of(figure, result, width=1000, height=520)
    # Loops are drawn above the others.
    records = sorted(result.records, key=lambda record: [*colours].index(record.verdict))[-SHOWN_RECORDS:]
    named = [replace(record, name=html.escape(record.name)) for record in records]
    frame = pd.DataFrame(named).explode(["steps", "curve"])
    lines: dict[str, Any] = {"line_group": "name", "hover_name": "name", "color": "verdict"}
    figure = px.line(frame, render_mode="svg", x="steps", y="curve", color_discrete_map=colours, **lines)
    alarms = frame[frame["detected"].notna() & (frame["steps"] >= frame["detected"])].groupby("name").first()
    marker = {"color": "black", "size": 9, "symbol": "x"}
    figure.add_scatter(x=alarms["detected"], y=alarms["curve"], mode="markers", marker=marker, name="detected")
    threshold = result.settings["theta_ttr"]
    window = html.escape(str(result.settings["window"]))
    figure.add_hline(threshold, line={"color": GREY, "dash": "dot"}, annotation_text=f"threshold {threshold:g}")
    figure.update_xaxes(title_text=f"tokens ({len(records)} of {len(result.records)} records)", rangemode="tozero")
    figure.update_yaxes(title_text=f"type-token ratio of the last {window} tokens", range=[0, 1.03])
    return figure_of(figure, result, width=1000, height=520)
