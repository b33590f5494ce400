"""The drawing of `repeat_norms`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BAND, BLUE, GREEN, GREY, ORANGE, RED

_COLOURS = (ORANGE, GREEN, "#cc79a7", "#56b4e9", RED, "#7a5c00", "#4b3f8f")
_TITLES = {
    "intact": "intact",
    "one": "largest sink neuron zeroed",
    "set": "all causal neurons zeroed",
    "control": "as many random neurons zeroed",
}


def draw(result: Any) -> go.Figure:
    """Norm at the sink layer over the number of repetitions, a panel per condition on one scale."""
    conditions = [c.condition for c in result.sequences[0].curves] if result.sequences else ["intact"]
    many = len(conditions) > 1
    fig = make_subplots(
        cols=len(conditions),
        shared_yaxes=True,
        horizontal_spacing=0.02,
        subplot_titles=[_title(result, c) for c in conditions] if many else None,
    )
    for column, condition in enumerate(conditions, 1):
        _panel(fig, result, condition, column)
    where = "no sink" if result.sink_layer is None else f"repeated tokens at sink layer {result.sink_layer}"
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: {where}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400 if many else 1000,
        height=520,
        margin={"l": 70, "r": 20, "t": 90, "b": 70},
        font={"size": 13},
        legend={"x": 1.01, "y": 1},
    )
    fig.update_xaxes(title_text="repetitions" if len(conditions) < 3 else "repeated tokens")
    fig.update_yaxes(type="log", exponentformat="power", dtick=1)
    fig.update_yaxes(title_text="L2 norm of the residual stream", col=1)
    return fig


def _title(result: Any, condition: str) -> str:
    curve = next(c for c in result.sequences[0].curves if c.condition == condition)
    names = ", ".join(".".join(map(str, site[1:])) for site in curve.sites[:4])
    more = ", ..." if len(curve.sites) > 4 else ""
    return _TITLES[condition] + (f"<br>({names}{more})" if names else "")


def _panel(fig: Any, result: Any, condition: str, column: int) -> None:
    style: dict[str, Any] = {"row": 1, "col": column}
    x = list(result.counts)
    if result.typical_norm is not None:
        fig.add_scatter(
            x=[x[0], x[-1], x[-1], x[0]],
            y=[result.typical_high, result.typical_high, result.typical_low, result.typical_low],
            fill="toself",
            fillcolor=BAND,
            mode="none",
            name="typical text, 5-95 %",
            hoverinfo="skip",
            legendgroup="band",
            showlegend=column == 1,
            **style,
        )
        _level(fig, x, result.typical_norm, "typical text, median", {"color": GREY}, column)
    for i, sequence in enumerate(result.sequences):
        curve = next(c for c in sequence.curves if c.condition == condition)
        cycle = len(sequence.ids) > 1
        label = html.escape(f"cycle of {len(sequence.ids)}" if cycle else sequence.label)
        line = {"color": "#000000" if cycle else _COLOURS[i % len(_COLOURS)], "dash": "dash" if cycle else "solid"}
        fig.add_scatter(
            x=x,
            y=curve.norms,
            mode="lines",
            name=label,
            line=line,
            legendgroup=f"s{i}",
            showlegend=column == 1,
            **style,
        )
        if condition == "intact" and sequence.repeats is not None:
            fig.add_scatter(
                x=[sequence.repeats],
                y=[result.first_norm / 2],
                mode="markers",
                showlegend=False,
                legendgroup=f"s{i}",
                marker={"color": line["color"], "size": 9, "symbol": "diamond"},
                hovertemplate=f"{label}: {sequence.repeats} repetitions<extra></extra>",
                **style,
            )
    if result.sequences:
        first = next(c for c in result.sequences[0].curves if c.condition == condition).first_norm
        _level(fig, x, first, "first token, in this panel", {"color": BLUE, "width": 3}, column)
        _level(fig, x, result.first_norm / 2, "half of the first token's", {"color": BLUE, "dash": "dot"}, column)


def _level(fig: Any, x: list[int], value: float, name: str, line: dict[str, Any], column: int) -> None:
    fig.add_scatter(
        x=[x[0], x[-1]],
        y=[value, value],
        mode="lines",
        name=name,
        line=line,
        legendgroup=name,
        showlegend=column == 1,
        row=1,
        col=column,
    )
