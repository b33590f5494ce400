"""The drawing of `find_sinks` and `why_sink`: each spike as a run of layers, who writes it, and who reads it.

Its neurons stand on the bars of what they write; its readers are counted before and after their removal, beside other
neurons of the same layers.
"""

from __future__ import annotations

from collections import defaultdict
from html import escape
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from sinkscope.results.style import BLUE, GREY, ORANGE, figure_of, panels
from sinkscope.sinks.spikes.cards import run
from sinkscope.sinks.spikes.records import PartShare, SpikeResult, part_of

COLOURS = (BLUE, ORANGE, "#009e73", "#cc79a7")
COLUMNS = ("marks", "writers", "spike", "readers")
LINE = 14  # letters of a line below a node
MOST_NODES = 4  # marks, or writers, that a diagram names
ANSWERS = ("Share of the spike at an ordinary position", "What later tokens lose")
BEFORE, AFTER = "#56b4e9", "#d55e00"
"""Heads of the intact model, and heads after a removal; both are seen on a dark page."""
LOW = 0.08  # of the highest bar, below which a number stands above its bar
READ = {"intact": BEFORE, "without its needed set": AFTER, "without busiest others": GREY}
TITLES = (
    "Norm of the residual stream after each layer",
    "What each layer writes of each spike",
    "Attention to the first token (full blue: 100%)",
    "Heads that attend to the place of each spike",
)


def draw(result: Any) -> go.Figure:
    """Draw the norms of a `FindSinks`, what writes and erases each spike, and the attention of heads."""
    fig = panels(TITLES, columns=2, spacing=0.12)
    layers = list(range(result.layers_read))
    first, typical = {"color": AFTER, "width": 3}, {"color": GREY}
    fig.add_scatter(x=layers, y=result.first_token_norm, name="the first token, median", line=first, row=1, col=1)
    fig.add_scatter(x=layers, y=result.typical_norm, name="later tokens, median", line=typical, row=1, col=1)
    shown = [spike for spike in result.spikes if spike.like is None][: len(COLOURS)]
    for spike, colour in zip(shown, COLOURS, strict=False):
        _draw_spike(fig, spike, colour)
    _name_neurons(fig, shown)
    _draw_readers(fig, shown)
    fig.update_xaxes(title_text="layer", row=1)
    fig.update_yaxes(title_text="L2 norm", type="log", tickformat=",", nticks=8, row=1, col=1)
    fig.update_xaxes(title_text="layer", range=(-1.5, result.layers_read - 0.5), row=1, col=2)
    shares = [0.0, *(part.share for spike in shown for part in [*spike.writers, *spike.erasers])]
    room = (1.1 * min(shares) - 0.02, 1.8 * max(shares) + 0.02)  # above the bars, for the names of neurons
    fig.update_yaxes(title_text="share of the spike", tickformat=".0%", range=room, row=1, col=2)
    fig.update_yaxes(title_text="heads", rangemode="tozero", row=2, col=2)
    scale = {"colorscale": [[0, "#ffffff"], [1, BLUE]], "zmin": 0, "zmax": 1, "showscale": False}
    fig.add_heatmap(z=result.heads, **scale, row=2, col=1)
    fig.update_xaxes(title_text="head", row=2, col=1)
    fig.update_yaxes(title_text="layer", autorange="reversed", row=2, col=1)
    return figure_of(fig, result, width=1100, height=860, legend=-0.12, bottom=110)


