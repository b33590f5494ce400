"""Tokens that stand first, each alone, and the heads that mark them for a norm spike (Yona et al. 2025, section 4.3).

Such a token sees nothing but itself. A replaced head gives its mean output at ordinary positions of typical text.

1. Many tokens are put first. Of those that have the spike it is read what is left without each head.
2. The fewest heads are searched that as one set take away nine tenths of what all heads take.
3. Controls: as many random heads, and as many of about equal attention to the first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Mean, Row, Setup, mean_of
from sinkscope.measure.margin import resampled_margin
from sinkscope.models.target import Target
from sinkscope.results.notation import Head, word_list
from sinkscope.results.row import row_of
from sinkscope.sinks.spikes.controls import random_heads
from sinkscope.sinks.spikes.edited import Batch, Written, left_of, means_of, read
from sinkscope.sinks.spikes.find import spike_of
from sinkscope.sinks.spikes.marks import Judge, marking_heads
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.thresholds import ENOUGH, HALF
from sinkscope.sinks.tokens import sample_tokens, token_texts, tokens_of_text, vocabulary

SIZES = 16  # sets of the first heads from which the margin of their number is computed
FIRST_TOKENS = 32  # tokens that are put first
FIRST, FEWEST = "first tokens", "fewest heads"


def heads_that_mark(setup: Setup, tokens: Sequence[str] | None = None, count: int = FIRST_TOKENS) -> tuple[Row, ...]:
    """Find the attention heads that mark the first token, by what is left of a spike without their output.

    Different heads may mark different tokens, so many tokens are put first, each alone and without BOS, in addition to
    BOS itself. Heads are judged as one set over all of these tokens.

    Args:
        setup: The model and its text.
        tokens: Words to put first, one token each. None: tokens of the text, drawn by the seed.
        count: Number of tokens of the text to put first.

    Returns:
        Rows of the table "first tokens": how many tokens have the spike, and what is left of it without all heads
        before the neurons, without the fewest that mark, without as many others, and without each head that takes half
        of it from a token. None if no neurons are known.
    """
    words, chosen = _first_tokens(setup, tokens, count), spike_of(setup)
    if chosen is None:
        return ()
    heads = heads_up_to(setup.target, chosen.first_writer)
    means = means_of(chosen.spike, heads)
    has = along_first(chosen.spike, words, [], means)[0] >= HALF
    having = token_texts(setup.target, words[has].tolist())
    rows = [replace(row_of(FIRST, "tokens", have=len(having), tried=len(words)), about=chosen.spike.name)]
    if not having or not heads:
        return tuple(rows)

    def judge(sets: Sequence[Parts]) -> Float[Tensor, "edit token"]:
        return left_of(along_first(chosen.spike, words[has], sets, means))

    def add(name: str, left: Float[Tensor, " token"], heads: Mean | None = None, note: str = "") -> None:
        numbers = {"left": mean_of(left, "share"), "heads": heads}
        rows.append(replace(row_of(FIRST, name, note, **numbers), about=chosen.spike.name, texts=having))

    along = along_first(chosen.spike, words[has], [(head,) for head in heads], means)
    order, marking = marking_heads(heads, left_of(along), judge)
    add("all heads", judge([heads])[0], Mean(float(len(heads)), kind="count"))
    marks = tuple(head for head in heads if head in marking)
    if marks:
        number = Mean(float(len(marks)), count_margin(order, judge), kind="count")
        add(FEWEST, judge([marks])[0], number, word_list(marks, len(marks)))
        sets = random_heads(marks, order, setup.seed)
        if sets:
            left = judge([*sets, alike_heads(marks, order, chosen.spike.survey.received(chosen.spike.place.mask))])
            add("random heads", left[left[:-1].mean(1).argmin()])
            add("heads of equal attention", left[-1])
    for head, left in zip(heads, along[1:] / along[0], strict=True):
        if bool((left < HALF).any()):
            add(str(head), left)
    return tuple(rows)


def _first_tokens(setup: Setup, tokens: Sequence[str] | None, count: int) -> Int[Tensor, " token"]:
    """Return the tokens that are put first, BOS before all if the model has it."""
    if tokens:
        words = vocabulary(setup.target, tokens)
    else:
        words = sample_tokens(tokens_of_text(setup), count, setup.seed)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    return torch.tensor(words)


def count_margin(order: Sequence[Head], judge: Judge) -> float | None:
    """Return the margin of the number of heads that mark, over tokens.

    Args:
        order: All heads, those that mark first.
        judge: Tells what is left without sets of them.
    """
    sizes = np.unique(np.geomspace(1, len(order), min(SIZES, len(order))).round()).astype(int)
    left = judge([tuple(order[:size]) for size in sizes.tolist()]).numpy()

    def number(sample: Int[np.ndarray, "sample token"]) -> Float[np.ndarray, " sample"]:
        counts = np.empty(len(sample))
        for row, tokens in enumerate(sample):
            gone = np.maximum.accumulate(1 - left[:, tokens].mean(1))
            counts[row] = np.interp(ENOUGH * gone[-1], np.append(0.0, gone), np.append(0, sizes))
        return counts

    return resampled_margin(number, left.shape[1])


def alike_heads(heads: Sequence[Head], among: Sequence[Head], attention: Float[Tensor, "layer head text"]) -> Parts:
    """Return a different control for each head: the head whose mean attention to a place is nearest.

    Args:
        heads: The heads that are compared.
        among: All heads, in an order that was measured.
        attention: Attention of all heads to the place.
    """
    mean = attention.nanmean(2)
    left, nearest = [head for head in among if head not in heads], list[Head]()
    for head in heads:
        own = float(mean[head.layer, head.head])
        nearest.append(min(left, key=lambda other: abs(float(mean[other.layer, other.head]) - own)))
        left.remove(nearest[-1])
    return tuple(nearest)


def heads_up_to(target: Target, last_layer: int) -> tuple[Head, ...]:
    """Return all heads of the layers with softmax attention up to a layer."""
    layers = [layer for layer in target.attending if layer <= last_layer]
    return tuple(Head(layer, head) for layer in layers for head in range(target.n_heads))


def along_first(
    spike: Spike, tokens: Int[Tensor, " token"], edits: Sequence[Parts], means: Written
) -> Float[Tensor, "state token"]:
    """Project each token, which stands alone, on a spike's direction, as a share of the spike: intact, then edited.

    Args:
        spike: The spike of the first token.
        tokens: The tokens.
        edits: The heads that each edit replaces.
        means: What replaced heads write instead.
    """
    every: list[Parts] = [(), *edits]
    edit_of = torch.arange(len(every)).repeat_interleave(len(tokens))
    ids = tokens.repeat(len(every))[:, None]
    batch = Batch((spike,), ids, (torch.ones_like(ids, dtype=torch.bool),), every, edit_of=edit_of, values=means)
    return read(batch).along[:, 0].reshape(len(every), -1)
