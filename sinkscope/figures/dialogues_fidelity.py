"""The drawing of fidelity: divergence, agreement and mass kept of every method."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.bench.dialogues.fidelity_table import head_of, title
from sinkscope.bench.dialogues.tables import label, overall
from sinkscope.figures.style import BLUE, GREEN, ORANGE

_PANELS = (
    ("kl", "KL(full || method), nats a token", BLUE, ".3g"),
    ("agree", "same likeliest token", ORANGE, ".1%"),
    ("kept", "attention mass kept", GREEN, ".1%"),
)


def draw(result: Any) -> go.Figure:
    """A row per task, model and answers: three panels of bars, a bar per method, over all positions."""
    heads = list(dict.fromkeys(map(head_of, result.groups)))
    rows = [overall([g for g in result.groups if head_of(g) == head]) for head in heads]
    titles = [
        (f"{html.escape(title(head))}<br>" if field == "kl" else "") + name
        for head in heads
        for field, name, _, _ in _PANELS
    ]
    heights = [len(mine) + 3 for mine in rows]
    fig = make_subplots(
        rows=len(heads),
        cols=3,
        subplot_titles=titles,
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=min(0.3, 4 / (sum(heights) + 4)),
        row_heights=heights,
    )
    for row, mine in enumerate(rows, 1):
        names = [html.escape(label(g)) for g in mine]
        for col, (field, name, colour, form) in enumerate(_PANELS, 1):
            fig.add_bar(
                y=names,
                x=[getattr(g, field) for g in mine],
                name=name,
                orientation="h",
                marker_color=colour,
                showlegend=False,
                text=[_text(g, field, form) for g in mine],
                textposition="outside",
                cliponaxis=False,
                customdata=[(g.tokens, g.questions) for g in mine],
                hovertemplate="%{y}: %{text}<br>%{customdata[0]} tokens of %{customdata[1]} answers<extra></extra>",
                row=row,
                col=col,
            )
            if field != "kl":
                fig.update_xaxes(tickformat=".0%", range=[0, 1.15], row=row, col=col)
            else:
                fig.update_xaxes(range=[0, 1.4 * max(g.kl for g in mine) or 1], row=row, col=col)
        fig.update_yaxes(autorange="reversed", row=row)
    fig.update_layout(
        title={"text": "Beside full attention, along the same text", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1300,
        height=130 + 30 * sum(heights),
        font={"size": 13},
        margin={"l": 20, "r": 50, "t": 110, "b": 50},
    )
    return fig


def _text(group: Any, field: str, form: str) -> str:
    value = getattr(group, field)
    if value is None:
        return "-"
    error = f" ± {1.96 * group.kl_error:.2g}" if field == "kl" and group.kl_error else ""
    return f"{value:{form}}{error}"
