"""What follows copies of a word under a patch: the attention that text gives to them, and whether the word is repeated.

Ordinary text stands after the copies. Its attention to them is read in the layers whose heads can read each spike, and
the model's next token after the last copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.observers import attention_rows

AFTER = 16  # tokens of ordinary text after the copies
QUERIES_AT_ONCE = 128


@dataclass(frozen=True)
class AfterCopies:
    """Attention and output after copies of each word: without the patch, with it, and with random neurons.

    Attributes:
        attention: Share of its attention that the text gives to the copies, mean over the heads of the layers that can
            read each spike. NaN: no such layer attends.
        one_more: Probability that the model writes the word once more after the last copy.
    """

    attention: Float[np.ndarray, "case spike word"]
    one_more: Float[np.ndarray, "case word"]


@torch.no_grad()
def after_copies(
    setup: Setup, spikes: Sequence[Spike], edits: Sequence[SinkPatch | None], rows: TokenRows, before: int
) -> AfterCopies:
    """Read what follows copies under each edit.

    Args:
        setup: The whole model and its text.
        spikes: The spikes whose layers are read.
        edits: The edits; None is no edit.
        rows: Copies of the words, each after `before` other tokens.
        before: Number of tokens before the copies.
    """
    attention: list[Tensor] = []
    one_more: list[list[float]] = []
    ordinary = text_rows(setup.tokenizer, setup.text, 1, AFTER, None)
    texts = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    for edit in edits:
        with under(edit, setup.target):
            read = [_of_text(setup.target, ids, before) for ids in texts]
        layers = torch.stack([received for received, _ in read], 1)
        attention.append(torch.stack([layers[spike.first + 1 : spike.last + 2].nanmean(0) for spike in spikes]))
        one_more.append([chance for _, chance in read])
    return AfterCopies(torch.stack(attention).numpy(), np.array(one_more))


def _of_text(target: Target, ids: Int[Tensor, " pos"], before: int) -> tuple[Float[Tensor, " layer"], float]:
    """Return the share of attention that the end of a text gives to the copies, and the chance of one more copy."""
    count = len(ids) - AFTER
    received = torch.full((target.n_layers,), torch.nan)
    received[target.attending] = 0

    def add(layer: int, first: int, probs: Float[Tensor, "_ head query key"]) -> None:
        late = probs[0, :, max(0, count - first) :, before:count]
        heads = target.shards.gather(late.sum((1, 2)), target.n_heads, 0)
        received[layer] += float(heads.mean()) / AFTER

    with attention_rows(target, add, rows_per_chunk=QUERIES_AT_ONCE, whole=False):
        logits = target.logits_at(ids[None], torch.tensor([count - 1]))
    return received, float(logits[0, 0].float().softmax(-1)[ids[count - 1]])
