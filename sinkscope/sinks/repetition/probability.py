"""What follows a repetition, before and after the patch (Yona et al. 2025, section 5 and Table 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.hooks.edit.decode import decode, repeat_probabilities
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.models.checks import check_length
from sinkscope.opening.open import open_target
from sinkscope.results.claims import Claim, Outcome
from sinkscope.results.parts import sites_of
from sinkscope.results.style import GREY
from sinkscope.results.tables import Table
from sinkscope.sinks.patch.patches import PatchArgument, Patches, chosen_patch, random_patch
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.repetition.sweep import Reading, Sweep, beside_copies, claim_of_cases, claim_of_copies, rounded
from sinkscope.sinks.tokens import TokenRows

CLEARLY = 2.0  # times the uniform probability: below it, which token is the likeliest one is an accident of rounding
ANSWER_AFTER = (50, 400)  # repetitions
NEW_TOKENS = 100
SHOWN_TEXT = 40  # characters of an answer in the table
INTACT, PATCHED, RANDOM = "intact", "patched", "random neurons"


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


@dataclass(frozen=True, kw_only=True)
class ProbabilityReading(Reading):
    """Probability that the token comes once more after n repetitions; the claims are of the last one.

    Attributes:
        sweep: What was repeated.
        conditions: "intact", and if there is a patch "patched" and "random neurons", a patch of as many others.
        neurons: The neurons of the patch.
        probability: The probability.
        left: First n from which on the token never is clearly the likeliest one again: at more than twice the
            probability that all tokens would share. NaN if it still is at the last n, or never was.
        uniform: Probability of every token if all were equally likely.
        answers: What the model writes.
    """

    sweep: Sweep
    conditions: tuple[str, ...]
    neurons: Neurons
    probability: Float[np.ndarray, "condition token n"]
    left: Float[np.ndarray, "condition token"]
    uniform: float
    answers: tuple[RepeatAnswer, ...]

    def facts(self) -> list[str]:
        """Where the repetition ends with and without the patch."""
        lines: list[str] = []
        if not self.neurons:
            lines.append("There is no causal neuron of a spike at the first token to patch.")
        for condition, left in zip(self.conditions, self.left, strict=True):
            stopped = left[np.isfinite(left)]
            line = f"{len(stopped)} of {len(left)} tokens stop being repeated ({condition}"
            if len(stopped):
                line += f"; median after {np.median(stopped):.0f} copies"
            lines.append(line + ").")
        return lines

    def rows(self) -> Table:
        """One row per answer. The text that follows is cut."""
        return [{**vars(answer), "follows": ascii(answer.follows[:SHOWN_TEXT])[1:-1]} for answer in self.answers]

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
    patch: PatchArgument,
    answer_after: Sequence[int] | None,
    new_tokens: int | None,
) -> ProbabilityReading:
    """Run every sequence with and without the patch, and let the model answer after some repetitions.

    Args:
        setup: The model, whole in memory.
        sweep: What is repeated.
        rows: The sequences.
        patch: The patch or its file. None: a patch of the causal neurons.
        answer_after: Numbers of repetitions after which the model answers. None: 50 and 400.
        new_tokens: Maximum length of an answer. None: 100.

    Raises:
        SinkscopeError: The repetitions and the answer do not fit the context.
    """
    target, before = setup.target, rows[0, : len(sweep.before)].tolist()
    after, new_tokens = list(answer_after or ANSWER_AFTER), new_tokens or NEW_TOKENS
    setup.record(answer_after=after, new_tokens=new_tokens)
    around = f"a text of {max(after)} repetitions behind {len(before)} tokens"
    check_length(target, around, len(before) + max(after), new_tokens, "give smaller --answer-after or --new-tokens")
    edits: Patches = {INTACT: None}
    edit = chosen_patch(setup, patch)
    if edit is not None:
        edits |= {PATCHED: edit, RANDOM: random_patch(setup, edit)}
    probability = torch.zeros(len(edits), len(rows), len(sweep.counts))
    left = np.full(probability.shape[:2], np.nan)
    answers: list[RepeatAnswer] = []
    uniform = 1 / int(target.config.vocab_size)
    for condition, (name, act) in enumerate(edits.items()):
        for token, word in enumerate(sweep.ids):
            curve, likeliest = repeat_probabilities(target, before, word, sweep.max_repeats, act)
            probability[condition, token] = curve[sweep.counts - 1]
            left[condition, token] = stopped_after((likeliest == word) & (curve > CLEARLY * uniform))
            setup.progress(f"repetitions, {name}", token + 1, len(rows))
        for count in after if name != RANDOM else ():
            answers += _answers(setup, sweep, before, count, new_tokens, patched=act)
            setup.progress(f"answers, {name}", count, max(after))
    claims = [_of_copies(setup, sweep, rows)]
    neurons: Neurons = ()
    if edit is not None:
        neurons = edit.checked_sites
        patched = probability[[1, 0, 2], :, -1]
        copies = claims[0]
        claims.insert(0, claim_of_cases(neurons, copies.place, copies.outcome, patched, edit="patched"))
    setup.record(patch=sites_of(neurons), max_repeats=sweep.max_repeats)  # the search for neurons recorded its own
    return ProbabilityReading(
        sweep=sweep,
        conditions=tuple(edits),
        neurons=neurons,
        probability=rounded(probability),
        left=left,
        uniform=uniform,
        answers=tuple(answers),
        claims=tuple(claims),
    )


def _of_copies(setup: Setup, sweep: Sweep, rows: TokenRows) -> Claim:
    """How probable the token is after the last copy, beside one copy and other tokens there."""
    last = []
    for texts in beside_copies(setup, rows, len(sweep.before)):
        follows = trace(setup.target, texts, ["logits"], lambda logits: logits[:, -1].float().softmax(-1), batch_size=1)
        last.append(follows["logits"][range(len(rows)), sweep.ids])
    outcome = Outcome("probability of the token", unit="cases", gives="give the token a probability of {}")
    return claim_of_copies(sweep.max_repeats, outcome, torch.stack(last))


def _answers(
    setup: Setup, sweep: Sweep, before: list[int], count: int, new_tokens: int, patched: SinkPatch | None
) -> list[RepeatAnswer]:
    """What the model writes after so many repetitions of each token, under a patch if there is one."""
    prompts = torch.tensor([[*before, *[word] * count] for word in sweep.ids])
    answers: list[RepeatAnswer] = []
    for number, ids in enumerate(decode(setup.target, prompts, new_tokens, patched)[0]):
        kept = next((place for place, other in enumerate(ids) if other != sweep.ids[number]), len(ids))
        follows = setup.tokenizer.decode(ids[kept:], skip_special_tokens=True)
        answers.append(RepeatAnswer(sweep.tokens[number], patched is not None, count, kept, len(ids), follows))
    return answers


def stopped_after(is_token: Bool[Tensor, " n"]) -> float:
    """The first n from which on the token never is the likeliest one again; NaN if it is at the last, or never was."""
    likeliest = is_token.nonzero().flatten().tolist()
    if not likeliest or likeliest[-1] == len(is_token) - 1:
        return float("nan")
    return likeliest[-1] + 2.0
