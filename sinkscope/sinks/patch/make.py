"""A patch of the sink neurons, and the proof that it repairs repetition and leaves ordinary text alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import check_output
from sinkscope.files.processes import is_first
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure import Hidden, Option, Result, Setup, measurement
from sinkscope.models.text import text_rows
from sinkscope.results.claims import Claims, Outcome
from sinkscope.results.notation import count_of
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerScan, typical_quantiles
from sinkscope.sinks.find.records import RepeatedToken
from sinkscope.sinks.find.spikes import instead_of_spike, sink_spike
from sinkscope.sinks.held_out import Length, Pieces
from sinkscope.sinks.patch.evaluate import patch_eval
from sinkscope.sinks.patch.patches import random_patch
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.repetition.attention import attention_to_first
from sinkscope.sinks.repetition.sweep import claim_of_cases, claim_of_copies, norms_at, one_copy
from sinkscope.sinks.tokens import prefixes, repeated, repetition_limit

HEADROOM = 1.5  # times the 95 % quantile, which one position of ordinary text in twenty exceeds anyway
# Share of the first token's norm that is tolerated in later layers: a model that copies well is certain of a repeated
# token, so its last layers raise the norm a little, far below that of a sink.
SLACK = 0.03
TAKEN = 0.05  # attention to the first token that repetition must take in a layer, for the layer to be compared
SEQUENCES = 8  # sequences per pass
INTACT, PATCHED, RANDOM, ONCE, OTHERS = range(5)
CONDITIONS = ("intact", "patched", "random")
Verdict = Literal["made", "not-repaired", "refused", "no-sink", "no-repeats"]


@dataclass(frozen=True)
class PatchProof:
    """What the patch does to repeated words and to ordinary text.

    Conditions: "intact", "patched", and "random": as many random neurons of the same layers are patched.

    Attributes:
        words: The words that were repeated.
        repeats: How often each is repeated.
        layers: Layers from the one that completes the spike to the last.
        ceiling: Norms up to this value do not stand out: 1.5 times typical ones, or the word's own before the spike.
        norms: Largest norm after the first position.
        once: Norm at the last position of ordinary text of the same length, without a patch: with one copy of the word
            there ("one copy"), and with the text's own token ("other tokens").
        attention: Mean attention to the first token, over heads and the second half of the queries, in `layers[1:]`.
        ordinary_attention: The same on ordinary text of the same length, without a patch.
        perplexity: Perplexity of held-out text.
    """

    words: tuple[str, ...]
    repeats: int
    layers: Int[np.ndarray, " layer"]
    ceiling: Float[np.ndarray, "word layer"]
    norms: Float[np.ndarray, "condition word layer"]
    once: Float[np.ndarray, "contrast word layer"]
    attention: Float[np.ndarray, "condition later_layer"]
    ordinary_attention: Float[np.ndarray, " later_layer"]
    perplexity: Float[np.ndarray, " condition"]

    @property
    def stands_out(self) -> Bool[np.ndarray, "case word"]:
        """Whether a norm stands out after some layer: of copies under each condition, of one copy, of other tokens."""
        return np.asarray((np.concatenate([self.norms, self.once]) > self.ceiling).any(2))

    @property
    def failing(self) -> Bool[np.ndarray, " word"]:
        """The words that need repair: copies stand out in the intact model, and one does not. Only these prove it."""
        stands_out = self.stands_out
        return stands_out[INTACT] & ~stands_out[ONCE]

    @property
    def taken(self) -> tuple[float, float]:
        """Attention that repetition takes from the first token in the intact model, and that the patch returns.

        Sums over the layers in which it takes some; 0 and 0 if it takes none.
        """
        taken = self.ordinary_attention - self.attention[INTACT]
        restored = self.attention[PATCHED] - self.attention[INTACT]
        compared = taken > TAKEN
        return float(taken[compared].sum()), float(restored[compared].sum())

    @property
    def rise(self) -> Float[np.ndarray, " condition"]:
        """What the perplexity rises by, as a share of the intact one; NaN if it is not finite."""
        return self.perplexity / self.perplexity[INTACT] - 1

    def judged(self, limit: float) -> tuple[Verdict, str]:
        """The verdict and its reason."""
        if not self.failing.any():
            return "no-repeats", f"no norm of {count_of(len(self.words), 'word')} stands out only when it is repeated."
        above = (self.norms[PATCHED] > self.ceiling)[self.failing].any(0)
        if above.any():
            return "not-repaired", f"under the patch, norms are not typical after layer {self.layers[above.argmax()]}."
        taken, restored = self.taken
        if restored < taken / 2:
            return "not-repaired", "under the patch, repeated words still take the attention of the first token."
        rise = self.rise[PATCHED]
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
        "intact": "largest norm without a patch, after the layer that completes the spike",
        "patched": "the same under the patch",
        "random": "the same under a patch of random neurons",
    }

    verdict: Verdict
    reason: str
    sites: Neurons = ()
    calibrated: tuple[float, ...] = ()
    proof: PatchProof | None = None

    @property
    def exit_code(self) -> int:
        """1 if there is something to patch and no patch: a script that goes on must stop."""
        return int(self.verdict in ("refused", "not-repaired"))

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
        outcome = Outcome(
            "a norm that stands out",
            tuple(proof.layers.tolist()),
            unit="cases",
            gives="make the norms of {} of the words stand out",
        )
        stands_out, failing = torch.from_numpy(proof.stands_out).double(), torch.from_numpy(proof.failing)
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
        """The attention, and the perplexity."""
        if self.proof is None:
            return []
        taken, restored = self.proof.taken
        _, patched, random = self.proof.rise
        return [
            f"Repetition takes {taken:.2f} of attention from the first token (sum of layers); {restored:.2f} returns.",
            f"The patch changes the perplexity of held-out text by {patched:+.3%}, a random one by {random:+.3%}.",
        ]

    def rows(self) -> Table:
        """One row per word: its largest norm in the layer that completes the spike."""
        if self.proof is None:
            return []
        return long_table(dict(zip(CONDITIONS, self.proof.norms[:, :, 0], strict=True)), token=self.proof.words)


def draw(result: PatchMade) -> go.Figure:
    """Draw the largest norm of the repeated words in each layer, by condition, and what counts as repaired."""
    fig = go.Figure()
    if result.proof is not None:
        lines = [*result.proof.norms.max(1), result.proof.ceiling.max(0)]
        curves = dict(zip((*CONDITIONS, "repaired up to"), lines, strict=True))
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
    out: Annotated[str | Path | None, Option(metavar="FILE", required=True, writes="Patch")] = None,
    written: Hidden = None,
) -> PatchMade:
    """Make a patch of the sink neurons, and prove that it keeps repeated words from becoming sinks.

    The neurons are the smallest causal set of `find_sinks`, and others that repetition trips. With them patched, the
    norm of repeated words must stay typical, or as before the spike, in every later layer, half of the attention that
    repetition takes from the first token must return, and the perplexity of held-out text must not rise; the same is
    measured with random neurons. (Yona et al. 2025, section 5.3, patch the neurons of their Table 1 by hand.)

    Args:
        max_repeats: Largest number of repetitions. By default 1,024, or what the context holds.
        limit: Largest accepted relative increase of the perplexity on held-out text; 0.01 is 1 %.
        pieces: Number of pieces of held-out text.
        length: Tokens per piece.
        out: Where the patch is written, if one is made.
        written: Called as `written("Patch", path)` when it is there.

    Example:
        sinkscope patch make --model llama-2-7b --out patch.json
    """
    if out is not None:
        check_output(out, ["sink-patch"])
    result = _made(setup, max_repeats, limit, pieces, length)
    if out is not None and result.verdict == "made" and is_first():
        replace(result, model=setup.info()).patch.save(out)
        if written is not None:
            written("Patch", out)
    return result


def _made(setup: Setup, max_repeats: int | None, limit: float, pieces: int, length: int) -> PatchMade:
    """The patch and its proof."""
    most = repetition_limit(setup.target, max_repeats)
    sinks, made = find_sinks.on(setup), sink_spike(setup)
    setup.record(max_repeats=most)
    if made is None:
        return PatchMade(verdict="no-sink", reason=f"no MLP makes a norm spike; {instead_of_spike(setup)}.")
    if not made.spike.place.is_first:
        reason = f"the norm spike is at {made.spike.place}, and this patch keeps the first token's value alone."
        return PatchMade(verdict="no-sink", reason=reason)
    try:
        patch = SinkPatch.from_result(sinks)
    except SinkscopeError:
        reason = "no neurons were found that the spike needs at the first token and at repeated words."
        return PatchMade(verdict="not-repaired", reason=reason)
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats <= most]
    slowest = max((word.repeats or 0 for word in words), default=0)
    if not words and sinks.repetition is not None:  # they become sinks after the sink layer
        words, slowest = list(sinks.repeats.tokens), sinks.repetition.repeats
    if not words:
        number = len(sinks.repeats.tokens)
        reason = f"none of {number} words reaches half of the first token's norm when it is repeated {most} times."
        return PatchMade(verdict="no-repeats", reason=reason)
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * slowest)
    perplexity = patch_eval.on(setup, patch=patch, pieces=pieces, length=length).perplexity
    proof = proof_of(setup, made.scan, patch, words, count, perplexity)
    verdict, reason = proof.judged(limit)
    sites = patch.checked_sites
    return PatchMade(
        verdict=verdict,
        reason=reason,
        sites=sites,
        calibrated=tuple(patch.calibrated[site] for site in sites),
        proof=proof,
    )


@torch.no_grad()
def proof_of(
    setup: Setup,
    scan: LayerScan,
    patch: SinkPatch,
    words: list[RepeatedToken],
    count: int,
    perplexity: Float[np.ndarray, " condition"],
) -> PatchProof:
    """What a patch does to repeated words and to ordinary text.

    Args:
        setup: The model and its text.
        scan: The layers at the first token.
        patch: The patch.
        words: The words to repeat.
        count: Number of repetitions.
        perplexity: What `patch_eval` measures.
    """
    target = setup.target
    ids = [word.id for word in words]
    rows = repeated(prefixes(setup, ids), ids, count)
    ordinary = text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    others = ordinary[torch.arange(len(rows)) % len(ordinary)]
    layers = list(range(max(scan.stages), target.n_layers))
    after = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    before = norms_at(scan, [f"blocks.{min(scan.stages)}.hook_resid_pre"], rows)[:, 1:].amax(1)
    typical = HEADROOM * typical_quantiles(scan.norms[layers])[2].double().numpy()
    typical[1:] = np.maximum(typical, SLACK * np.array(scan.spike_norm)[layers])[1:]  # no slack where the spike is made
    norms, attention = [], []
    for edit in (None, patch, random_patch(setup, patch)):
        with under(edit, target):
            norms.append(norms_at(scan, after, rows)[:, 1:].amax(1))
            attention.append(attention_to_first(target, rows, SEQUENCES)[layers[1:]])
        setup.progress("patches", len(norms), 3)
    once = [norms_at(scan, after, ids)[:, -1] for ids in (one_copy(others, rows), others)]
    return PatchProof(
        words=tuple(word.token for word in words),
        repeats=count,
        layers=np.array(layers),
        ceiling=np.maximum(typical, HEADROOM * before.numpy()),
        norms=torch.stack(norms).numpy(),
        once=torch.stack(once).numpy(),
        attention=torch.stack(attention).numpy(),
        ordinary_attention=attention_to_first(target, ordinary, SEQUENCES)[layers[1:]].numpy(),
        perplexity=perplexity,
    )
