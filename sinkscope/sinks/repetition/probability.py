"""What follows a repetition, before and after the patch (Yona et al. 2025, section 5 and Table 3)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.hooks.edit import SinkPatch
from sinkscope.hooks.edit.decode import greedy, repeat_probabilities
from sinkscope.measure import Setup
from sinkscope.models.checks import check_length
from sinkscope.opening.open import open_target
from sinkscope.results.notation import count_of, neuron_names
from sinkscope.results.style import GREY
from sinkscope.results.tables import Table
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.patch.evaluate import read_patch_argument
from sinkscope.sinks.repetition.sweep import Reading, Sweep, rounded
from sinkscope.sinks.tokens import TokenRows

CLEARLY = 2.0  # times the uniform probability: below it, which token is the likeliest one is an accident of rounding
ANSWER_AFTER = (50, 400)  # repetitions
NEW_TOKENS = 100
SHOWN_TEXT = 40  # characters of an answer in the table


@dataclass(frozen=True)
class RepeatAnswer:
    """The model's greedy answer after `repeats` repetitions.

    Attributes:
        token: The repeated token.
        patched: Whether the model ran under the patch.
        repeats: Repetitions in the prompt.
        kept: Tokens of the answer that continue the repetition, before the first other token.
        tokens: Tokens of the answer, including the end of sequence.
        follows: The text after the repetition.
    """

    token: str
    patched: bool
    repeats: int
    kept: int
    tokens: int
    follows: str


@dataclass(frozen=True)
class ProbabilityReading(Reading):
    """Probability that the token comes once more after n repetitions.

    Attributes:
        sweep: What was repeated.
        conditions: "intact", and "patched" if there is a patch.
        neurons: The neurons of the patch, (layer, neuron) or (layer, expert, neuron).
        probability: The probability.
        caught: First n after which the token is clearly the likeliest one: at more than twice the probability that all
            tokens would share. NaN if never.
        left: First n from which on it never is again. NaN if it still is at the last n, or never was.
        uniform: Probability of every token if all were equally likely.
        answers: What the model writes.
    """

    sweep: Sweep
    conditions: tuple[str, ...]
    neurons: tuple[tuple[int, ...], ...]
    probability: Float[np.ndarray, "condition token n"]
    caught: Float[np.ndarray, "condition token"]
    left: Float[np.ndarray, "condition token"]
    uniform: float
    answers: tuple[RepeatAnswer, ...]

    def conclusion(self) -> str:
        """The probability that the repetition continues, without and with the patch."""
        last = np.median(self.probability[:, :, -1], axis=1)
        said = f"After {self.sweep.times} the repeated token has probability {last[0]:.2g}"
        if len(last) == 1:
            return f"{said}; there is no causal neuron of a spike at the first token to patch."
        tokens = count_of(len(self.sweep.tokens), "token")
        return f"{said} in the intact model and {last[1]:.2g} under the patch (medians of {tokens})."

    def details(self) -> list[str]:
        """The patch, and where the repetition ends with and without it."""
        lines = []
        if self.neurons:
            lines.append(f"The patch holds {neuron_names(self.neurons)}.")
        for condition, caught, left in zip(self.conditions, self.caught, self.left, strict=True):
            stopped = left[np.isfinite(left)]
            began = np.isfinite(caught).sum()
            line = f"The {condition} model began to repeat {began} of {len(caught)} tokens"
            if began:
                line += f", and stopped repeating {len(stopped)} of these"
            if len(stopped):
                line += f", in the median after {np.median(stopped):.0f} repetitions"
            lines.append(line + ".")
        return lines

    def rows(self) -> Table:
        """One row per answer. The text that follows is cut."""
        table = []
        for answer in self.answers:
            table.append({**vars(answer), "follows": ascii(answer.follows[:SHOWN_TEXT])[1:-1]})
        return table

    def draw(self) -> Any:
        """Probability over n, a line per token and a panel per condition."""
        fig = self.sweep.curves(self.probability, self.conditions, "p(next = token)")
        return fig.add_hline(self.uniform, line={"color": GREY, "dash": "dot"}, annotation_text="uniform")


def in_memory(setup: Setup) -> Setup:
    """The same setup with the whole model in memory, as logits and generation need it."""
    if setup.target.resident:
        return setup
    model, options = setup.source
    return replace(setup, target=open_target(model, **options, whole=True))


def read_probabilities(
    setup: Setup,
    sweep: Sweep,
    rows: TokenRows,
    patch: SinkPatch | str | os.PathLike[str] | None,
    answer_after: Sequence[int] | None,
    new_tokens: int | None,
) -> ProbabilityReading:
    """Run every sequence with and without the patch, and let the model answer after some repetitions.

    Args:
        setup: The model, whole in memory.
        sweep: What is repeated.
        rows: The sequences.
        patch: The patch or its file. None: a patch of the causal neurons.
        answer_after: Numbers of repetitions after which the model answers. None: 50 and 400, or what the context holds.
        new_tokens: Maximum length of an answer. None: 100, or a quarter of the context.

    Raises:
        SinkscopeError: The repetitions and the answer do not fit the context.
    """
    target = setup.target
    before = rows[0, : len(sweep.before)].tolist()
    limit = target.max_positions or 1 << 30
    new_tokens = new_tokens or min(NEW_TOKENS, limit // 4)
    after = list(answer_after or ())
    if not after:
        most = max(1, limit - len(before) - new_tokens)
        after = sorted({min(count, most) for count in ANSWER_AFTER})
    setup.record(answer_after=after, new_tokens=new_tokens)
    around = f"a text of {max(after)} repetitions behind {len(before)} tokens"
    check_length(target, around, len(before) + max(after), new_tokens, "repeat less often before an answer")
    edit = chosen_patch(setup, patch)
    edits: dict[str, SinkPatch | None] = {"intact": None}
    neurons = ()
    if edit is not None:
        edits["patched"] = edit
        neurons = tuple(site.numbers for site in edit.checked_sites)
    shape = len(edits), len(sweep.tokens)
    probability = torch.zeros(*shape, len(sweep.counts))
    caught = np.full(shape, np.nan)
    left = np.full(shape, np.nan)
    answers = []
    uniform = 1 / int(target.config.vocab_size)
    for condition, (name, act) in enumerate(edits.items()):
        for token, (word,) in enumerate(sweep.ids):
            curve, likeliest = repeat_probabilities(target, before, word, sweep.max_repeats, act)
            probability[condition, token] = curve[sweep.counts - 1]
            clearly = (likeliest == word) & (curve > CLEARLY * uniform)
            caught[condition, token], left[condition, token] = repeated_span(clearly)
            setup.progress(f"repetitions, {name}", token + 1, len(sweep.tokens))
        for count in after:
            prompts = torch.tensor([[*before, *ids * count] for ids in sweep.ids])
            for token, ids in enumerate(greedy(target, prompts, new_tokens, act)):
                (word,) = sweep.ids[token]
                kept = next((place for place, other in enumerate(ids) if other != word), len(ids))
                follows = setup.tokenizer.decode(ids[kept:], skip_special_tokens=True)
                answers.append(RepeatAnswer(sweep.tokens[token], act is not None, count, kept, len(ids), follows))
            setup.progress(f"answers, {name}", count, max(after))
    return ProbabilityReading(
        sweep,
        conditions=tuple(edits),
        neurons=neurons,
        probability=rounded(probability),
        caught=caught,
        left=left,
        uniform=uniform,
        answers=tuple(answers),
    )


def chosen_patch(setup: Setup, patch: SinkPatch | str | os.PathLike[str] | None) -> SinkPatch | None:
    """The given patch, or one of the causal neurons; None if the model has none."""
    if patch is not None:
        return read_patch_argument(patch)
    sink = sink_neurons(setup)
    calibrated = {neuron.site: neuron.neutral_post for neuron in sink.neurons}
    if not calibrated or sink.made is None or not sink.made.spike.place.is_first:  # it keeps the first token's value
        return None
    return SinkPatch(sites=list(calibrated), calibrated=calibrated)


def repeated_span(is_token: Bool[Tensor, " n"]) -> tuple[float, float]:
    """First n after which the token is the likeliest one, and the first n from which on it never is again; else NaN."""
    likeliest = (1 + is_token.nonzero().flatten()).tolist()
    if not likeliest:
        return float("nan"), float("nan")
    stopped = float("nan") if likeliest[-1] == len(is_token) else likeliest[-1] + 1.0
    return float(likeliest[0]), stopped