def draw_circuit(result: Any) -> go.Figure:
    """Draw what makes a position the sink, what the place is for, and the circuit of each spike from left to right.

    Colours are shares of the spike at an ordinary position under each combination; bars are changes of the loss with
    their 95 % intervals. A line to the right is as wide as the share of the spike that a neuron or component writes, or
    as the share of all heads that read it.
    """
    shown = [spike for spike in result.spikes if spike.like is None][: len(COLOURS)]
    answered, top = result.answered, 1
    titles = ("What marks, writes and reads each spike",)
    if answered is not None:
        titles, top = (*ANSWERS, *titles), 2
    fig: Any = make_subplots(
        top, 2, specs=[[{}, {}], [{"colspan": 2}, None]][-top:], subplot_titles=titles, horizontal_spacing=0.22,
        vertical_spacing=0.14, row_heights=[0.4, 0.6][-top:],
    )  # fmt: skip
    if answered is not None:
        _draw_conditions(fig, answered)
        _draw_purpose(fig, answered)
    where, row = {"row": top, "col": 1}, 0.0
    for spike, colour in zip(shown, COLOURS, strict=False):
        row = _draw_circuit(fig, spike, colour, row, result.readers.total, where) - 1.5
    for column, name in enumerate(COLUMNS):
        fig.add_annotation(
            x=column, y=1, text=name, font={"size": 15}, showarrow=False, yanchor="bottom", **where
        )  # fmt: skip
    fig.update_xaxes(visible=False, range=(-0.4, len(COLUMNS) - 0.6), **where)
    fig.update_yaxes(visible=False, range=(row + 0.5, 2.2), **where)
    height = int(190 - 64 * row) + (440 if top == 2 else 0)
    return figure_of(fig, result, width=1000, height=height, bottom=20, showlegend=False)


def _draw_conditions(fig: Any, spike: SpikeResult) -> None:
    """The share of the spike at an ordinary position under each combination of causes, as a heat map."""
    if spike.conditions is None:
        return
    shares = {(cell.token, cell.alone, cell.start): cell.share for cell in spike.conditions.cells}
    rows = [(token, alone) for token in (False, True) for alone in (False, True)]
    columns = [start for start in (False, True) if (False, False, start) in shares]
    values = [[shares[token, alone, start] for start in columns] for token, alone in rows]
    names = [
        f"{'its token' if token else 'own token'},<br>{'sees itself' if alone else 'sees all'}" for token, alone in rows
    ]
    fig.add_heatmap(
        z=values, x=["position id 0" if start else "own position id" for start in columns], y=names, zmin=0, zmax=1,
        colorscale=[[0, "#ffffff"], [1, BLUE]], showscale=False, texttemplate="%{z:.0%}", row=1, col=1,
    )  # fmt: skip


def _draw_purpose(fig: Any, spike: SpikeResult) -> None:
    """The change of the loss in each way of reading the place, with its interval."""
    if spike.purpose is None:
        return
    changes = spike.purpose.changes[::-1]
    margins = [change.margin or 0.0 for change in changes]
    colours = [GREY if "key" in change.name else ORANGE for change in changes]
    fig.add_bar(
        x=[change.loss for change in changes], y=[change.name for change in changes], orientation="h",
        marker_color=colours, error_x={"type": "data", "array": margins}, row=1, col=2,
    )  # fmt: skip
    fig.update_xaxes(title_text="change of the loss, nats a token", row=1, col=2)


def _draw_circuit(fig: Any, spike: SpikeResult, colour: str, top: float, total: int, where: dict[str, int]) -> float:
    """The nodes of a spike and the lines between them, from `top` downwards; return the last row that it takes."""
    members = () if spike.needed is None else spike.needed.parts
    shares = {str(neuron.address): neuron.share for neuron in spike.neurons} | {
        writer.part: writer.share for writer in spike.writers
    }
    marks = [(mark.part, f"{mark.left:.0%} left", 1.0) for mark in spike.marks[:MOST_NODES]]
    writers = [(part, f"{shares.get(part, 0.0):.0%}", shares.get(part, 0.0)) for part in members]
    if len(writers) > MOST_NODES:
        rest = writers[MOST_NODES - 1 :]
        share = sum(share for _, _, share in rest)
        writers = [*writers[: MOST_NODES - 1], (f"{len(rest)} more", f"{share:.0%}", share)]
    rows = max(len(marks), len(writers), 1)
    middle = top - (rows - 1) / 2
    without = None if spike.effect is None else spike.effect.at_place
    _node(fig, 2, middle, spike.place.words, run(*spike.layers), colour, where)
    after = "" if without is None else f"{without.heads[1]} without these"
    _node(fig, 3, middle, f"{spike.heads} heads", after, BEFORE, where)
    _line(fig, (2, middle), (3, middle), spike.heads / max(total, 1), BEFORE, where)
    for column, nodes in enumerate((marks, writers)):
        for number, (name, below, share) in enumerate(nodes):
            y = middle + (len(nodes) - 1) / 2 - number
            if column == 0:
                for other in range(max(len(writers), 1)):
                    end = (1, middle + (len(writers) - 1) / 2 - other) if writers else (2, middle)
                    _line(fig, (0, y), end, 0.1, GREY, where)
            else:
                _line(fig, (1, y), (2, middle), share, colour, where)
            _node(fig, column, y, name, below, GREY if column == 0 else colour, where)
    return top - (rows - 1)


