"""The drawing of `sink_atlas`."""

from __future__ import annotations

import html
import math
from bisect import bisect_right
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.clusters import COLOURS
from sinkscope.figures.style import GREY, RED

_BINS = 24
_POINTS = 4000  # more would only make the file large


def draw(result: Any) -> go.Figure:
    """Repetitions until a sink by head, and frequency against the embedding's norm with resisting tokens marked."""
    fig = make_subplots(
        cols=2,
        column_widths=[0.5, 0.5],
        horizontal_spacing=0.08,
        subplot_titles=["Repetitions until a sink", "What resisting tokens share"],
    )
    if result.ids:
        _histogram(fig, result)
        _shared(fig, result)
    said = f"repetition of {len(result.ids):,} tokens" if result.ids else "no sink"
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: {said}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1300,
        height=520,
        margin={"l": 70, "r": 20, "t": 90, "b": 130},
        font={"size": 13},
        barmode="stack",
        bargap=0.05,
        legend={"orientation": "h", "y": -0.3, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def _heads(result: Any) -> list[tuple[int | None, str, str]]:
    """(head, name, colour), the largest first, no head last."""
    found = [r.head for r in result.by_head]
    return [
        (h, "no single head" if h is None else f"head {h}", GREY if h is None else COLOURS[i % len(COLOURS)])
        for i, h in enumerate(found)
    ]


def _histogram(fig: Any, result: Any) -> None:
    """Equal bins (of the logarithm, where it spans much); what is far off or never gets there has its own."""
    got = sorted(n for n in result.repeats if n is not None) or [1]
    low, high = got[len(got) // 50], got[-1 - len(got) // 50]
    edges = list(range(low, high + 1, -(-(high + 1 - low) // _BINS)))
    if high >= 4 * low:
        edges = sorted({round(low * (high / low) ** (i / _BINS)) for i in range(_BINS)})
    labels = [f"under {low:,}", *(f"{n:,}" for n in edges), f"over {high:,}", "never"]
    for head, name, colour in _heads(result):
        counts = [0] * len(labels)
        for h, n in zip(result.head, result.repeats, strict=True):
            if h == head:
                counts[-1 if n is None else -2 if n > high else bisect_right(edges, n)] += 1
        fig.add_bar(
            x=list(range(len(labels))),
            y=counts,
            name=name,
            marker_color=colour,
            customdata=labels,
            row=1,
            col=1,
            hovertemplate="%{customdata} repetitions: %{y} tokens<extra>" + name + "</extra>",
        )
    inner = list(range(1, len(labels) - 2))
    ticks = [0, *inner[2 :: max(1, len(inner) // 5)], len(labels) - 2, len(labels) - 1]
    fig.update_xaxes(
        tickvals=ticks,
        ticktext=[labels[i] for i in ticks],
        tickangle=-40,
        title_text=f"repetitions until half of the first token's norm in layer {result.sink_layer}",
        row=1,
        col=1,
    )
    fig.update_yaxes(title_text="tokens", row=1, col=1)


def _shared(fig: Any, result: Any) -> None:
    every = max(1, math.ceil(len(result.ids) / _POINTS))
    rows = list(zip(result.frequency, result.embedding_norm, result.tokens, result.repeats, strict=True))
    for wanted, name, colour in ((False, "becomes a sink", GREY), (True, "resists", RED)):
        chosen = [r for r in rows if (r[3] is None) == wanted]
        chosen = chosen if wanted and len(chosen) < _POINTS else chosen[::every]
        fig.add_scatter(
            x=[max(f, 0.5) for f, *_ in chosen],
            y=[n for _, n, *_ in chosen],
            mode="markers",
            name=name,
            marker={"color": colour, "size": 5, "opacity": 0.6},
            row=1,
            col=2,
            text=[f"{html.escape(repr(t))}, {'never' if n is None else n} repetitions" for _, _, t, n in chosen],
            hovertemplate="%{text}<br>%{x} in the text, norm %{y:.3g}<extra></extra>",
        )
    fig.update_xaxes(
        type="log",
        title_text=f"times in the neutral text ({result.text_tokens:,} tokens; 0 drawn at 0.5)",
        dtick=1,
        row=1,
        col=2,
    )
    fig.update_yaxes(title_text="norm of the embedding", row=1, col=2)
