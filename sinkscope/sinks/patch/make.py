"""A patch of the neurons that a spike needs, and the proof of what it does to repetition and to ordinary text:

1. The spikes of the first token, and the neutral values of the neurons that one of them needs.
2. Copies of words: how far the last one goes along each spike, without the patch, with it, and with random neurons.
3. Text after copies of the words that need repair: the attention that it gives to them; and whether the model repeats
   the word.
4. Held-out text: its perplexity and its logits.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.processes import is_first
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Option, Result, Setup, Whole, measurement
from sinkscope.models.text import text_rows
from sinkscope.results.claims import Claims, Outcome
from sinkscope.results.notation import count_of
from sinkscope.results.parts import Neuron
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.chunks import token_texts
from sinkscope.sinks.first_tokens import HAS, spike_of
from sinkscope.sinks.held_out import Length, Pieces
from sinkscope.sinks.patch.evaluate import Perplexity, changed_logits, patch_eval
from sinkscope.sinks.patch.following import AfterCopies, after_copies
from sinkscope.sinks.patch.patches import random_patch
from sinkscope.sinks.repetition.norm import name_of
from sinkscope.sinks.repetition.sweep import append_copy, claim_of_cases, claim_of_copies
from sinkscope.sinks.spikes.copies import FIRST_LENGTH, along_spikes, half_reached
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.steps import sinks_of
from sinkscope.sinks.tokens import pick_tokens, prefix_of, repeated, repetition_limit

INTACT, PATCHED, RANDOM, ONCE, OTHERS = range(5)
CASES = ("intact", "patched", "random", "one copy", "other tokens")
Verdict = Literal["made", "not-repaired", "refused", "no-sink", "no-repeats"]


@dataclass(frozen=True)
class PatchProof:
    """What a patch does to repeated words and to ordinary text.

    Cases: "intact", "patched" and "random" are the last copy of each word without a patch, with it, and with as many
    random neurons of the same layers patched; without a patch also "one copy" behind ordinary text, and "other tokens".

    Attributes:
        words: The words that were repeated.
        repeats: How often each is repeated.
        spikes: The spikes of the first token, by their layers; that whose neurons are patched comes first.
        along: Projection on the direction of each spike, as a share of the first token's.
        following: What follows copies of the words that need repair. None: no word does.
        perplexity: Of held-out text in the first three cases.
        largest_change: Largest change of a logit of held-out text under the patch.
        flips: Share of its next tokens whose likeliest prediction changes.
        largest_at: The token after which that logit is read.
    """

    words: tuple[str, ...]
    repeats: int
    spikes: tuple[str, ...]
    along: Float[np.ndarray, "case spike word"]
    following: AfterCopies | None
    perplexity: tuple[Perplexity, ...]
    largest_change: float
    flips: float
    largest_at: str = ""

    @property
    def has_spike(self) -> Bool[Tensor, "case spike word"]:
        """Return whether a position reaches half of the first token's projection."""
        return torch.from_numpy(self.along >= HAS)

    @property
    def failing(self) -> Bool[Tensor, " word"]:
        """Return the words that need repair: copies reach the patched spike in the intact model, and one does not."""
        return self.has_spike[INTACT, 0] & ~self.has_spike[ONCE, 0]

    def judged(self, limit: float) -> tuple[Verdict, str]:
        """Return the verdict and its reason."""
        if not self.failing.any():
            tried = f"{self.repeats:,} copies of {count_of(len(self.words), 'word')}"
            return "no-repeats", f"{tried} do not reach half of the first token in the spike of {self.spikes[0]}."
        left = int((self.has_spike[PATCHED, 0] & self.failing).sum())
        if left:
            return (
                "not-repaired",
                f"under the patch, {count_of(left, 'word')} still reach the spike of {self.spikes[0]}.",
            )
        rise = self.perplexity[PATCHED].change
        if not rise <= limit:
            return "refused", f"the perplexity of held-out text rises by {rise:.2%}, and the limit is {limit:.2%}."
        return "made", f"repeated words no longer reach the spike of {self.spikes[0]}."


