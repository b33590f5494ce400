"""A patch of the sink neurons, and the proof that it repairs repetition and leaves ordinary text alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.processes import is_first
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Option, Result, Setup, measurement
from sinkscope.models.text import text_rows
from sinkscope.results.claims import Claims, Outcome
from sinkscope.results.notation import count_of
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.places import SPIKE_RATIO
from sinkscope.sinks.find.records import RepeatedToken
from sinkscope.sinks.find.spikes import sink_spike
from sinkscope.sinks.held_out import Length, Pieces
from sinkscope.sinks.patch.evaluate import Perplexity, patch_eval
from sinkscope.sinks.patch.patches import random_patch
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.repetition.sweep import claim_of_cases, claim_of_copies, norms_at, one_copy
from sinkscope.sinks.tokens import prefix_of, repeated, repetition_limit

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
        layers: Layers from the one that completes the spike to the last.
        ceiling: Three times the typical norm after each layer; what is larger stands out.
        norms: Norm after each layer.
        perplexity: Of held-out text in the first three cases.
    """

    words: tuple[str, ...]
    repeats: int
    layers: Int[np.ndarray, " layer"]
    ceiling: Float[np.ndarray, " layer"]
    norms: Float[np.ndarray, "case word layer"]
    perplexity: tuple[Perplexity, ...]

    @property
    def stands_out(self) -> Bool[Tensor, "case word"]:
        """Whether a norm stands out after some layer."""
        return torch.from_numpy((self.norms > self.ceiling).any(2))

    @property
    def failing(self) -> Bool[Tensor, " word"]:
        """The words that need repair: copies stand out in the intact model, and one does not. Only these prove it."""
        return self.stands_out[INTACT] & ~self.stands_out[ONCE]

    def judged(self, limit: float) -> tuple[Verdict, str]:
        """The verdict and its reason."""
        if not self.failing.any():
            return "no-repeats", f"no norm of {count_of(len(self.words), 'word')} stands out only when it is repeated."
        left = int((self.stands_out[PATCHED] & self.failing).sum())
        if left:
            return "not-repaired", f"under the patch, the norms of {count_of(left, 'word')} still stand out."
        rise = self.perplexity[PATCHED].change
        if not rise <= limit:
            return "refused", f"the perplexity of held-out text rises by {rise:.2%}, and the limit is {limit:.2%}."
        return "made", "repeated words keep a typical norm, and ordinary text is read as before."


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
    glossary: ClassVar = {
        "intact": "norm at the last copy without a patch, after the layer that completes the spike",
        "patched": "the same under the patch",
        "random": "the same under a patch of random neurons",
        "one copy": "norm at one copy behind ordinary text",
        "other tokens": "norm of ordinary text there",
    }

    verdict: Verdict
    reason: str
    sites: Neurons = ()
    calibrated: tuple[float, ...] = ()
    proof: PatchProof | None = None

    @property
    def exit_code(self) -> int:
        """1 if there is no patch, whatever the reason: a script that goes on with the file must stop."""
        return int(self.verdict != "made")

    @property
    def patch(self) -> SinkPatch:
        """The patch.

        Raises:
            SinkscopeError: No patch was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}")
        calibrated = dict(zip(self.sites, self.calibrated, strict=True))
        return SinkPatch(sites=self.sites, calibrated=calibrated, model=vars(self.model))

    @property
    def claims(self) -> Claims:
        """What is left under the patch of the norms that copies alone make; and what copies do."""
        proof = self.proof
        if proof is None:
            return ()
        gives = "make the norms of {} of the words stand out"
        outcome = Outcome("a norm that stands out", tuple(proof.layers.tolist()), unit="cases", gives=gives)
        stands_out, failing = proof.stands_out.cpu().double(), proof.failing
        copies = claim_of_copies(proof.repeats, outcome, stands_out[[INTACT, ONCE, OTHERS]])
        if not failing.any():
            return (copies,)
        left = stands_out[[PATCHED, INTACT, RANDOM]][:, failing]
        high = replace(outcome, effect=f"the high norms of {count_of(int(failing.sum()), 'word')} at {{}}")
        return claim_of_cases(self.sites, copies.place, high, left, edit="patched"), copies

    @property
    def instead(self) -> str | None:
        """Why there is no patch."""
        return None if self.verdict == "made" else f"No patch was made: {self.reason}"

    def facts(self) -> list[str]:
        """The perplexity."""
        if self.proof is None:
            return []
        _, patched, random = (one.change for one in self.proof.perplexity)
        return [f"The patch changes the perplexity of held-out text by {patched:+.3%}, a random one by {random:+.3%}."]

    def rows(self) -> Table:
        """One row per word: its norms after the layer that completes the spike."""
        if self.proof is None:
            return []
        return long_table(dict(zip(CASES, self.proof.norms[:, :, 0], strict=True)), token=self.proof.words)


def draw(result: PatchMade) -> go.Figure:
    """Draw the largest norm of the repeated words after each layer in each case, and from where on it stands out."""
    fig = go.Figure()
    if result.proof is not None:
        lines = [*result.proof.norms.max(1), result.proof.ceiling]
        curves = dict(zip((*CASES, "stands out"), lines, strict=True))
        fig = px.line(
            curves, render_mode="svg", labels={"index": "layer", "value": "largest norm"}, log_y=True, markers=True
        )
        fig.update_traces(x=result.proof.layers)
        fig.update_traces(line_width=7, selector={"name": "intact"})  # random neurons leave the same curve
        fig.update_xaxes(dtick=1 + len(result.proof.layers) // 16)
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
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    limit: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
    pieces: Pieces = 32,
    length: Length = 256,
    out: Annotated[str | Path | None, Option(metavar="FILE", required=True, writes=True)] = None,
) -> PatchMade:
    """Make a patch of the sink neurons, and prove that it keeps repeated words from becoming sinks.

    The neurons are the smallest causal set of `find_sinks`. With them patched, the norm of repeated words must not
    stand out after any later layer, and the perplexity of held-out text must not rise; the same is measured with random
    neurons. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by hand.)

    Args:
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
    result = _made(setup, max_repeats, limit, pieces, length)
    if out is not None and result.verdict == "made" and is_first():
        replace(result, model=setup.info()).patch.save(out)
    return result


