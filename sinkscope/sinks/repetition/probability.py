"""What follows a repetition, before and after the patch (Yona et al. 2025, section 5 and Table 3)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.decode import decode
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.opening.open import open_target
from sinkscope.results.claims import Outcome
from sinkscope.sinks.patch.patches import PatchArgument, chosen_patch, random_patch
from sinkscope.sinks.repetition.result import Repeat, RepeatAnswer
from sinkscope.sinks.repetition.sweep import Sweep, claim_of_cases, claim_of_copies
from sinkscope.sinks.thresholds import HALF
from sinkscope.sinks.tokens import TokenRows

ANSWER_AFTER = (50, 400)  # repetitions
NEW_TOKENS = 100  # tokens of an answer at most


def read_probabilities(sweep: Sweep, patch: PatchArgument) -> Repeat:
    """Run every sequence with and without the patch, and let the model answer after some repetitions.

    Args:
        sweep: What is repeated.
        patch: The patch or its file. None: a patch of the causal neurons.
    """
    setup = sweep.setup
    if not setup.target.resident:  # logits and generation need the whole model in memory
        model, options = setup.source
        setup = replace(setup, target=open_target(model, **options, whole=True))
        sweep = replace(sweep, setup=setup)
    edits: dict[str, SinkPatch | None] = {"intact": None}
    edit = chosen_patch(setup, patch)
    if edit is not None:
        edits |= {"patched": edit, "random neurons": random_patch(setup, edit)}

    def of_words(logits: Float[Tensor, "row pos vocab"]) -> Float[Tensor, "row pos word"]:
        return logits.float().softmax(-1)[..., sweep.words]

    def read(rows: TokenRows) -> Float[Tensor, "token n"]:
        probability = trace(setup.target, rows, ["logits"], of_words, batch_size=1)["logits"]
        return probability[:, sweep.before :].diagonal(dim1=0, dim2=2).T

    curves: list[Tensor] = []
    for act in edits.values():
        with under(act, setup.target):
            curves.append(read(sweep.rows))
        setup.progress("repetitions", len(curves), len(edits))
    values = torch.stack(curves)  # condition token n
    last = values[:, :, -1]
    contrasts = [read(rows)[:, -1] for rows in sweep.contrasts()]
    outcome = Outcome("probability of the token", unit="cases", gives="give the token a probability of {}")
    claims = [claim_of_copies(sweep.count, outcome, torch.stack([last[0], *contrasts]), exact=sweep.named)]
    if edit is not None:
        sites, place = edit.checked_sites, claims[0].place
        claims.insert(0, claim_of_cases(sites, place, outcome, last[[1, 0, 2]], edit="patched", exact=sweep.named))
    longest, answers = setup.target.max_positions or 1 << 30, list[RepeatAnswer]()
    for name, act in edits.items():
        for copies in ANSWER_AFTER:
            if name != "random neurons" and sweep.before + copies + NEW_TOKENS <= longest:
                answers += answers_after(sweep, copies, act)
    return Repeat(
        quantity="probability",
        claims=tuple(claims),
        conditions=tuple(edits),
        repeats=np.array([[stopped_after(row) for row in rows] for rows in values]),
        values=values[:, :, sweep.counts - 1].numpy(),
        answers=tuple(answers),
        **sweep.fields(),
    )


def answers_after(sweep: Sweep, copies: int, patch: SinkPatch | None) -> list[RepeatAnswer]:
    """Let the model answer after so many repetitions of each token, under a patch if there is one."""
    before, words, setup = sweep.rows[:, : sweep.before], sweep.rows[:, -1:], sweep.setup
    prompts = torch.cat([before, words.expand(-1, copies)], 1)
    answers: list[RepeatAnswer] = []
    for word, ids in zip(sweep.words, decode(setup.target, prompts, NEW_TOKENS, patch)[0], strict=True):
        kept = next((place for place, other in enumerate(ids) if other != word), len(ids))
        token, follows = (setup.tokenizer.decode(part, skip_special_tokens=True) for part in ([word], ids[kept:]))
        answers.append(RepeatAnswer(token, patch is not None, copies, kept, follows))
    return answers


def stopped_after(probability: Float[Tensor, " n"]) -> float:
    """Return the first n from which on the probability stays below a half; NaN if it does not, or never was above."""
    likely = (probability >= HALF).nonzero().flatten().tolist()
    if not likely or likely[-1] == len(probability) - 1:
        return float("nan")
    return likely[-1] + 2.0
