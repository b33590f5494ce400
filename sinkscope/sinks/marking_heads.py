"""Which attention heads mark the first token for the neurons of a norm spike (Yona et al. 2025, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import resampled_margin
from sinkscope.results.parts import Head
from sinkscope.sinks.first_tokens import along_first, heads_up_to, spike_of
from sinkscope.sinks.spikes.controls import random_heads
from sinkscope.sinks.spikes.edited import Written, left_of, means_of
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE
from sinkscope.sinks.spikes.first_marks import MarkingHeads
from sinkscope.sinks.spikes.marks import Judge, marking_heads
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.thresholds import ENOUGH, HALF
from sinkscope.sinks.tokens import sample_tokens, token_texts, tokens_of_text, vocabulary

SIZES = 16  # sets of the first heads from which the margin of their number is computed
FIRST_TOKENS = 32  # tokens that are put first


def heads_that_mark(
    setup: Setup, tokens: Sequence[str] | None = None, count: int = FIRST_TOKENS, spike: int | None = None
) -> MarkingHeads:
    """Find the attention heads that mark the first token, by what is left of a spike without their output.

    A head's output (`hook_z`, before the output projection) is replaced by its mean over ordinary positions of typical
    text. Different heads may mark different tokens, so many tokens are put first, each alone and without BOS, in
    addition to BOS itself. Heads are judged as one set over all of these tokens (Yona et al. 2025, section 4.3).

    Args:
        setup: The model and its text.
        tokens: Words to put first, one token each. None: tokens of the text, drawn by the seed.
        count: Number of tokens of the text to put first.
        spike: Number of the spike in `find_sinks`. None: among the spikes of the first token that need neurons, the
            one that most heads read.
    """
    words, chosen = _first_tokens(setup, tokens, count), spike_of(setup, spike)
    if chosen is None:
        return MarkingHeads(spike=None, instead=f"{NO_FIRST_SPIKE}, so no mark can be read.")
    heads = heads_up_to(setup.target, chosen.first_writer)
    means = means_of(chosen.spike, heads)
    has = along_first(chosen.spike, words, [], means)[0] >= HALF
    having, unmarked = (token_texts(setup.target, some.tolist()) for some in (words[has], words[~has]))
    name = chosen.name
    result = MarkingHeads(spike=name, neurons=chosen.needed_neurons, tokens=having, unmarked=unmarked, heads=heads)
    if not having:
        return replace(result, instead=f"No token that was tried has the spike of {name} when it stands first.")
    if not heads:
        return replace(result, instead=f"There are no heads below the neurons of the spike of {name}.")
    return _with_heads(result, chosen.spike, words[has], means, setup.seed)


def _first_tokens(setup: Setup, tokens: Sequence[str] | None, count: int) -> Int[Tensor, " token"]:
    """Return the tokens that are put first, BOS before all if the model has it."""
    if tokens:
        words = vocabulary(setup.target, tokens)
    else:
        words = sample_tokens(tokens_of_text(setup), count, setup.seed)
    if setup.bos is not None:
        words = [setup.bos, *(word for word in words if word != setup.bos)]
    return torch.tensor(words)


def _with_heads(
    result: MarkingHeads, spike: Spike, tokens: Int[Tensor, " token"], means: Written, seed: int
) -> MarkingHeads:
    """Measure what is left without each head, the set that marks, and its control."""

    def judge(sets: Sequence[Parts]) -> Float[Tensor, "edit token"]:
        return left_of(along_first(spike, tokens, sets, means))

    along = along_first(spike, tokens, [(head,) for head in result.heads], means)
    every, marking = marking_heads(result.heads, left_of(along), judge)
    result = replace(result, left=(along[1:] / along[0]).T.numpy(), every=replace(every, heads=result.heads))
    if marking is None:
        return result
    marks = tuple(head for head in result.heads if head in marking.heads)
    result = replace(result, marking=replace(marking, heads=marks), count_margin=count_margin(every.heads, judge))
    sets = random_heads(marks, every.heads, seed)
    if not sets:
        return result
    alike = alike_heads(marks, every.heads, spike.survey.received(spike.place.mask))
    return replace(result, random=float(judge(sets).mean(1).min()), alike=float(judge([alike]).mean()))


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
