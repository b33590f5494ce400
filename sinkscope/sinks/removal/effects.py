"""What edits of single components do to one position of a text: its norm in each layer and the attention it receives.

All edits run side by side in one forward pass: a row for each edit, and for the intact text. A streamed model is
therefore read once for any number of edits, and every value that is written comes from the intact text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.results.parts import Parts
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.removal.rows import BATCH_ELEMENTS, Rows, Trial
from sinkscope.sinks.tokens import TokenRows


@dataclass(frozen=True)
class Effects:
    """The state of the position in the intact texts, which come first, and under each edit.

    Attributes:
        norms: L2 norm of the residual stream after each layer, without the dimensions that were left out. NaN in layers
            before the first that was run, where nothing differs, and in the last one where attention is read.
        along: Projection of the residual stream on the directions that were given; NaN without any.
        attention: Mean attention from later queries that see the position; 0 where it was not requested.
    """

    norms: Float[Tensor, "state text layer"]
    along: Float[Tensor, "state text layer"]
    attention: Float[Tensor, "state text layer head"]

    def drops(self, layer: int) -> Float[Tensor, " edit"]:
        """Share of the norm after a layer that each edit takes away, mean over texts."""
        norms = self.norms[..., layer]
        return (1 - norms[1:] / norms[0]).mean(1)

    def attention_from(self, heads: Heads) -> Float[Tensor, "state text pair"]:
        """The attention to the position from (layer, head) pairs."""
        layer, head = torch.tensor(heads).T
        return self.attention[:, :, layer, head]


def _batches(target: Target, trial: Trial) -> list[Rows]:
    """The rows of a trial in as few batches as memory allows, each beside the intact texts."""
    texts, length = trial.ids.shape
    size = max(1, BATCH_ELEMENTS // (texts * length * max(target.d_mlp, target.d_model)) - 1)
    starts = range(0, max(1, len(trial.edits)), size)
    return [Rows(target, trial, trial.edits[start : start + size]) for start in starts]


def _effects(batches: Sequence[Rows]) -> Effects:
    """What was read."""
    first, *others = [rows.read() for rows in batches]
    edited = [[values[1:] for values in read] for read in others]  # the intact texts once
    return Effects(*map(torch.cat, zip(first, *edited, strict=True)))


@torch.no_grad()
def side_by_side(target: Target, trials: Sequence[Trial]) -> list[Effects]:
    """Run trials. A streamed model is walked once: in each layer, the rows of all trials pass before the next is read.

    Args:
        target: The model.
        trials: What is run.

    Returns:
        The effects of each trial. Entries of layers that were not run are missing at the end.
    """
    batches = [_batches(target, trial) for trial in trials]
    depth = len(target.layers)
    lasts = range(depth - 1, depth)
    if not target.resident and target.skips_layers:
        lasts = range(min(trial.begin for trial in trials), depth)
    for last in lasts:
        for of_trial in batches:
            for rows in of_trial:
                rows.run(last)
    return [_effects(of_trial) for of_trial in batches]


def effects(target: Target, ids: TokenRows, edits: Sequence[Parts], **reading: Any) -> Effects:
    """Run every edit on every text in as few passes as memory allows.

    Args:
        target: The model.
        ids: The texts.
        edits: The edits.
        reading: What is read, as the other fields of a `Trial` say.
    """
    return side_by_side(target, [Trial(ids, edits, **reading)])[0]
