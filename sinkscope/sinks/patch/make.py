"""A patch of the sink neurons, and the proof that it repairs repetition and leaves ordinary text alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
import plotly.express as px
import plotly.graph_objects as go
import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from sinkscope.errors import RefusedError, SinkscopeError
from sinkscope.hooks.edit.base import Intervention
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.hooks.trace.run import trace
from sinkscope.measure import Output, Result, ScanPart, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.norms import norm_of
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.results.notation import count_of, neuron_names, short_sentence, word_form
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.spikes import made_spikes
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.patch.evaluate import held_out, losses, random_patch, under
from sinkscope.sinks.tokens import TokenRows, prefixes, repetition_limit
from sinkscope.tap.observers import attention_rows

HEADROOM = 1.5  # times the 95 % quantile, which one position of ordinary text in twenty exceeds anyway
# Share of the first token's norm that is tolerated in later layers: a model that copies well is certain of a repeated
# token, so its last layers raise the norm a little, far below that of a sink.
SLACK = 0.03
TAKEN = 0.05  # attention to the first token that repetition must take in a layer, for the layer to be compared
SEQUENCES = 8  # sequences per pass
NAMED = 5  # neurons that the conclusion names
Verdict = Literal["made", "not-repaired", "refused", "no-sink", "no-repeats"]


@dataclass(frozen=True)
class PatchProof:
    """What the patch does to repeated words and to ordinary text.

    Conditions: "intact", "patched", and "random": as many random neurons of the same layers are patched.

    Attributes:
        words: The words that were repeated.
        repeats: How often each is repeated.
        layers: Layers from the one that completes the spike to the last.
        typical: Norms up to this value count as typical.
        before: Up to this value, 1.5 times the word's own norm before the layers that make the spike, norms count as
            those before the spike.
        norms: Largest norm after the first position.
        attention: Mean attention to the first token, over heads and the second half of the queries, in `layers[1:]`.
        ordinary_attention: The same on ordinary text of the same length, without a patch.
        perplexity: Perplexity of held-out text.
    """

    words: tuple[str, ...]
    repeats: int
    layers: Int[np.ndarray, " layer"]
    typical: Float[np.ndarray, " layer"]
    before: Float[np.ndarray, "word 1"]
    norms: Float[np.ndarray, "condition word layer"]
    attention: Float[np.ndarray, "condition later_layer"]
    ordinary_attention: Float[np.ndarray, " later_layer"]
    perplexity: Float[np.ndarray, " condition"]

    @property
    def ceiling(self) -> Float[np.ndarray, "word layer"]:
        """Norms up to this value count as repaired: typical ones, and those as before the spike."""
        return np.maximum(self.typical, self.before)

    @property
    def failing(self) -> Bool[np.ndarray, " word"]:
        """The words that need repair: those whose norm stands out in the intact model. Only these prove anything."""
        return (self.norms[0] > self.ceiling).any(1)

    @property
    def repaired(self) -> list[int]:
        """Number of failing words whose norm no longer stands out, by condition."""
        return ((self.norms <= self.ceiling).all(2) & self.failing).sum(1).tolist()

    @property
    def as_before(self) -> int:
        """Number of repaired words whose norm is above the typical one, as it was before the spike."""
        return int(((self.norms[1] > self.typical).any(1) & self.failing).sum())

    @property
    def taken(self) -> tuple[float, float]:
        """Attention that repetition takes from the first token in the intact model, and that the patch returns.

        Sums over the layers in which it takes some; 0 and 0 if it takes none.
        """
        taken = self.ordinary_attention - self.attention[0]
        restored = self.attention[1] - self.attention[0]
        compared = taken > TAKEN
        return float(taken[compared].sum()), float(restored[compared].sum())

    def judged(self, limit: float) -> tuple[Verdict, str]:
        """The verdict and its reason."""
        if not self.failing.any():
            return "no-repeats", f"no norm of {count_of(len(self.words), 'repeated word')} stands out where it is read."
        above = (self.norms[1] > self.ceiling).any(0)
        if above.any():
            return "not-repaired", f"under the patch, norms are not typical after layer {self.layers[above.argmax()]}."
        taken, restored = self.taken
        if restored < taken / 2:
            return "not-repaired", "under the patch, repeated words still take the attention of the first token."
        if not np.isfinite(self.perplexity[:2]).all():
            return "refused", "the perplexity of held-out text is not finite, so harm cannot be ruled out."
        rise = self.perplexity[1] / self.perplexity[0] - 1
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
    sites: tuple[tuple[int, ...], ...] = ()
    calibrated: tuple[float, ...] = ()
    proof: PatchProof | None = None

    @property
    def patch(self) -> SinkPatch:
        """The patch.

        Raises:
            SinkscopeError: No patch was made.
        """
        if self.verdict != "made":
            raise SinkscopeError(f"no patch was made for {self.model.name}: {self.reason}", page="no-sink")
        calibrated = dict(zip(self.sites, self.calibrated, strict=True))
        return SinkPatch(sites=self.sites, calibrated=calibrated, model=vars(self.model))

    def conclusion(self) -> str:
        """Whether there is a patch, and its effect on repeated words beside a random patch."""
        if self.verdict != "made" or self.proof is None:
            return f"No patch was made: {self.reason}"
        _, patched, random = self.proof.repaired
        norm = f"the norm of {patched} stays typical"
        if self.proof.as_before:
            norm = f"{patched} {word_form(patched, 'keeps', 'keep')} a typical norm or that before the spike"
        words = count_of(int(self.proof.failing.sum()), "word")
        sentences: list[str] = []
        for names in (neuron_names(self.sites, NAMED), count_of(len(self.sites), "neuron")):
            sentences.append(
                f"The patch of {names} repairs repetition: of {words} whose norm stands out when repeated, {norm} "
                f"(with random neurons {random})."
            )
        return short_sentence(sentences)

    def details(self) -> list[str]:
        """Norms and perplexity."""
        if self.proof is None:
            return []
        intact, patched, random = (self.proof.norms / self.proof.ceiling).max((1, 2))
        lines = [
            f"From layer {self.proof.layers[0]} on, the largest norm is {patched:.2g} times what counts as typical "
            f"({intact:.2g} intact, {random:.2g} with random neurons)."
        ]
        fine = len(self.proof.words) - int(self.proof.failing.sum())
        if 0 < fine < len(self.proof.words):
            lines.append(f"The norm of {count_of(fine, 'more word')} does not stand out intact, so it proves nothing.")
        taken, restored = self.proof.taken
        if taken:
            lines.append(
                f"Of the attention that repetition takes from the first token, {restored / taken:.0%} returns."
            )
        else:
            lines.append("Repetition takes no attention from the first token in these layers, so none had to return.")
        before, *after = self.proof.perplexity
        if not np.isfinite(self.proof.perplexity).all():
            return lines
        for name, value in zip(("patch", "random patch"), after, strict=True):
            lines.append(
                f"The {name} changes the perplexity of held-out text from {before:.4g} to {value:.4g} "
                f"({value / before - 1:+.3%})."
            )
        return lines

    def rows(self) -> Table:
        """One row per word: its largest norm in the layer that completes the spike."""
        if self.proof is None:
            return []
        intact, patched, random = self.proof.norms[:, :, 0]
        return long_table({"intact": intact, "patched": patched, "random": random}, token=self.proof.words)

    def numbers(self) -> list[Number]:
        """The norm of repeated words under the patch, beside the intact norm."""
        if self.proof is None:
            return []
        intact, patched, _ = self.proof.norms[:, :, 0]
        margin = margin_of(patched, np.median)
        return [
            Number("repeated token's norm under the patch", float(np.median(patched)), float(np.median(intact)), margin)
        ]


def draw(result: PatchMade) -> go.Figure:
    """Draw the largest norm of the repeated words in each layer, by condition, and what counts as repaired."""
    fig = go.Figure()
    if result.proof is not None:
        intact, patched, random = result.proof.norms.max(1)
        curves = {"intact": intact, "patched": patched, "random": random, "repaired up to": result.proof.ceiling.max(0)}
        fig = px.line(
            curves, render_mode="svg", labels={"index": "layer", "value": "largest norm"}, log_y=True, markers=True
        )
        fig.update_traces(x=result.proof.layers)
        fig.update_traces(line_width=7, selector={"name": "intact"})  # random neurons leave the same curve
        fig.update_xaxes(dtick=1 + len(result.proof.layers) // 16)
    return figure_of(fig, result, width=1000, height=480)


def write_patch(made: PatchMade, path: str) -> str | None:
    """Write patch.json. A refusal is an error, because a script that goes on must stop; "nothing to patch" is not."""
    if made.verdict in ("refused", "not-repaired"):
        raise RefusedError(f"no patch was written: {made.reason}", page="no-sink")
    if made.verdict != "made":
        return f"{Path(path).name} was not written: there is nothing to patch"
    made.patch.save(path)
    return None


@measurement(
    group="Sinks",
    order=4,
    help="Make a patch and prove that it repairs repetition.",
    scan=ScanPart(6, topic="Repetition", quick=None, streams=False),
    figure=draw,
    words="patch make",
    loading="whole",
    quick={"max_repeats": 300, "pieces": 2, "length": 16},
    outputs=[
        Output(
            "out",
            "Where the patch is written, if one is made.",
            write_patch,
            required=True,
            word="Patch",
            kind="json sink-patch",
        )
    ],
)
def patch_make(
    setup: Setup,
    *,
    max_repeats: Annotated[int, Field(ge=2)] | None = None,
    limit: Annotated[float, Field(ge=0, le=1e6)] = 0.01,
    pieces: Annotated[int, Field(ge=2)] = 32,
    length: Annotated[int, Field(ge=8)] = 256,
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

    Example:
        sinkscope patch make --model llama-2-7b --out patch.json
    """
    target = setup.target
    most = repetition_limit(target, max_repeats)
    sinks = find_sinks.on(setup)
    setup.record(max_repeats=most)
    if sinks.spike is None or not sinks.spike.by_mlp or not sinks.spike.place.is_first:
        where = "" if sinks.spike is None else f" (there is one at {sinks.spike.place})"
        return PatchMade(verdict="no-sink", reason=f"no MLP makes a norm spike at the first token{where}.")
    try:
        patch = SinkPatch.from_result(sinks)
    except SinkscopeError:
        reason = "no neuron is causal, alone or in a set."
        if sinks.repetition is not None and sinks.repetition.other_neurons:
            reason = "repeated words go another way than the first token, and no neurons were found that they need."
        return PatchMade(verdict="not-repaired", reason=reason)
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats <= most]
    slowest = max((word.repeats or 0 for word in words), default=0)
    if not words and sinks.repetition is not None:  # they become sinks after the sink layer
        words = list(sinks.repeats.tokens)
        slowest = sinks.repetition.repeats
    if not words:
        number = len(sinks.repeats.tokens)
        reason = f"none of {number} words reaches half of the first token's norm when it is repeated {most} times."
        return PatchMade(verdict="no-repeats", reason=reason)
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * slowest)
    starts = prefixes(setup, [word.id for word in words])
    rows = torch.tensor([[start, *[word.id] * count] for start, word in zip(starts, words, strict=True)])
    scan = made_spikes(setup, Survey.of(setup, whole=True))[0].context.scan
    ordinary = text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    edits = (None, patch, random_patch(setup, patch))
    layers = list(range(max(scan.stages), target.n_layers))
    after = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    before = largest_norms(target, [f"blocks.{min(scan.stages)}.hook_resid_pre"], scan.shared_dims, rows, None)
    text = held_out(setup, pieces, length)
    proof = PatchProof(
        words=tuple(word.token for word in words),
        repeats=count,
        layers=np.array(layers),
        typical=typical_ceiling(scan, layers),
        before=HEADROOM * before,
        norms=np.array([largest_norms(target, after, scan.shared_dims, rows, edit) for edit in edits]),
        attention=np.array([attention_to_first(target, layers[1:], rows, edit) for edit in edits]),
        ordinary_attention=attention_to_first(target, layers[1:], ordinary, None),
        perplexity=np.array(
            [losses(target, text, edit, SEQUENCES, setup.progress).double().mean().exp() for edit in edits]
        ),
    )
    verdict, reason = proof.judged(limit)
    sites = patch.checked_sites
    return PatchMade(
        verdict=verdict,
        reason=reason,
        sites=tuple(site.numbers for site in sites),
        calibrated=tuple(patch.calibrated[site] for site in sites),
        proof=proof,
    )


