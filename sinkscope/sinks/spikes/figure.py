"""The drawings of `find_sinks` and `why_sink`: norms, attention, and bars of rows."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.results.style import BLUE, GREEN, GREY, ORANGE, RED, bars, figure_of
from sinkscope.sinks.spikes.spike import layers_words
from sinkscope.sinks.spikes.tables import Done

COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7")
PATTERNS = ("", "/", "x", ".")
"""What fills the bars of each spike, for whoever does not tell the colours apart."""
TITLES = (
    "Norm of the residual stream after each layer",
    "What components write of each spike, and what is written against it later",
    "Attention to the first token (full blue: 100%)",
    "Heads that attend to the place of each spike",
)
ANSWERS = ("Share of the spike at an ordinary position, and at the place", "What later tokens lose, nats a token")


def draw(result: Any) -> go.Figure:
    """Draw the norms of a `FindSinks`, what writes and erases each spike, and the attention of heads."""
    fig: Any = make_subplots(2, 2, subplot_titles=TITLES, horizontal_spacing=0.12)
    for norms, name, colour, dash in (
        (result.first_token_norm, "the first token, median", RED, "solid"),
        (result.typical_norm, "later tokens, median", GREY, "dash"),
    ):
        fig.add_scatter(y=norms, name=name, line={"color": colour, "dash": dash}, row=1, col=1)
    shown = [spike for spike in result.spikes if spike.like is None]
    for spike, colour, pattern in zip(shown, COLOURS, PATTERNS, strict=False):
        low, high = spike.layers
        words = layers_words(low, high)
        shade = {"fillcolor": colour, "opacity": 0.15, "line_width": 0, "annotation_text": words}
        fig.add_vrect(low - 0.5, high + 0.5, annotation_position="bottom left", row=1, col=1, **shade)
        bars(fig, [*spike.components, *spike.erasers], "share", colour, words, pattern, row=1, col=2)
        edits = [row for row in spike.effects if row.key.done is not Done.PART]
        bars(fig, edits, "heads", colour, pattern=pattern, row=2, col=2)
    fig.add_heatmap(z=result.heads, colorscale=["#ffffff", BLUE], zmin=0, zmax=1, showscale=False, row=2, col=1)
    fig.update_xaxes(title_text="layer", row=1, col=1)
    fig.update_yaxes(title_text="L2 norm", type="log", row=1, col=1)
    fig.update_yaxes(title_text="share of the spike", tickformat=".0%", row=1, col=2)
    fig.update_xaxes(title_text="head", row=2, col=1)
    fig.update_yaxes(title_text="layer", autorange="reversed", row=2, col=1)
    return figure_of(fig, result, width=1100, height=860, legend=-0.12, bottom=110)


def draw_answers(result: Any) -> go.Figure:
    """Draw what makes a position the sink, and what the place is for, of a `WhySink`."""
    spike = result.answered
    if spike is None:
        return draw(result)
    fig: Any = make_subplots(2, subplot_titles=ANSWERS)
    bars(fig, spike.conditions, "left", BLUE, row=1, col=1)
    bars(fig, spike.purpose, "loss", BLUE, row=2, col=1)
    fig.update_yaxes(tickformat=".0%", row=1, col=1)
    return figure_of(fig, result, width=1000, height=900)
