"""What follows copies of a word under a patch: the attention that text gives to them, and whether the word is repeated.

Ordinary text stands after the copies. Its attention to them is read in the layers whose heads can read each spike, and
the model's next token after the last copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.models.text import text_rows
from sinkscope.sinks.repetition.attention import attention_from
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import TokenRows

AFTER = 16  # tokens of ordinary text after the copies


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
    ordinary = text_rows(setup.tokenizer, setup.text, 1, AFTER, None)
    texts, count = torch.cat([rows, ordinary.expand(len(rows), -1)], 1), rows.shape[1]
    copies = torch.zeros(*texts.shape, 1)
    copies[:, before:count] = 1
    attention, one_more = list[Tensor](), list[Tensor]()
    for edit in edits:
        with under(edit, setup.target):
            received = attention_from(setup.target, texts, copies, count)[:, 0] / AFTER  # word layer
            logits = setup.target.logits_at(rows, torch.tensor([count - 1]))[:, 0]
        attention.append(torch.stack([received[:, spike.first + 1 : spike.last + 2].nanmean(1) for spike in spikes]))
        chances = logits.float().softmax(-1).cpu()
        one_more.append(chances.gather(1, rows[:, -1:])[:, 0])
    return AfterCopies(torch.stack(attention).numpy(), torch.stack(one_more).numpy())
