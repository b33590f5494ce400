"""Draw the turns of a conversation by head: computed cells, kept positions, held weight, and tokens read."""

from __future__ import annotations

import plotly.graph_objects as go
import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.kv.loopserve.conversation import Conversation
from sinkscope.measure.style import BLUE, GREY, RED, Panel, curve, drawn, upright

_BINS = 160  # of positions


def draw_turns(chat: Conversation) -> go.Figure:
    """Draw four panels: cells and weight by head and turn, kept positions by head, and tokens read by turn.

    Cells are the share of the causal cells of a turn's queries that lie on a head's lines. Weight is the share of the
    attention of 16 held-out queries that the lines keep (`LoopServe`). For each position, the third panel shows in what
    share of the later turns the head kept the position as a vertical line. A turn whose prompt was read densely keeps
    everything.

    Args:
        chat: A conversation of at least one turn; turns under `LoopServe` show the most.

    Raises:
        SinkscopeError: The conversation has no turn.
    """
    cells, weight, share, wide = _numbers(chat)
    layers, heads = cells.shape[:2]
    places = [(i + 0.5) * wide for i in range(share.shape[2])]
    names = [f"L{layer}.H{head}" for layer in range(layers) for head in range(heads)]
    numbers = [str(i + 1) for i in range(len(chat.turns))]
    by_turn = {"title_text": "turn", "type": "category"}
    named = {"autorange": "reversed", "type": "category", "dtick": max(1, len(names) // 24)}
    bare = {"autorange": "reversed", "showticklabels": False}
    ends = [upright(turn.prompt_tokens + len(turn.ids), RED, "solid", 1) for turn in chat.turns[:-1]]
    held = [
        curve(numbers, [t.prompt_tokens for t in chat.turns], "in the cache", GREY),
        curve(numbers, [t.read for t in chat.turns], "read in a step", BLUE),
    ]
    hover = "%{y}, %{x}: %{z:.0%}<extra></extra>"
    maps = [
        go.Heatmap(x=x, y=names, z=values.flatten(0, 1).tolist(), coloraxis="coloraxis", hovertemplate=hover)
        for values, x in ((cells, numbers), (weight, numbers), (share, places))
    ]
    parts = [
        Panel("cells on the lines", maps[:1], by_turn, named),
        Panel("weight that they hold", maps[1:2], by_turn, bare),
        Panel("positions of vertical lines", maps[2:], "position in the conversation", bare, ends),
        Panel("tokens read in decoding", held, by_turn, {"rangemode": "tozero"}),
    ]
    mean = f"{float(cells.mean()):.0%} of the cells hold {float(weight.mean()):.0%} of the weight"
    return drawn(
        None,
        parts,
        [0.15, 0.15, 0.45, 0.25],
        grid={"spacing": 0.05},
        found=f"{chat.target.name}, {len(chat.turns)} turns: {mean}",
        width=1300,
        height=170 + 14 * len(names),
        bottom=90,
        coloraxis={
            "colorscale": "Viridis",
            "cmin": 0,
            "cmax": 1,
            "colorbar": {"tickformat": ".0%", "thickness": 12, "x": 1.01},
        },
    )


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
