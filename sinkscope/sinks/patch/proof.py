"""What a patch does to repeated words and to ordinary text, beside no patch and one of random neurons:

1. Copies of words: how far the last one goes along each spike of the first token.
2. Text after copies: the attention that it gives to them, and whether the model writes the word once more.
3. Held-out text: its perplexity and its logits.

`patch make` judges the patch that it made by this, and `patch eval` any patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.notation import count_of
from sinkscope.sinks.chunks import token_texts
from sinkscope.sinks.first_tokens import HAS
from sinkscope.sinks.patch.following import AfterCopies, after_copies
from sinkscope.sinks.patch.ordinary import OrdinaryText, ordinary_text
from sinkscope.sinks.patch.patches import random_patch
from sinkscope.sinks.repetition.norm import name_of
from sinkscope.sinks.repetition.sweep import append_copy
from sinkscope.sinks.spikes.copies import FIRST_LENGTH, along_spikes, half_reached
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.tokens import pick_tokens, prefix_of, repeated

INTACT, PATCHED, RANDOM, ONCE, OTHERS = range(5)
CASES = ("intact", "patched", "random", "one copy", "other tokens")
GONE = 0.5  # share of the intact model's attention to copies that is left at most where the patch repairs it


@dataclass(frozen=True)
class Repair:
    """What copies break in the intact model, and whether it is repaired.

    Attributes:
        what: "norm": copies reach the spike; "attention": text after the copies attends to them, in the layers that can
            read the spike; "next token": the model does not write the word once more.
        spike: The spike, by its layers. Empty: it is not of one spike.
        patched: Whether the patch repairs it: no copies reach the spike any more; less than half of the attention is
            left; the model writes the word once more.
        random: Whether random neurons do.
    """

    what: str
    spike: str
    patched: bool
    random: bool


@dataclass(frozen=True)
class PatchProof:
    """What a patch does to repeated words and to ordinary text.

    Cases: "intact", "patched" and "random" are the last copy of each word without a patch, with it, and with as many
    random neurons of the same layers patched; without a patch also "one copy" behind ordinary text, and "other tokens".

    Attributes:
        words: The words that were repeated.
        repeats: How often each is repeated.
        spikes: The spikes of the first token, by their layers.
        along: Projection on the direction of each spike, as a share of the first token's.
        following: What follows copies. None: no word needs repair.
        ordinary: What changes on held-out text.
    """

    words: tuple[str, ...]
    repeats: int
    spikes: tuple[str, ...]
    along: Float[np.ndarray, "case spike word"]
    following: AfterCopies | None
    ordinary: OrdinaryText

    @property
    def has_spike(self) -> Bool[np.ndarray, "case spike word"]:
        """Return whether a position reaches half of the first token's projection."""
        return self.along >= HAS

    @property
    def failing(self) -> Bool[np.ndarray, "spike word"]:
        """Return the words that need repair: copies reach the spike in the intact model, and one copy does not."""
        return self.has_spike[INTACT] & ~self.has_spike[ONCE]

    def shown(self, spike: int) -> Bool[np.ndarray, " word"]:
        """Return the words that sentences about a spike are about: those that need repair; if none does, all."""
        failing = self.failing[spike]
        return failing if failing.any() else ~failing

    def furthest(self, spike: int) -> Float[np.ndarray, " case"]:
        """Return how far copies of these words go at most."""
        return self.along[: RANDOM + 1, spike, self.shown(spike)].max(1)

    def attention(self, spike: int) -> Float[np.ndarray, " case"] | None:
        """Return the attention to copies of these words, mean over them, in the layers that can read a spike.

        It is None if no layer does or no word needs repair.
        """
        if self.following is None or np.isnan(self.following.attention[0, spike]).all():
            return None
        return self.following.attention[:, spike, self.shown(spike)].mean(1)

    def one_more(self) -> Float[np.ndarray, " case"] | None:
        """Return the probability of one more copy, mean over words that need repair; None if no word does."""
        return None if self.following is None else self.following.one_more[:, self.failing.any(0)].mean(1)

    def repairs(self) -> list[Repair]:
        """Return what copies break in the intact model, and which edits repair it."""
        read: list[tuple[str, str, Any]] = []
        for number, spike in enumerate(self.spikes):
            failing, attention = self.failing[number], self.attention(number)
            if failing.any():
                read.append(("norm", spike, ~self.has_spike[:, number, failing].any(1)))
                if attention is not None:
                    read.append(("attention", spike, attention < GONE * attention[INTACT]))
        one_more = self.one_more()
        if one_more is not None and one_more[INTACT] < HAS:
            read.append(("next token", "", one_more >= HAS))
        return [Repair(what, spike, bool(good[PATCHED]), bool(good[RANDOM])) for what, spike, good in read]

    def line(self, spike: int) -> str:
        """Say what the last copies reach in a spike with and without the patch."""
        copies = f"copies of {self.shown(spike).sum()} of {count_of(len(self.words), 'word')}"
        before, after, random = self.furthest(spike)
        return (
            f"Under the patch, {copies} reach at most {after:.0%} of the spike of {self.spikes[spike]} (without "
            f"it: {before:.0%}; random neurons: {random:.0%})."
        )

    def sentences(self) -> list[str]:
        """Say what the patch does in each spike, to attention and output after copies, and to ordinary text."""
        lines = [self.line(number) for number in range(len(self.spikes))]
        for number, spike in enumerate(self.spikes):
            attention = self.attention(number)
            if attention is not None:
                given = _in_cases(attention)
                lines.append(f"Heads that can read the spike of {spike} give the copies {given} of their attention.")
        one_more = self.one_more()
        if one_more is not None:
            lines.append(f"The model repeats the word with a probability of {_in_cases(one_more)}.")
        return [*lines, *self.ordinary.sentences()]


