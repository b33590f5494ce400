"""Copies of a token that see what stands before them, and copies that do not.

The mean over equal values is one value. So a copy that sees copies alone is what a token is that sees only itself, at
any number of copies; what keeps copies from being sinks is the other tokens that they see.

1. Copies see what stands before them; with other tokens between; it is hidden from them (`Knockout`); they stand alone.
2. The same under a patch of the neurons that write the spike.
3. Beside them, the attention that a copy still gives to what stands before, in the layers up to the peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.tap import attention_rows
from sinkscope.hooks.edit import Knockout
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.models.target import Target
from sinkscope.sinks.spikes.copies import along_spikes
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import TokenRows

OTHERS = 4  # tokens between what stands before and the copies
SEEN, HIDDEN, ALONE, BETWEEN = "seen", "hidden", "alone", f"seen, {OTHERS} others between"
ATTENTION = "attention to what stands before"


class Sight(NamedTuple):
    """Rows whose copies see what stands before them, or do not.

    Attributes:
        rows: The tokens.
        first_copy: Position of the first copy.
        unseen: Number of first positions that are hidden from the tokens after them.
    """

    rows: TokenRows
    first_copy: int
    unseen: int


def copies_by_sight(
    target: Target, spike: Spike, rows: TokenRows, before: int, others: Int[Tensor, "row other"], patch: Intervention
) -> dict[str, Float[Tensor, "row copy"]]:
    """Read copies in each way, with and without a patch.

    Args:
        target: The model.
        spike: The spike.
        rows: What stands before, and the copies.
        before: Number of tokens that stand before.
        others: Tokens that stand between in one of the ways.
        patch: The patch.

    Returns:
        Projection of each copy on the spike's direction, as a share of the spike; and, last, attention.
    """
    between = torch.cat([rows[:, :before], others, rows[:, before:]], 1)
    ways = {SEEN: Sight(rows, before, 0), BETWEEN: Sight(between, between.shape[1] - rows.shape[1] + before, 0)}
    ways |= {HIDDEN: Sight(rows, before, before), ALONE: Sight(rows[:, before:], 0, 0)}
    by_way: dict[str, Tensor] = {}
    for patched in (False, True):
        for name, sight in ways.items():
            edits = [Knockout(list(range(sight.unseen)))] if sight.unseen else []
            with ExitStack() as stack:
                for edit in [*edits, patch] if patched else edits:
                    stack.enter_context(under(edit, target))
                (along,) = along_spikes(target, [spike], sight.rows)
            by_way[f"{name}, patched" if patched else name] = along[:, sight.first_copy :]
    by_way[ATTENTION] = attention_before(target, rows, before, range(spike.peak + 1))
    return by_way


@torch.no_grad()
def attention_before(target: Target, rows: TokenRows, before: int, layers: Sequence[int]) -> Float[Tensor, "row copy"]:
    """Return the attention that each copy gives to what stands before, mean over the heads of some layers."""
    attending = [layer for layer in target.attending if layer in layers]
    attention = torch.zeros(len(rows), rows.shape[1] - before)

    for number in range(len(rows)):  # one at a time: rows of attention are long

        def add(_layer: int, first: int, probs: Tensor, number: int = number) -> None:
            mean = probs[0, :, :, :before].sum(-1).mean(0).float().cpu() / len(attending)
            attention[number, first - before : first - before + len(mean)] += mean

        with attention_rows(target, add, layers=attending, begin=before):
            target.forward(rows[number : number + 1], last_layer=max(layers))
    return attention
