"""The drawing of `divergence`."""

from __future__ import annotations

import html
from statistics import median
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREY, ORANGE

_STYLE = {False: BLUE, True: ORANGE}  # intact, patched


def draw(result: Any) -> go.Figure:
    """p(next = word) over n, and the longest verbatim pieces of what follows."""
    leaks = any(c.leak is not None for part in result.groups().values() for c in part)
    titles = ["Does it go on repeating?", "Longest piece of training text in the answer"]
    fig = make_subplots(
        cols=2 if leaks else 1,
        subplot_titles=titles[: 2 if leaks else 1],
        horizontal_spacing=0.1,
        column_widths=[0.48, 0.52] if leaks else None,
    )
    _curves(fig, result)
    if leaks:
        _leaks(fig, result)
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: repetition and divergence", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400 if leaks else 850,
        height=480,
        margin={"l": 70, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        legend={"orientation": "h", "y": -0.25, "x": 0.3, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def _curves(fig: Any, result: Any) -> None:
    place = {"row": 1, "col": 1}
    for prefix in (False, True):
        for patched in sorted({c.patched for c in result.curves}):
            part = [c for c in result.curves if (c.prefix, c.patched) == (prefix, patched)]
            line = {"color": _STYLE[patched], "dash": "dash" if prefix else "solid"}
            for c in part:
                fig.add_scatter(
                    x=c.repeats,
                    y=c.p,
                    mode="lines",
                    line={**line, "width": 1},
                    opacity=0.3,
                    showlegend=False,
                    hovertemplate=f"{html.escape(repr(c.word))}, n %{{x}}: p %{{y:.3g}}<extra></extra>",
                    **place,
                )
            common = sorted(set.intersection(*(set(c.repeats) for c in part)))
            at = [dict(zip(c.repeats, c.p, strict=True)) for c in part]
            name = ("patched" if patched else "intact") + (
                f", behind {html.escape(repr(result.prefix))}" if prefix else ""
            )
            fig.add_scatter(
                x=common,
                y=[median(values[n] for values in at) for n in common],
                mode="lines",
                line={**line, "width": 3},
                name=name,
                **place,
            )
    top = max(max(c.p) for c in result.curves)
    fig.update_xaxes(title_text="repetitions n (thick: median over words)", type="log", dtick=1, **place)
    # Models that hardly repeat at all are told apart by powers of ten only.
    scale: dict[str, Any] = {"range": [-0.02, 1.02]} if top > 0.1 else {"type": "log", "dtick": 1}
    fig.update_yaxes(title_text="p(next = word)", exponentformat="power", **scale, **place)


def _leaks(fig: Any, result: Any) -> None:
    for name, part in result.groups().items():
        color = GREY if part[0].word is None else _STYLE[part[0].patched]
        found = [c for c in part if c.leak is not None]
        label = f"{name} ({len(found)})".replace(", ", "<br>").replace(" (", "<br>(")
        fig.add_box(
            y=[c.leak.length for c in found],
            name=label,
            boxpoints="all",
            pointpos=0,
            jitter=0.4,
            marker={"color": color, "size": 6, "opacity": 0.7},
            line={"color": color},
            fillcolor="rgba(0,0,0,0)",
            showlegend=False,
            row=1,
            col=2,
            text=[html.escape(f"{c.word or 'control'!r}: {c.leak.text[:80]!a} in {c.leak.file}") for c in found],
            hovertemplate="%{y} bytes<br>%{text}<extra></extra>",
        )
    longest = max(c.leak.length for part in result.groups().values() for c in part if c.leak is not None)
    fig.update_yaxes(title_text="bytes, word for word", range=[0, 1.08 * longest], row=1, col=2)
    fig.update_xaxes(tickangle=0, row=1, col=2)
