"""A conversation's turns, head by head: what prompts computed and kept, what that held, and what decoding read."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.figures.style import BLUE, GREY, RED, axes, finished, panels
from sinkscope.kv.loopserve.conversation import Conversation

_BINS = 160  # of positions


def draw_turns(chat: Conversation) -> go.Figure:
    """Four panels: cells and weight by head and turn, kept positions by head, and tokens read by turn.

    Cells are the share of the causal cells of a turn's queries that lie on a head's lines, and weight is the share of
    the attention of 16 queries, which had no part in the choice, that the lines hold (`LoopServe`). Positions are those
    of vertical lines: the share of the turns after a position in which the head kept it. Where a turn's prompt was read
    densely, everything was kept.

    Args:
        chat: a conversation of at least one turn; the turns that were held under `LoopServe` show the most.

    Raises:
        SinkscopeError: there is no turn.
    """
    cells, weight, share, wide = _numbers(chat)
    layers, heads = cells.shape[:2]
    places = [(i + 0.5) * wide for i in range(share.shape[2])]
    names = [f"L{layer}.H{head}" for layer in range(layers) for head in range(heads)]
    numbers = [str(i + 1) for i in range(len(chat.turns))]
    titles = ["cells on the lines", "weight that they hold", "positions of vertical lines", "tokens read in decoding"]
    fig = panels(titles, [0.15, 0.15, 0.45, 0.25], spacing=0.05)

    def shown(values: Tensor, x: Any, col: int, axis: str) -> None:
        z = values.flatten(0, 1).tolist()
        hover = "%{y}, %{x}: %{z:.0%}<extra></extra>"
        fig.add_heatmap(x=x, y=names, z=z, coloraxis=axis, hovertemplate=hover, row=1, col=col)

    shown(cells, numbers, 1, "coloraxis")
    shown(weight, numbers, 2, "coloraxis")
    shown(share, places, 3, "coloraxis")
    fig.update_yaxes(autorange="reversed", type="category", dtick=max(1, len(names) // 24), row=1, col=1)
    for col in (2, 3):
        axes(fig, 1, col, y={"autorange": "reversed", "showticklabels": False})
    for col in (1, 2, 4):
        axes(fig, 1, col, x={"title_text": "turn", "type": "category"})
    axes(fig, 1, 3, x="position in the conversation")
    for turn in chat.turns[:-1]:
        fig.add_vline(turn.prompt_tokens + len(turn.ids), line={"color": RED, "width": 1}, row=1, col=3)
    curves = {"in the cache": [t.prompt_tokens for t in chat.turns], "read in a step": [t.read for t in chat.turns]}
    for (name, y), colour in zip(curves.items(), (GREY, BLUE), strict=True):
        fig.add_scatter(x=numbers, y=y, name=name, mode="lines+markers", line={"color": colour}, row=1, col=4)
    axes(fig, 1, 4, y={"rangemode": "tozero"})
    mean = f"{float(cells.mean()):.0%} of the cells hold {float(weight.mean()):.0%} of the weight"
    told = f"{chat.target.name}, {len(chat.turns)} turns: {mean}"
    scale = {"colorscale": "Viridis", "cmin": 0, "cmax": 1}
    bar = {"tickformat": ".0%", "thickness": 12, "x": 1.01}
    high = 170 + 14 * len(names)
    return finished(fig, None, told, width=1300, height=high, bottom=90, coloraxis=scale | {"colorbar": bar})


def _numbers(chat: Conversation) -> tuple[Tensor, Tensor, Tensor, int]:
    """Cells and weight, `[layer head turn]`; share of the turns that kept a bin, `[layer head bin]`; a bin's tokens."""
    if not chat.turns:
        raise SinkscopeError("the conversation has no turn yet: ask something first")
    layers, heads = chat.target.n_layers, chat.target.n_heads
    cells, weight = (torch.ones(layers, heads, len(chat.turns)) for _ in range(2))
    length = chat.turns[-1].prompt_tokens
    kept, seen = torch.zeros(layers, heads, length), torch.zeros(length)
    for i, turn in enumerate(chat.turns):
        seen[: turn.prompt_tokens] += 1
        for layer, lines in enumerate(turn.lines):
            if lines is None:
                kept[layer, :, : turn.prompt_tokens] += 1
            else:
                cells[layer, :, i] = lines.density()
                kept[layer, :, : lines.vertical.shape[-1]] += lines.vertical
        for event in turn.events:
            if event.kind == "prefill" and "recovered" in event.data and event.layer is not None:
                weight[event.layer, :, i] = torch.tensor(event.data["recovered"])
    wide = -(-length // _BINS)
    return cells, weight, torch.stack([part.mean(-1) for part in (kept / seen).split(wide, -1)], -1), wide
