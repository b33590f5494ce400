"""The turns of a conversation by head: computed cells, kept positions, held weight, and tokens read."""

from __future__ import annotations

import math
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from jaxtyping import Float
from plotly.subplots import make_subplots
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve.conversation import Conversation

BINS = 160  # of positions


@dataclass(frozen=True, eq=False)
class TurnShares:
    """What the heads computed and kept.

    Attributes:
        cells: Share of the causal cells of a turn's queries to which a head attended.
        weight: Share of the attention of 16 held-out queries that the lines keep.
        kept: In what share of the later turns a head kept a position as a vertical line.
        bin_tokens: Positions in a bin.
    """

    cells: Float[Tensor, "layer head turn"]
    weight: Float[Tensor, "layer head turn"]
    kept: Float[Tensor, "layer head bin"]
    bin_tokens: int


def shares_of(chat: Conversation) -> TurnShares:
    """Shares of every head; a turn whose prompt was read densely keeps everything.

    Raises:
        SinkscopeError: The conversation has no turn.
    """
    if not chat.turns:
        raise SinkscopeError("the conversation has no turn yet: ask something first")
    layers = chat.target.n_layers
    heads = chat.target.n_heads
    turns = len(chat.turns)
    length = chat.turns[-1].prompt_tokens
    cells = torch.ones(layers, heads, turns)
    weight = torch.ones(layers, heads, turns)
    kept = torch.zeros(layers, heads, length)
    turns_after = torch.zeros(length)
    for number, turn in enumerate(chat.turns):
        turns_after[: turn.prompt_tokens] += 1
        for layer, lines in enumerate(turn.lines):
            if lines is None:
                kept[layer, :, : turn.prompt_tokens] += 1
            else:
                kept[layer, :, : lines.vertical.shape[-1]] += lines.vertical
        for event in turn.events:
            if event.kind == "prefill" and "recovered" in event.data:
                weight[event.layer, :, number] = torch.tensor(event.data["recovered"])
                cells[event.layer, :, number] = torch.tensor(event.data["attended_by_head"])
    bin_tokens = math.ceil(length / BINS)
    bins = []
    for part in (kept / turns_after).split(bin_tokens, -1):
        bins.append(part.mean(-1))
    return TurnShares(cells, weight, torch.stack(bins, -1), bin_tokens)


def draw_turns(chat: Conversation) -> go.Figure:
    """Draw four panels: cells and weight by head and turn, kept positions by head, and tokens read by turn."""
    shares = shares_of(chat)
    layers, heads, bins = shares.kept.shape
    names = [f"L{layer}.H{head}" for layer in range(layers) for head in range(heads)]
    turns = []
    for number in range(len(chat.turns)):
        turns.append(str(number + 1))
    places = []
    for index in range(bins):
        places.append((index + 0.5) * shares.bin_tokens)
    titles = ["cells attended to", "weight that they hold", "positions of vertical lines", "tokens read in decoding"]
    figure = make_subplots(cols=4, subplot_titles=titles, column_widths=[0.15, 0.15, 0.45, 0.25])
    panels = ((shares.cells, turns), (shares.weight, turns), (shares.kept, places))
    for column, (values, x) in enumerate(panels, 1):
        rows = values.flatten(0, 1).tolist()  # layer head turn -> (layer head) turn
        figure.add_heatmap(x=x, y=names, z=rows, coloraxis="coloraxis", row=1, col=column)
    in_cache = []
    for each in chat.turns:
        in_cache.append(each.prompt_tokens)
    read = []
    for each in chat.turns:
        read.append(each.read)
    figure.add_scatter(x=turns, y=in_cache, name="in the cache", row=1, col=4)
    figure.add_scatter(x=turns, y=read, name="read in a step", row=1, col=4)
    for turn in chat.turns[:-1]:
        figure.add_vline(x=turn.prompt_tokens + len(turn.ids), line_color="firebrick", row=1, col=3)
    for column in (1, 2, 3):
        figure.update_yaxes(autorange="reversed", showticklabels=column == 1, row=1, col=column)
    figure.update_xaxes(type="category", title_text="turn")
    figure.update_xaxes(type="linear", title_text="position in the conversation", row=1, col=3)
    figure.update_yaxes(rangemode="tozero", row=1, col=4)
    mean = f"{float(shares.cells.mean()):.0%} of the cells hold {float(shares.weight.mean()):.0%} of the weight"
    return figure.update_layout(
        title=f"{chat.target.name}, {len(chat.turns)} turns: {mean}",
        width=1300,
        height=170 + 14 * len(names),
        coloraxis={"colorscale": "Viridis", "cmin": 0, "cmax": 1, "colorbar_tickformat": ".0%"},
        legend={"orientation": "h", "x": 0.75, "y": -0.1},
    )
