"""Results drawn with plotly; nothing is measured here."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.errors import SinkscopeError
from sinkscope.results import Result

# Okabe and Ito's colours: told apart also without colour vision
BLUE, ORANGE, GREEN, GREY, RED = "#0072b2", "#e69f00", "#009e73", "#8c8c8c", "#d55e00"
_BAND = "rgba(140,140,140,0.25)"


def figure(result: Result) -> go.Figure:
    """The drawing of a result of any kind.

    Raises:
        SinkscopeError: there is none of this kind.
    """
    if result.kind not in _DRAW:
        raise SinkscopeError(
            f"no figure is drawn of {result.kind!r}: there are {', '.join(_DRAW)}; use --json or --html"
        )
    return _DRAW[result.kind](result)


def find_sinks(result: Any) -> go.Figure:
    """Norms per layer, contributions of the neurons, and their ablation against the control."""
    layer = result.sink_layer
    found = "no sink" if layer is None else f"sink in layer {layer}"
    fig = make_subplots(
        cols=3,
        subplot_titles=("Norm of the residual stream", "What each neuron writes", "Norm lost by ablation"),
        column_widths=[0.36, 0.28, 0.36],
        horizontal_spacing=0.075,
    )
    _norms(fig, result)
    _contributions(fig, result.neurons)
    _ablation(fig, result)
    fig.update_layout(
        title={"text": f"{html.escape(result.model.name)}: {found}", "x": 0.01, "xanchor": "left"},
        template="plotly_white",
        width=1400,
        height=460,
        margin={"l": 70, "r": 20, "t": 90, "b": 110},
        font={"size": 13},
        barmode="group",
        bargap=0.25,
        legend={"orientation": "h", "y": -0.27, "x": 0.5, "xanchor": "center", "yanchor": "top"},
    )
    return fig


def _norms(fig: go.Figure, result: Any) -> None:
    first = list(result.first_token_norm)
    low, middle, high = zip(*map(_spread, result.typical_norm), strict=True) if result.typical_norm else ((), (), ())
    layers = list(range(len(first)))
    known = [i for i in range(len(low)) if low[i] is not None and high[i] is not None]
    if known:
        fig.add_scatter(
            x=known + known[::-1],
            y=[high[i] for i in known] + [low[i] for i in reversed(known)],
            fill="toself", fillcolor=_BAND, mode="none", name="typical text, 5-95 %", hoverinfo="skip", row=1, col=1,
        )  # fmt: skip
    style = {"mode": "lines+markers", "row": 1, "col": 1}
    fig.add_scatter(x=layers[: len(middle)], y=middle, name="typical text, median", line={"color": GREY}, **style)
    fig.add_scatter(x=layers, y=first, name="first token", line={"color": BLUE, "width": 3}, **style)
    if result.sink_layer is not None:
        fig.add_vline(
            result.sink_layer, line={"color": RED, "dash": "dash"}, annotation_text=f"layer {result.sink_layer}",
            annotation_font_color=RED, annotation_position="bottom right", row=1, col=1,
        )  # fmt: skip
    fig.update_xaxes(title_text="layer", dtick=max(1, len(first) // 12), row=1, col=1)
    fig.update_yaxes(title_text="L2 norm", type="log", exponentformat="power", dtick=1, row=1, col=1)


def _spread(entry: Any) -> tuple[float | None, float | None, float | None]:
    """(5 %, median, 95 %) of an entry of `typical_norm`: a number, or those three; None where not read."""
    if entry is None or isinstance(entry, int | float):
        return entry, entry, entry
    get = entry.get if isinstance(entry, dict) else lambda name: getattr(entry, name)
    return get("p5"), get("median"), get("p95")


def _label(neuron: Any) -> str:
    expert = "" if neuron.expert is None else f"<br>expert {neuron.expert}"
    return f"L{neuron.layer}{expert}<br>{neuron.neuron}"


def _contributions(fig: go.Figure, neurons: Any) -> None:
    fig.add_bar(
        x=[_label(n) for n in neurons],
        y=[n.contribution_norm for n in neurons],
        marker_color=[ORANGE if n.causal else GREY for n in neurons],
        text=["" if n.share is None else f"{n.share:.0%}" for n in neurons],
        textposition="outside", cliponaxis=False, showlegend=False, row=1, col=2,
        hovertemplate="%{x}: norm %{y:.4g}, %{text} of the MLP's<extra></extra>",
    )  # fmt: skip
    fig.update_xaxes(title_text="neuron (orange: causal; label: share)", type="category", tickangle=0, row=1, col=2)
    fig.update_yaxes(title_text="norm of its contribution", row=1, col=2)


def _ablation(fig: go.Figure, result: Any) -> None:
    names = [_label(n) for n in result.neurons]
    bars = (
        ("first token", "ablation_drop", BLUE),
        ("last repeated token", "repeat_drop", GREEN),
        ("control: largest of 20 random draws", "control_drop", GREY),
    )
    lowest = 0.0
    for name, field, color in bars:
        values = [getattr(n, field) for n in result.neurons]
        lowest = min([lowest, *(v for v in values if v is not None)])
        if any(value is not None for value in values):
            fig.add_bar(x=names, y=values, name=name, marker_color=color, row=1, col=3)
    if result.set_drop is not None and result.neurons:
        fig.add_bar(
            x=["all<br>causal"], y=[result.set_drop], name="all causal neurons, first token", marker_color=ORANGE,
            row=1, col=3,
        )  # fmt: skip
    fig.update_xaxes(title_text="neuron", type="category", tickangle=0, row=1, col=3)
    fig.update_yaxes(
        title_text="share of the norm lost", tickformat=".0%", range=[max(lowest * 1.1, -1.0), 1.05], row=1, col=3
    )


_DRAW: dict[str, Callable[[Any], go.Figure]] = {"find-sinks": find_sinks}
