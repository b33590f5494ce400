"""The drawing of `locking`."""

from __future__ import annotations

import html
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.figures.style import BLUE, GREEN, GREY, ORANGE, RED

_BARS = 16


def draw(result: Any) -> go.Figure:
    """What the loop adds to every head, the heads it adds most to, and the scores along the text beside diversity."""
    fig = make_subplots(
        rows=2,
        cols=2,
        specs=[[{}, {}], [{"colspan": 2}, None]],
        vertical_spacing=0.16,
        horizontal_spacing=0.1,
        subplot_titles=["What the loop adds", "Heads it adds most to", "Along the text"],
        row_heights=[0.5, 0.5],
    )
    _map(fig, result)
    _bars(fig, result)
    _curves(fig, result)
    ends = "no loop"
    if result.loop_onset is not None:
        ends = f"loop of period {result.period} from position {result.loop_onset}"
    locked = sum(h.gain >= 0.2 for h in result.heads)
    fig.update_layout(
        title={
            "text": f"{html.escape(result.model.name)}: {ends}, {locked} of {len(result.heads)} heads locked",
            "x": 0.01,
            "xanchor": "left",
        },
        template="plotly_white",
        width=1300,
        height=850,
        margin={"l": 70, "r": 30, "t": 90, "b": 60},
        font={"size": 13},
        barmode="overlay",
        legend={"orientation": "h", "y": -0.1, "x": 1, "xanchor": "right"},
    )
    return fig


def _map(fig: Any, result: Any) -> None:
    layers = sorted({h.layer for h in result.heads})
    heads = sorted({h.head for h in result.heads})
    gain = {(h.layer, h.head): h for h in result.heads}
    fig.add_heatmap(
        x=heads,
        y=layers,
        z=[[gain[la, h].gain for h in heads] for la in layers],
        zmid=0,
        zmin=-1,
        zmax=1,
        colorscale=[[0, ORANGE], [0.5, "#f7f7f7"], [1, BLUE]],
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "gain"}, "x": 0.455, "y": 0.79, "len": 0.46, "thickness": 12},
        customdata=[[[gain[la, h].score, gain[la, h].mass, gain[la, h].width] for h in heads] for la in layers],
        hovertemplate="layer %{y}, head %{x}: gain %{z:.2f}<br>score %{customdata[0]:.2f}, mass on the suffix "
        "%{customdata[1]:.2f}, on %{customdata[2]:.1f} positions<extra></extra>",
        row=1,
        col=1,
    )
    fig.update_xaxes(title_text="head", dtick=max(1, len(heads) // 16), row=1, col=1)
    fig.update_yaxes(title_text="layer", dtick=max(1, len(layers) // 16), row=1, col=1)


def _bars(fig: Any, result: Any) -> None:
    top = result.heads[:_BARS]
    names = [f"{h.layer}.{h.head}" for h in top]
    for name, values, color, width in (
        ("in the loop", [h.score for h in top], BLUE, 0.8),
        ("in ordinary text", [h.healthy_score for h in top], GREY, 0.45),
    ):
        if any(v is not None for v in values):
            fig.add_bar(
                x=names,
                y=values,
                name=f"score {name}",
                marker_color=color,
                width=width,
                customdata=[[h.mass, h.stability] for h in top],
                row=1,
                col=2,
                hovertemplate="%{x}: %{y:.3f}<br>in the loop: mass %{customdata[0]:.2f}, stability %{customdata[1]:.2f}"
                f"<extra>{name}</extra>",
            )
    fig.update_xaxes(title_text="layer.head", type="category", row=1, col=2)
    fig.update_yaxes(title_text="score", range=[0, 1.02], row=1, col=2)


def _curves(fig: Any, result: Any) -> None:
    for name, values, color, dash in (
        ("score of the locked heads", result.locked_curve, BLUE, "solid"),
        ("of all others", result.other_curve, GREEN, "solid"),
        ("of the locked heads in ordinary text", result.healthy_curve, GREY, "solid"),
        (f"type-token ratio of {result.window} tokens", result.diversity, RED, "dot"),
    ):
        if values:
            fig.add_scatter(
                x=result.positions,
                y=values,
                mode="lines",
                name=name,
                line={"color": color, "dash": dash},
                row=2,
                col=1,
                hovertemplate="position %{x}: %{y:.3f}<extra>" + name + "</extra>",
            )
    events = (
        ("prompt ends", result.prompt_tokens, GREY, 0.98),
        ("loop begins", result.loop_onset, ORANGE, 0.86),
        ("heads lock", result.locking_onset, BLUE, 0.74),
        ("last new 4-gram", result.last_new, RED, 0.62),
        ("diversity has collapsed", result.collapse, RED, 0.5),
    )
    for name, at, color, height in events:
        if at is not None:
            fig.add_vline(at, line={"color": color, "width": 1, "dash": "dash"}, row=2, col=1)
            fig.add_annotation(
                x=at,
                y=height,
                text=f" {name}: {at}",
                showarrow=False,
                xanchor="left",
                font={"color": color, "size": 11},
                row=2,
                col=1,
            )
    fig.update_xaxes(title_text="position", row=2, col=1)
    fig.update_yaxes(range=[0, 1.02], row=2, col=1)