@dataclass(frozen=True, kw_only=True)
class PatchMade(Result):
    """A patch and the proof for it, or why there is none.

    Attributes:
        verdict: "made"; "not-repaired": repeated words remain sinks; "refused": the patch would harm; "no-sink": there
            is nothing to patch; "no-repeats": repetition makes no sink, so nothing can be proved.
        reason: One sentence that explains the verdict.
        sites: The neurons of the patch.
        calibrated: Their neutral values.
        proof: The proof. None if nothing was patched.
    """

    page = "measure/patch"
    percent = CASES
    glossary: ClassVar = {
        "spike": "the spike of the first token, by its layers",
        "intact": "projection of the last copy on the spike's direction without a patch, over that of the first token",
        "patched": "the same under the patch",
        "random": "the same under a patch of random neurons",
        "one copy": "the same of one copy behind ordinary text",
        "other tokens": "the same of ordinary text there",
    }

    verdict: Verdict
    reason: str
    sites: tuple[Neuron, ...] = ()
    calibrated: tuple[float, ...] = ()
    proof: PatchProof | None = None

    @property
    def exit_code(self) -> int:
        """Return 1 if there is no patch, whatever the reason: a script that goes on with the file must stop."""
        return int(self.verdict != "made")

    @property
    def patch(self) -> SinkPatch:
        """Return the patch.

        Raises:
            SinkscopeError: No patch was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}")
        calibrated = dict(zip(self.sites, self.calibrated, strict=True))
        return SinkPatch(sites=self.sites, calibrated=calibrated, model=vars(self.model))

    @property
    def claims(self) -> Claims:
        """Make the claims about copies of the words that need repair, beside random neurons."""
        proof = self.proof
        if proof is None or not bool(proof.failing.any()):
            return ()
        along = torch.from_numpy(proof.along)
        copies = claim_of_copies(proof.repeats, Outcome("norm"), along[[INTACT, ONCE, OTHERS], 0])
        outcome = Outcome("norm", effect=f"the spike of {proof.spikes[0]} at {{}}")
        left = along[[PATCHED, INTACT, RANDOM], 0][:, proof.failing] / along[INTACT, 0, proof.failing]
        return claim_of_cases(self.sites, copies.place, outcome, left, edit="patched"), copies

    def conclusion(self) -> str:
        """Say what the patch does in its own spike, or why there is none."""
        if self.verdict != "made" or self.proof is None:
            return f"No patch was made: {self.reason}"
        return self._line(0, self.proof.failing)

    def details(self) -> list[str]:
        """Say what is so in the other spikes, in attention and output, and in ordinary text."""
        proof = self.proof
        if proof is None:
            return []
        every = torch.ones(len(proof.words), dtype=torch.bool)
        lines = [self._line(number, every) for number in range(1, len(proof.spikes))]
        if proof.following is not None:
            lines += proof.following.sentences(proof.spikes)
        _, patched, random = proof.perplexity
        texts = f"{self.settings['pieces']} held-out texts of {self.settings['length']} tokens"
        return [
            *lines,
            f"The perplexity of {texts} changes by {patched.change:+.3%} (± {patched.two_errors:.3%}; random neurons: "
            f"{random.change:+.3%}).",
            changed_logits(proof.largest_change, proof.largest_at, proof.flips),
        ]

    def _line(self, number: int, words: Bool[Tensor, " word"]) -> str:
        """Say what the last copies of some words reach in a spike with and without the patch."""
        assert self.proof is not None
        along = self.proof.along[:, number, words.numpy()]
        before, after, random = (along[case].max() for case in (INTACT, PATCHED, RANDOM))
        copies = f"copies of {along.shape[1]} of {count_of(self.proof.along.shape[2], 'word')}"
        return (
            f"Under the patch, {copies} reach at most {after:.0%} of the spike of {self.proof.spikes[number]} (without "
            f"it: {before:.0%}; random neurons: {random:.0%})."
        )

    def rows(self) -> Table:
        """Return a row per spike and word: what the last copy reaches in each case."""
        if self.proof is None:
            return []
        return long_table(
            dict(zip(CASES, self.proof.along, strict=True)), spike=self.proof.spikes, token=self.proof.words
        )


def draw(result: PatchMade) -> go.Figure:
    """Draw what the last copy of each word reaches in each spike, in each case."""
    fig = go.Figure()
    if result.proof is not None:
        rows: Table = []
        for row in result.rows():
            names = {"spike": html.escape(row["spike"]), "token": html.escape(repr(row["token"]))}
            rows += [{**names, "case": case, "share": row[case]} for case in CASES]
        axes: dict[str, Any] = {"x": "token", "y": "share", "color": "case", "facet_col": "spike", "barmode": "group"}
        fig = px.bar(rows, **axes, labels={"share": "of the first token's projection"})
        fig.update_yaxes(tickformat=".0%")
    return figure_of(fig, result, width=1000, height=480)


@measurement(
    group="Sinks",
    help="Make a patch and prove that it repairs repetition.",
    figure=draw,
    words="patch make",
    loading="whole",
)
def patch_make(
    setup: Setup,
    *,
    spike: Whole | None = None,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    limit: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
    pieces: Pieces = 32,
    length: Length = 64,
    out: Annotated[str | Path | None, Option(metavar="FILE", required=True, writes=True)] = None,
) -> PatchMade:
    """Make a patch of the neurons that a spike needs, and prove that it keeps repeated words from reaching the spike.

    With the neurons patched, repeated words must not reach half of the first token's projection on the spike's
    direction, and the perplexity of held-out text must not rise; the same is measured with random neurons. The other
    spikes of the first token are read, too. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by
    hand.)

    Args:
        spike: Number of the spike in `find_sinks`. By default that which most heads read, of those at the first token
            that need neurons.
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        out: Where the patch is written, if one is made.

    Example:
        sinkscope patch make --model llama-2-7b --out patch.json
    """
    if out is not None:
        check_output(out, ["sink-patch"])
    result = _made(setup, spike, max_repeats, limit, pieces, length)
    if out is not None and result.verdict == "made" and is_first():
        replace(result, model=setup.info()).patch.save(out)
    return result


def _made(
    setup: Setup, spike: int | None, max_repeats: int | None, limit: float, pieces: int, length: int
) -> PatchMade:
    """Make the patch and its proof."""
    most, sinks = repetition_limit(setup.target, max_repeats), sinks_of(setup)
    setup.record(max_repeats=most)
    chosen = spike_of(setup, spike)
    if chosen is None:
        reason = "no neurons are known that a norm spike at the first token needs, so there is nothing to patch."
        return PatchMade(verdict="no-sink", reason=reason)
    sites = chosen.needed_neurons
    calibrated = tuple(chosen.neutral[site] for site in sites)
    patch = SinkPatch(sites=sites, calibrated=dict(zip(sites, calibrated, strict=True)))
    others = [one.spike for one in sinks.at_first if one is not chosen]
    proof = proof_of(setup, [chosen.spike, *others], patch, most, pieces, length)
    verdict, reason = proof.judged(limit)
    return PatchMade(verdict=verdict, reason=reason, sites=sites, calibrated=calibrated, proof=proof)


@torch.no_grad()
def proof_of(
    setup: Setup, spikes: Sequence[Spike], patch: SinkPatch, limit: int, pieces: int, length: int
) -> PatchProof:
    """Measure what a patch does to repeated words and to ordinary text.

    Args:
        setup: The model and its text.
        spikes: The spikes of the first token, first that which is patched.
        patch: The patch.
        limit: Largest number of repetitions.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
    """
    target, ids = setup.target, pick_tokens(setup)
    before = prefix_of(setup, ids)
    tried = min(FIRST_LENGTH, limit)
    intact = along_spikes(target, spikes, repeated(before, ids, tried))
    halves = [half_reached(row[len(before) :]) for row in intact[0]]
    if None in halves and tried < limit:
        tried = limit
        intact = along_spikes(target, spikes, repeated(before, ids, tried))
        halves = [half_reached(row[len(before) :]) for row in intact[0]]
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = max(2, min(tried, 2 * max([half for half in halves if half is not None], default=tried)))
    rows = repeated(before, ids, count)
    last = rows.shape[1] - 1
    along = [torch.stack([of_spike[:, last] for of_spike in intact])]
    edits = (None, patch, random_patch(setup, patch))
    for edit in edits[1:]:
        setup.progress("patches", len(along), len(CASES))
        with under(edit, target):
            along.append(torch.stack([of_spike[:, last] for of_spike in along_spikes(target, spikes, rows)]))
    ordinary = text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    others = ordinary[torch.arange(len(rows)) % len(ordinary)]
    beside = along_spikes(target, spikes, append_copy(others, rows))  # a copy is last, and text before it
    along += [torch.stack([of_spike[:, at] for of_spike in beside]) for at in (last, last - 1)]
    cost = patch_eval.on(setup, patch=patch, pieces=pieces, length=length)
    proof = PatchProof(
        words=token_texts(target, ids),
        repeats=count,
        spikes=tuple(map(name_of, spikes)),
        along=torch.stack(along).numpy(),
        following=None,
        perplexity=tuple(cost.read),
        largest_change=cost.largest_change,
        flips=cost.flips,
        largest_at=cost.largest_at,
    )
    if not bool(proof.failing.any()):
        return proof
    return replace(proof, following=after_copies(setup, spikes, edits, rows[proof.failing], len(before)))
