"""The drawing of `find_sinks` and `circuit`: each spike as a run of layers, who writes it, and who reads it.

Its neurons stand on the bars of what they write; its readers are counted before and after their removal, beside random
neurons of the same layers.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from typing import Any

import plotly.graph_objects as go

from sinkscope.results.style import BLUE, GREY, ORANGE, figure_of, panels
from sinkscope.sinks.spikes.cards import run
from sinkscope.sinks.spikes.records import PartShare, SpikeResult, part_of

COLOURS = (BLUE, ORANGE, "#009e73", "#cc79a7")
BEFORE, AFTER = "#56b4e9", "#d55e00"
"""Heads of the intact model, and heads after a removal; both are seen on a dark page."""
TITLES = (
    "Norm of the residual stream after each layer",
    "What each layer writes of each spike",
    "Attention to the first token (full blue: 100%)",
    "Heads that attend to the place of each spike",
)


def draw(result: Any) -> go.Figure:
    """Draw the norms of a `SpikesFound`, what writes and erases each spike, and the attention of heads."""
    fig = panels(TITLES)
    layers = list(range(result.layers_read))
    first, typical = {"color": AFTER, "width": 3}, {"color": GREY}
    fig.add_scatter(x=layers, y=result.first_token_norm, name="the first token, median", line=first, row=1, col=1)
    fig.add_scatter(x=layers, y=result.typical_norm, name="later tokens, median", line=typical, row=1, col=1)
    shown = [spike for spike in result.spikes if spike.like is None][: len(COLOURS)]
    for spike, colour in zip(shown, COLOURS, strict=False):
        _draw_spike(fig, spike, colour)
    _name_neurons(fig, shown)
    _draw_readers(fig, shown)
    fig.update_xaxes(title_text="layer", col=1)
    fig.update_yaxes(title_text="L2 norm", type="log", tickformat=",", nticks=8, col=1)
    fig.update_xaxes(title_text="layer", range=(-1.5, result.layers_read - 0.5), col=2)
    shares = [0.0, *(one.share for spike in shown for one in [*spike.writers, *spike.erasers])]
    room = (1.1 * min(shares) - 0.02, 1.8 * max(shares) + 0.02)  # above the bars, for the names of neurons
    fig.update_yaxes(title_text="share of the spike", tickformat=".0%", range=room, col=2)
    fig.update_yaxes(title_text="heads", rangemode="tozero", col=4)
    scale = {"colorscale": [[0, "#ffffff"], [1, BLUE]], "zmin": 0, "zmax": 1, "showscale": False}
    fig.add_heatmap(z=result.heads, **scale, row=1, col=3)
    fig.update_xaxes(title_text="head", col=3)
    fig.update_yaxes(title_text="layer", autorange="reversed", col=3)
    return figure_of(fig, result, width=1900, height=480, legend=-0.3, bottom=130)


def _draw_spike(fig: Any, spike: SpikeResult, colour: str) -> None:
    """The run of a spike as a band, and the shares of what writes it and what erases it."""
    low, high = spike.layers
    fig.add_vrect(low - 0.5, high + 0.5, fillcolor=colour, opacity=0.15, line_width=0, row=1, col=1)
    parts = [*spike.writers, *spike.erasers]
    fig.add_bar(
        x=[_layer(one) for one in parts], y=[one.share for one in parts], base=0,
        hovertext=[escape(one.part) for one in parts], name=f"layer{run(*spike.layers)}", marker_color=colour,
        offset=-0.4, width=0.8, row=1, col=2,
    )  # fmt: skip


def _name_neurons(fig: Any, spikes: list[SpikeResult]) -> None:
    """The needed neurons above the bars of their layer, whichever spike has the highest one there."""
    names, tops = defaultdict[int, list[str]](list), defaultdict[int, float](float)
    for spike in spikes:
        for one in spike.writers:
            tops[_layer(one)] = max(tops[_layer(one)], one.share)
        for neuron in spike.needed.neurons if spike.needed is not None else ():
            names[neuron.layer].append(f"N{neuron.neuron}")
    for layer, own in names.items():
        place = {"x": layer, "y": tops[layer], "yanchor": "bottom", "textangle": -90, "font": {"size": 11}}
        fig.add_annotation(text=" ".join(own), showarrow=False, **place, row=1, col=2)


def _draw_readers(fig: Any, spikes: list[SpikeResult]) -> None:
    """The heads that attend to a spike's place: intact, without its writers, and without random neurons."""
    names = [f"layer{run(*spike.layers)}" for spike in spikes if spike.without_writers is not None]
    needs = [spike.without_writers for spike in spikes if spike.without_writers is not None]
    counts = {
        "heads, intact": (BEFORE, [need.heads[0] for need in needs]),
        "without its writers": (AFTER, [need.heads[1] for need in needs]),
        "without random neurons": (GREY, [None if need.random is None else need.random.heads for need in needs]),
    }
    for number, (name, (colour, heads)) in enumerate(counts.items()):
        fig.add_bar(
            x=names, y=heads, text=heads, textposition="outside", cliponaxis=False, name=name, marker_color=colour,
            offset=0.27 * number - 0.4, width=0.26, row=1, col=4,
        )  # fmt: skip


def _layer(one: PartShare) -> int:
    """The layer of a component; the embedding stands before the first."""
    layer = part_of(one.part).layer
    return -1 if layer is None else layer
