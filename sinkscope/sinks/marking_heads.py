"""Which attention heads mark the first token for the neurons of a norm spike (Yona et al. 2025, section 4.3)."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.measure import Natural, Result, Setup, Whole, measurement
from sinkscope.measure.margin import resampled_margin
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.parts import Head, Neuron
from sinkscope.results.result import Number
from sinkscope.results.style import BLUE, figure_of
from sinkscope.results.tables import Table
from sinkscope.sinks.first_tokens import along_first, heads_up_to, percent_with_margin, spike_of
from sinkscope.sinks.spikes.controls import random_heads
from sinkscope.sinks.spikes.edited import Written, left_of, means_of
from sinkscope.sinks.spikes.find import NO_FIRST_SPIKE
from sinkscope.sinks.spikes.marks import Judge, Without, marking_heads
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.thresholds import ENOUGH, HALF, RAISED
from sinkscope.sinks.tokens import refuse_n_tokens, sample_tokens, token_texts, tokens_of_text, vocabulary

NAMED = 6  # heads that a sentence names
SIZES = 16  # sets of the first heads from which the margin of their number is computed


@dataclass(frozen=True, kw_only=True)
class MarkingHeads(Result):
    """Which heads mark the first token for a spike.

    Attributes:
        spike: The spike of the first token, by its layers. None: no spike with known neurons.
        instead: What there is instead of a finding.
        neurons: The neurons that the spike needs.
        tokens: The tokens that have the spike when they stand first, each alone: they reach half of the first token's
            projection. BOS comes first, if there is one.
        unmarked: The tokens that do not.
        heads: The heads of all layers with softmax attention up to that of the first neuron.
        left: What is left of each token's projection with one head replaced.
        marking: The fewest heads found that take away nine tenths of what all heads take, as one set. None: without
            all heads, more than three quarters of the spike are left.
        every: All heads as one set. None: no token has the spike.
        count_margin: Half of the 95 % interval of the number of these heads, by a bootstrap over tokens.
        random: The least that is left without as many random heads. None: there are too few.
        alike: What is left without as many other heads of about equal attention to the first token of typical text.
            None: there are too few.
    """

    percent = ("remaining",)
    columns = ("head", "marks", "remaining", "tokens")
    glossary: ClassVar = {
        "marks": "whether the head is in the set that marks the first token",
        "remaining": "what remains of the spike with this head alone replaced, over all tokens",
        "tokens": "number of tokens of whose spike less than half remains then",
    }

    spike: str | None
    instead: str | None = None
    neurons: tuple[Neuron, ...] = ()
    tokens: tuple[str, ...] = ()
    unmarked: tuple[str, ...] = ()
    heads: tuple[Head, ...] = ()
    left: Float[np.ndarray, "token head"] | None = None
    marking: Without | None = None
    every: Without | None = None
    count_margin: float | None = None
    random: float | None = None
    alike: float | None = None

    @property
    def control(self) -> tuple[str, float] | None:
        """The other heads without which least is left, in words, and how much. None: there are too few."""
        controls = {"random heads": self.random, "others of equal attention": self.alike}
        known = {name: left for name, left in controls.items() if left is not None}
        return min(known.items(), key=lambda item: item[1]) if known else None

    def conclusion(self) -> str:
        """Say which heads mark, or that none does, with what is left without them."""
        if self.every is None:
            return self.instead or f"{NO_FIRST_SPIKE}."
        tokens = count_of(len(self.tokens), "token")
        if self.marking is None:
            left = percent_with_margin(self.every.left, self.every.margin)
            remains = f"{left} of the spike of {self.spike} remains at {tokens}"
            return f"No head marks the first token: without all {len(self.heads)}, {remains} (with them: 100%)."
        left, heads = percent_with_margin(self.marking.left, self.marking.margin), self.marking.heads
        names = word_list(heads)
        if len(heads) > NAMED:
            within = "" if self.count_margin is None else f" (± {self.count_margin:.0f})"
            names = f"{len(heads)} of {len(self.heads)} heads{within}"
        remains = f"{left} of the spike of {self.spike} remains at {tokens}"
        if self.control is None:
            return f"Without {names}, {remains}; too few others are left to compare with."
        control, control_left = self.control
        if control_left <= self.marking.left + (self.marking.margin or 0.0):
            return f"Without {names}, {remains}, but as little without others ({control}: {control_left:.0%})."
        mark = "marks" if len(heads) == 1 else "mark"
        return f"{names} {mark} the first token: without them, {remains} ({control}: {control_left:.0%})."

    def details(self) -> list[str]:
        """Say how many tokens were tried, what is left without all heads, and which heads work against the spike.

        The head of the first token (or BOS) is named if the set does not contain it; and the head without which the
        spike rises most, where random heads raise it.
        """
        if self.spike is None:
            return []
        tried = count_of(len(self.tokens) + len(self.unmarked), "token")
        lines = [f"{len(self.tokens)} of {tried}, each alone in first place, have the spike of {self.spike}."]
        if self.every is None or self.marking is None or self.left is None:
            return lines
        left = percent_with_margin(self.every.left, self.every.margin)
        lines.append(f"Without all {len(self.heads)} heads up to layer {self.heads[-1].layer}, {left} remains.")
        if self.count_margin is not None:
            lines.append(f"Over tokens the set has {len(self.marking.heads)} heads ± {self.count_margin:.0f}.")
        own = self.heads[int(self.left[0].argmin())]
        if self.left[0].min() < HALF and own not in self.marking.heads:
            without = f"without {own}, {percent_with_margin(float(self.left[0].min()), None)} of its spike remains"
            lines.append(f"{self.tokens[0]!r} has a head of its own: {without}.")
        if self.random is not None and self.random >= RAISED:
            mean = self.left.mean(0)
            lines.append(
                f"The other heads work against the spike: without as many of them it rises to {self.random:.0%}, "
                f"without {self.heads[int(mean.argmax())]} alone to {mean.max():.0%}."
            )
        return lines

    def numbers(self) -> list[Number]:
        """Return how many heads mark, and what is left of the spike without them."""
        if self.marking is None or self.control is None:
            return []
        marking, whole, (control, control_left) = self.marking, len(self.heads), self.control
        count = Number(
            "heads",
            "heads that mark the first token",
            len(marking.heads) / whole,
            margin=None if self.count_margin is None else self.count_margin / whole,
            share=True,
            items=tuple(str(head) for head in marking.heads),
            whole=whole,
        )
        left = Number(
            "left", "of the spike left without them", marking.left, control_left, marking.margin, True, control
        )
        return [count, left]

    def rows(self) -> Table:
        """Return a row per head, marking heads first."""
        rows: Table = []
        if self.left is None:
            return rows
        marking = () if self.marking is None else self.marking.heads
        for head, left in zip(self.heads, self.left.T.astype(float), strict=True):
            few = int((left < HALF).sum())
            rows.append({"head": str(head), "marks": head in marking, "remaining": float(left.mean()), "tokens": few})
        return sorted(rows, key=lambda row: (not row["marks"], row["remaining"]))


def draw(result: MarkingHeads) -> go.Figure:
    """Draw what is left at each token without each head."""
    fig = go.Figure()
    if result.left is not None:
        order = np.lexsort(result.left.T)  # tokens that share a head lie beside each other
        names = [html.escape(f"{result.tokens[token]!r} ({token})") for token in order]
        heads = [str(head) for head in result.heads]
        fig = px.imshow(result.left[order], x=heads, y=names, zmin=0, zmax=1, aspect="auto", origin="lower")
        fig.update_coloraxes(colorscale=[BLUE, "#f7f7f7"], colorbar_tickformat=".0%")
    return figure_of(fig, result, width=700, height=560)


@measurement(
    check=refuse_n_tokens,
    figure=draw,
)
def heads(
    setup: Setup, *, tokens: Sequence[str] | None = None, n_tokens: Natural | None = None, spike: Whole | None = None
) -> MarkingHeads:
    """Find the attention heads that mark the first token, by what is left of a spike without their output.

    A head's output (`hook_z`, before the output projection) is replaced by its mean over ordinary positions of typical
    text. Different heads may mark different tokens, so many tokens are put first, each alone and without BOS, in
    addition to BOS itself. Heads are judged as one set over all of these tokens (Yona et al. 2025, section 4.3).

    Args:
        tokens: Words to put first, one token each. By default `n_tokens` tokens of the text, drawn by the seed.
        n_tokens: Number of tokens of the text to put first. By default 32.
        spike: Number of the spike in `find_sinks`. By default, among the spikes of the first token that need
            neurons, the one that most heads read.
    """
    words, chosen = _first_tokens(setup, tokens, n_tokens or 32), spike_of(setup, spike)
    if chosen is None:
        return MarkingHeads(spike=None, instead=f"{NO_FIRST_SPIKE}, so no mark can be read; see `circuit`.")
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
