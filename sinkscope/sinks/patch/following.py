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
    """Attention and output after copies, mean over words: without the patch, with it, and with random neurons.

    Attributes:
        attention: Share of its attention that the text gives to the copies, mean over the heads of the layers that can
            read each spike. NaN: no such layer attends.
        repeats: Probability that the model repeats the word after the last copy.
    """

    attention: Float[np.ndarray, "case spike"]
    repeats: Float[np.ndarray, " case"]

    def sentences(self, spikes: Sequence[str]) -> list[str]:
        """Say what the text attends to in the layers of each spike, and how likely the word is repeated."""
        lines: list[str] = []
        for spike, cases in zip(spikes, self.attention.T, strict=True):
            if not np.isnan(cases[0]):
                lines.append(
                    f"Heads that can read the spike of {spike} give the copies {_in_cases(cases)} of their attention."
                )
        return [*lines, f"The model repeats the word with a probability of {_in_cases(self.repeats)}."]


def _in_cases(cases: Float[np.ndarray, " case"]) -> str:
    before, after, random = cases
    return f"{after:.0%} (without the patch: {before:.0%}; random neurons: {random:.0%})"


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
    attention: list[list[float]] = []
    repeats: list[float] = []
    ordinary = text_rows(setup.tokenizer, setup.text, 1, AFTER, None)
    texts = torch.cat([rows, ordinary.expand(len(rows), -1)], 1)
    for edit in edits:
        with under(edit, setup.target):
            read = [_of_text(setup.target, ids, before) for ids in texts]
        layers = torch.stack([received for received, _ in read]).mean(0)
        attention.append([_mean_of(layers, spike) for spike in spikes])
        repeats.append(float(torch.tensor([chance for _, chance in read]).mean()))
    return AfterCopies(np.array(attention), np.array(repeats))


def _mean_of(received: Float[Tensor, " layer"], spike: Spike) -> float:
    """Return the mean over the layers that attend and can read a spike."""
    return float(received[spike.first + 1 : spike.last + 2].nanmean())


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