def typical_ceiling(scan: LayerScan, layers: list[int]) -> Float[np.ndarray, " layer"]:
    """Norms up to this value count as typical, in each layer; where the spike is made, there is no slack."""
    ceilings = HEADROOM * scan.norms[layers, :, 1:].flatten(1).quantile(0.95, 1).double().numpy()
    slack = SLACK * np.array(scan.spike_norm)[layers]
    return np.append(ceilings[0], np.maximum(ceilings, slack)[1:])


@torch.no_grad()
def largest_norms(
    target: Target, sites: list[str], without: list[int], rows: TokenRows, edit: Intervention | None
) -> Float[np.ndarray, "row site"]:
    """Largest norm of the residual stream after the first position; dimensions in `without` are left out."""
    with under(edit, target):
        norms = trace(target, rows, sites, lambda resid: norm_of(resid, without)[:, 1:].amax(1), batch_size=SEQUENCES)
    return torch.stack([norms[site] for site in sites], dim=1).numpy()


@torch.no_grad()
def attention_to_first(
    target: Target, layers: list[int], rows: TokenRows, edit: Intervention | None
) -> Float[np.ndarray, " layer"]:
    """Mean attention to position 0, over rows, heads and the queries of the second half, where tokens are sinks."""
    half = rows.shape[1] // 2
    total = torch.zeros(len(layers), dtype=torch.float64)

    def add(layer: int, first: int, probs: Tensor) -> None:
        late = probs[:, :, max(0, half - first) :, 0]
        total[layers.index(layer)] += late.double().sum().cpu() / probs.shape[1]

    if layers:
        for batch in rows.split(SEQUENCES):
            with under(edit, target), attention_rows(target, add, layers=layers):
                target.forward(batch, upto=layers[-1])
    return (total / (len(rows) * (rows.shape[1] - half))).numpy()
