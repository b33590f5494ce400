"""The drawings of `find_sinks` and `why_sink`: norms, what writes each spike, attention, and bars of rows."""

from __future__ import annotations

from html import escape
from typing import Any

import plotly.graph_objects as go

from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, bars, figure_of, panels
from sinkscope.sinks.spikes.records import AS_IT_IS, ONE_OTHER, PURPOSE_CONTROLS, SpikeResult, part_of, run

COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7")
TITLES = (
    "Norm of the residual stream after each layer",
    "What each layer writes of each spike",
    "Attention to the first token (full blue: 100%)",
    "Heads that attend to the place of each spike",
)
ANSWERS = ("Share of the spike at an ordinary position, and at the place", "What later tokens lose, nats a token")


def draw(result: Any) -> go.Figure:
    """Draw the norms of a `FindSinks`, what writes and erases each spike, and the attention of heads."""
    fig = panels(TITLES, columns=2, spacing=0.12)
    for norms, name, colour in (
        (result.first_token_norm, "the first token, median", RED),
        (result.typical_norm, "later tokens, median", GREY),
    ):
        fig.add_scatter(y=norms, name=name, line={"color": colour}, row=1, col=1)
    shown = [spike for spike in result.spikes if spike.like is None]
    for spike, colour in zip(shown, COLOURS, strict=False):
        low, high = spike.layers
        fig.add_vrect(low - 0.5, high + 0.5, fillcolor=colour, opacity=0.15, line_width=0, row=1, col=1)
        draw_writers(fig, spike, colour)
        bars(fig, spike.table("effects").values(), "heads", colour, row=2, col=2)
        bars(fig, spike.table("controls").values(), "heads", GREY, row=2, col=2)
    fig.add_heatmap(z=result.heads, colorscale=["#ffffff", BLUE], zmin=0, zmax=1, showscale=False, row=2, col=1)
    fig.update_xaxes(title_text="layer", range=[-1.5, len(result.typical_norm) - 0.5], row=1)
    fig.update_yaxes(title_text="L2 norm", type="log", tickformat=",", nticks=8, row=1, col=1)
    fig.update_yaxes(title_text="share of the spike", tickformat=".0%", row=1, col=2)
    fig.update_xaxes(title_text="head", row=2, col=1)
    fig.update_yaxes(title_text="layer", autorange="reversed", row=2, col=1)
    fig.update_yaxes(title_text="heads", rangemode="tozero", row=2, col=2)
    return figure_of(fig, result, width=1100, height=860, legend=-0.12, bottom=110)


def draw_writers(fig: Any, spike: SpikeResult, colour: str) -> None:
    """Draw the shares of components at their layers, the embedding before the first, with what is needed on them."""
    parts = [*spike.table("components").values(), *spike.table("erasers").values()]
    layers = [-1 if part_of(row.name).layer is None else part_of(row.name).layer for row in parts]
    names: list[str] = []
    for row in parts:
        of_layer = [part for part in spike.needed if row.name == part or row.name == f"mlp {part_of(part).layer}"]
        names.append(escape(", ".join(of_layer)))
    shares, place = [row.get("share") for row in parts], {"base": 0, "offset": -0.4, "row": 1, "col": 2}
    fig.add_bar(x=layers, y=shares, text=names, name=run(*spike.layers), marker_color=colour, **place)


def draw_answers(result: Any) -> go.Figure:
    """Draw what makes a position the sink, and what the place is for, in the colours of effects and controls."""
    spike: SpikeResult | None = result.answered
    if spike is None:
        return draw(result)
    fig = panels(ANSWERS, columns=1)
    conditions = spike.table("conditions")
    controls = [row for name, row in conditions.items() if name in (AS_IT_IS, ONE_OTHER)]
    bars(fig, [row for row in conditions.values() if row not in controls], "left", BLUE, row=1, col=1)
    bars(fig, controls, "left", GREY, row=1, col=1)
    bars(fig, spike.table("purpose").values(), "loss", BLUE, row=2, col=1)
    bars(fig, spike.table(PURPOSE_CONTROLS).values(), "loss", GREY, row=2, col=1)
    fig.update_yaxes(tickformat=".0%", row=1, col=1)
    return figure_of(fig, result, width=1000, height=900)