def _node(fig: Any, x: float, y: float, name: str, below: str, colour: str, where: dict[str, int]) -> None:
    """A node with its name and a number below."""
    text = "<br>".join(escape(line) for line in wrap(name, LINE) + wrap(below, LINE))
    fig.add_scatter(
        x=[x], y=[y], mode="markers+text", text=text, textposition="bottom center", cliponaxis=False, hoverinfo="skip",
        marker={"size": 14, "color": colour}, **where,
    )  # fmt: skip


def _line(
    fig: Any, start: tuple[float, float], end: tuple[float, float], share: float, colour: str, where: dict[str, int]
) -> None:
    """A line between two nodes, as wide as a share; what is written against the spike is dotted."""
    line = {"color": colour, "width": 1 + 9 * min(abs(share), 1.0), "dash": "dot" if share < 0 else "solid"}
    x, y = zip(start, end, strict=True)
    fig.add_scatter(x=x, y=y, mode="lines", line=line, opacity=0.5, hoverinfo="skip", **where)


def _draw_spike(fig: Any, spike: SpikeResult, colour: str) -> None:
    """The run of a spike as a band, and the shares of what writes it and what erases it."""
    low, high = spike.layers
    fig.add_vrect(low - 0.5, high + 0.5, fillcolor=colour, opacity=0.15, line_width=0, row=1, col=1)
    parts = [*spike.writers, *spike.erasers]
    fig.add_bar(
        x=[_layer(part) for part in parts], y=[part.share for part in parts], base=0,
        hovertext=[escape(part.part) for part in parts], name=run(*spike.layers), marker_color=colour,
        offset=-0.4, width=0.8, row=1, col=2,
    )  # fmt: skip


def _name_neurons(fig: Any, spikes: list[SpikeResult]) -> None:
    """The needed neurons above the bars of their layer, whichever spike has the highest one there."""
    names, tops = defaultdict[int, list[str]](list), defaultdict[int, float](float)
    for spike in spikes:
        for writer in spike.writers:
            tops[_layer(writer)] = max(tops[_layer(writer)], writer.share)
        for neuron in spike.needed.neurons if spike.needed is not None else ():
            names[neuron.layer].append(f"N{neuron.neuron}")
    for layer, own in names.items():
        place = {"x": layer, "y": tops[layer], "yanchor": "bottom", "textangle": -90, "font": {"size": 11}}
        fig.add_annotation(text=" ".join(own), showarrow=False, **place, row=1, col=2)


def _draw_readers(fig: Any, spikes: list[SpikeResult]) -> None:
    """The heads that attend to a spike's place: intact, without what it needs, and without the busiest others."""
    names, bars = list[str](), dict[str, list[tuple[int, float | None] | None]]()
    for spike in spikes:
        if spike.effect is None or spike.controls is None:
            continue
        names.append(run(*spike.layers))
        own, control = spike.effect.at_place, spike.controls.busiest or spike.controls.random
        others = None if control is None else (control.heads[1], control.heads_margin[1])
        counts = ((own.heads[0], own.heads_margin[0]), (own.heads[1], own.heads_margin[1]), others)
        for name, count in zip(READ, counts, strict=True):
            bars.setdefault(name, []).append(count)
    highest = max((count[0] for counts in bars.values() for count in counts if count is not None), default=0)
    for number, (name, counts) in enumerate(bars.items()):
        heads = [None if count is None else count[0] for count in counts]
        margins = [None if count is None or not count[1] else count[1] for count in counts]
        inside = ["outside" if count is None or count[0] < LOW * highest else "inside" for count in counts]
        fig.add_bar(
            x=names, y=heads, text=heads, textposition=inside, insidetextanchor="start", textangle=0, cliponaxis=False,
            name=name, marker_color=READ[name], error_y={"type": "data", "array": margins}, offset=0.27 * number - 0.4,
            width=0.26, row=2, col=2,
        )  # fmt: skip


def _layer(part: PartShare) -> int:
    """The layer of a component; the embedding stands before the first."""
    layer = part_of(part.part).layer
    return -1 if layer is None else layer