def _in_cases(cases: Float[np.ndarray, " case"]) -> str:
    before, after, random = cases
    return f"{after:.0%} (without the patch: {before:.0%}; random neurons: {random:.0%})"


@torch.no_grad()
def proof_of(
    setup: Setup, spikes: Sequence[Spike], patch: SinkPatch, limit: int, pieces: int, length: int
) -> PatchProof:
    """Measure what a patch does to repeated words and to ordinary text.

    Args:
        setup: The whole model and its text.
        spikes: The spikes of the first token.
        patch: The patch.
        limit: Largest number of repetitions.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
    """
    target, edits = setup.target, (None, patch, random_patch(setup, patch))
    ordinary = ordinary_text(setup, edits, pieces, length)
    if not spikes:
        return PatchProof((), 0, (), np.zeros((len(CASES), 0, 0)), None, ordinary)
    ids = pick_tokens(setup)
    before = prefix_of(setup, ids)
    count, intact = _well_inside(target, spikes, ids, before, limit)
    rows = repeated(before, ids, count)
    last = rows.shape[1] - 1
    along = [torch.stack([of_spike[:, last] for of_spike in intact])]
    for edit in edits[1:]:
        setup.progress("patches", len(along), len(CASES))
        with under(edit, target):
            along.append(torch.stack([of_spike[:, last] for of_spike in along_spikes(target, spikes, rows)]))
    texts = text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    others = texts[torch.arange(len(rows)) % len(texts)]
    beside = along_spikes(target, spikes, append_copy(others, rows))  # a copy is last, and text before it
    along += [torch.stack([of_spike[:, at] for of_spike in beside]) for at in (last, last - 1)]
    proof = PatchProof(
        words=token_texts(target, ids),
        repeats=count,
        spikes=tuple(map(name_of, spikes)),
        along=torch.stack(along).numpy(),
        following=None,
        ordinary=ordinary,
    )
    if not proof.failing.any():
        return proof
    return replace(proof, following=after_copies(setup, spikes, edits, rows, len(before)))


def _well_inside(
    target: Target, spikes: Sequence[Spike], ids: Sequence[int], before: Sequence[int], limit: int
) -> tuple[int, list[Float[Tensor, "word pos"]]]:
    """Return twice as many copies as the slowest word and spike need, and the projections of the intact model.

    That is well inside the sink, and no longer than that.
    """
    tried, halves, intact = 0, list[int | None](), list[Tensor]()
    for tried in sorted({min(FIRST_LENGTH, limit), limit}):
        intact = along_spikes(target, spikes, repeated(before, ids, tried))
        halves = [half_reached(row[len(before) :]) for of_spike in intact for row in of_spike]
        if None not in halves:
            break
    reached = [half for half in halves if half is not None]
    return max(2, min(tried, 2 * max(reached, default=tried))), intact