def _made(setup: Setup, max_repeats: int | None, limit: float, pieces: int, length: int) -> PatchMade:
    """The patch and its proof."""
    most = repetition_limit(setup.target, max_repeats)
    sinks, made = find_sinks.on(setup), sink_spike(setup)
    setup.record(max_repeats=most)
    try:
        patch = SinkPatch.from_result(sinks)
    except SinkscopeError as error:
        return PatchMade(verdict="no-sink", reason=f"{error}.")
    assert made is not None  # the patch is of its neurons
    words = sinks.repeats.tokens
    needed = [word.repeats for word in words if word.repeats is not None]
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * max(needed, default=most))
    read = patch_eval.on(setup, patch=patch, pieces=pieces, length=length).read
    proof = proof_of(setup, made.scan, patch, words, count, read)
    verdict, reason = proof.judged(limit)
    sites = patch.checked_sites
    calibrated = tuple(patch.calibrated[site] for site in sites)
    return PatchMade(verdict=verdict, reason=reason, sites=sites, calibrated=calibrated, proof=proof)


@torch.no_grad()
def proof_of(
    setup: Setup,
    scan: LayerScan,
    patch: SinkPatch,
    words: Sequence[RepeatedToken],
    count: int,
    read: Sequence[Perplexity],
) -> PatchProof:
    """What a patch does to repeated words and to ordinary text.

    Args:
        setup: The model and its text.
        scan: The layers at the first token.
        patch: The patch.
        words: The words to repeat.
        count: Number of repetitions.
        read: What `patch_eval` measures.
    """
    ids = [word.id for word in words]
    rows = repeated(prefix_of(setup, ids), ids, count)
    ordinary = text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    others = ordinary[torch.arange(len(rows)) % len(ordinary)]
    layers = list(range(max(scan.stages), len(scan.layers)))
    norms: list[Tensor] = []
    random, once = random_patch(setup, patch), one_copy(others, rows)
    for edit, texts in ((None, rows), (patch, rows), (random, rows), (None, once), (None, others)):
        with under(edit, setup.target):
            norms.append(norms_at(scan, layers, texts)[:, -1])
        setup.progress("patches", len(norms), len(CASES))
    return PatchProof(
        words=tuple(word.token for word in words),
        repeats=count,
        layers=np.array(layers),
        ceiling=SPIKE_RATIO * np.array(scan.typical_norm)[layers],
        norms=torch.stack(norms).numpy(),
        perplexity=tuple(read),
    )
