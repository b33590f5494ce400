"""What follows a repetition, before and after the patch (Yona et al. 2025, section 5 and Table 3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.decode import greedy
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Setup
from sinkscope.opening.open import open_target
from sinkscope.results.claims import Outcome
from sinkscope.results.parts import sites_of
from sinkscope.sinks.patch.patches import PatchArgument, Patches, chosen_patch, random_patch
from sinkscope.sinks.repetition.result import HALF, Repeat, RepeatAnswer
from sinkscope.sinks.repetition.sweep import Sweep, claim_of_cases, rounded
from sinkscope.sinks.tokens import TokenRows

ANSWER_AFTER = (50, 400)  # repetitions
NEW_TOKENS = 100  # tokens of an answer at most


def in_memory(setup: Setup) -> Setup:
    """The same setup with the whole model in memory, as logits and generation need it."""
    if setup.target.resident:
        return setup
    model, options = setup.source
    return replace(setup, target=open_target(model, **options, whole=True))


def read_probabilities(sweep: Sweep, patch: PatchArgument) -> Repeat:
    """Run every sequence with and without the patch, and let the model answer after some repetitions.

    Args:
        sweep: What is repeated, in a model that is whole in memory.
        patch: The patch or its file. None: a patch of the causal neurons.
    """
    setup = sweep.setup
    edits: Patches = {"intact": None}
    edit = chosen_patch(setup, patch)
    if edit is not None:
        edits |= {"patched": edit, "random neurons": random_patch(setup, edit)}
    read: list[Tensor] = []
    for act in edits.values():
        with under(act, setup.target):
            read.append(probabilities(sweep, sweep.rows))
        setup.progress("repetitions", len(read), len(edits))
    values = torch.stack(read)  # condition token n
    outcome = Outcome("probability of the token", unit="cases", gives="give the token a probability of {}")
    claims = [sweep.claim(outcome, values[0, :, -1], lambda ids: probabilities(sweep, ids)[:, -1])]
    if edit is not None:
        neurons, patched = edit.checked_sites, values[[1, 0, 2], :, -1]
        claims.insert(0, claim_of_cases(neurons, claims[0].place, outcome, patched, edit="patched"))
        setup.record(patch=sites_of(neurons))
    setup.record(max_repeats=sweep.count)  # the search for neurons recorded its own
    longest, answers = setup.target.max_positions or 1 << 30, list[RepeatAnswer]()
    for act in (None, edit)[: len(edits)]:
        for copies in ANSWER_AFTER:
            if sweep.before + copies + NEW_TOKENS <= longest:
                answers += answers_after(sweep, copies, act)
    return Repeat(
        read="probability",
        claims=tuple(claims),
        conditions=tuple(edits),
        values=rounded(values[:, :, sweep.counts - 1]),
        repeats=np.array([[stopped_after(row >= HALF) for row in rows] for rows in values]),
        answers=tuple(answers),
        **sweep.fields(),
    )


def probabilities(sweep: Sweep, rows: TokenRows) -> Float[Tensor, "token n"]:
    """How probable each repeated token is after every position of its sequence that does not stand before copies."""

    def of_words(logits: Float[Tensor, "row pos vocab"]) -> Float[Tensor, "row pos word"]:
        return logits.float().softmax(-1)[..., sweep.words]

    read = trace(sweep.setup.target, rows, ["logits"], of_words, batch_size=1)["logits"]
    return read[:, sweep.before :].diagonal(dim1=0, dim2=2).T


def answers_after(sweep: Sweep, copies: int, patch: SinkPatch | None) -> list[RepeatAnswer]:
    """What the model writes after so many repetitions of each token, under a patch if there is one."""
    before, words, setup = sweep.rows[:, : sweep.before], sweep.rows[:, -1:], sweep.setup
    prompts = torch.cat([before, words.expand(-1, copies)], 1)
    answers: list[RepeatAnswer] = []
    for word, ids in zip(sweep.words, greedy(setup.target, prompts, NEW_TOKENS, patch), strict=True):
        kept = next((place for place, other in enumerate(ids) if other != word), len(ids))
        token, follows = (setup.tokenizer.decode(part, skip_special_tokens=True) for part in ([word], ids[kept:]))
        answers.append(RepeatAnswer(token, patch is not None, copies, kept, follows))
    return answers


def stopped_after(is_repeated: Bool[Tensor, " n"]) -> float:
    """The first n from which on the token is never repeated again; NaN if it is at the last, or never was."""
    likely = is_repeated.nonzero().flatten().tolist()
    if not likely or likely[-1] == len(is_repeated) - 1:
        return float("nan")
    return likely[-1] + 2.0
