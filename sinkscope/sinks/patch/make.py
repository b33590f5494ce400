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
from sinkscope.results.claims import Claim, Contrast, Outcome, Search
from sinkscope.results.notation import count_of, neuron_names, short_sentence, word_form
from sinkscope.results.parts import Tokens, neurons_of
from sinkscope.results.result import Number
from sinkscope.results.style import figure_of, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerScan
from sinkscope.sinks.find.records import RepeatedToken
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.find.spikes import sink_neurons
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
    def stands_out(self) -> Bool[np.ndarray, "condition word"]:
        """Whether a repeated word's norm stands out after some layer."""
        return np.asarray((self.norms > self.ceiling).any(2))

    @property
    def stands_out_once(self) -> Bool[np.ndarray, "contrast word"]:
        """The same of one copy, and of the other token there."""
        return np.asarray((self.once > self.ceiling).any(2))

    @property
    def failing(self) -> Bool[np.ndarray, " word"]:
        """The words that need repair: copies stand out in the intact model, and one does not. Only these prove it."""
        return self.stands_out[0] & ~self.stands_out_once[0]

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
            return "no-repeats", f"no norm of {count_of(len(self.words), 'word')} stands out only when it is repeated."
        above = (self.norms[1] > self.ceiling)[self.failing].any(0)
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

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What copies do beside one copy and other tokens, and what is left of it under the patch."""
        if self.proof is None:
            return ()
        outcome = Outcome("a norm that stands out", tuple(self.proof.layers.tolist()), unit="cases")
        place, words = f"{self.proof.repeats} copies of a word", len(self.proof.words)
        once, other = self.proof.stands_out_once.mean(1).tolist()
        contrasts = (Contrast("one copy", once), Contrast("other tokens", other))
        copies = (Tokens("copies", self.proof.repeats),)
        intact, patched, random = self.proof.stands_out[:, self.proof.failing].sum(1).tolist()
        search = Search("words", words)
        value = float(self.proof.stands_out[0].mean())
        claims = [Claim("repeats", copies, outcome, place, value, contrasts, words, search)]
        if intact:
            contrasts = (Contrast("intact", 1.0), Contrast("random", random / intact))
            neurons = neurons_of(self.sites)
            claims.append(Claim("makes", neurons, outcome, place, patched / intact, contrasts, intact, search))
        return tuple(claims)

    def conclusion(self) -> str:
        """Whether there is a patch, and its effect on repeated words beside a random patch."""
        if self.verdict != "made" or self.proof is None:
            return f"No patch was made: {self.reason}"
        claim = self.claims[1]
        words = count_of(claim.draws, "word")
        still, random = round(claim.value * claim.draws), round(claim.control.value * claim.draws)
        sentences: list[str] = []
        for names in (neuron_names(self.sites, NAMED), count_of(len(self.sites), "neuron")):
            sentences.append(
                f"The patch of {names} repairs repetition: of {words} whose norm stands out in copies alone, {still} "
                f"still {word_form(still, 'does', 'do')} (random neurons: {random})."
            )
        return short_sentence(sentences)

    def details(self) -> list[str]:
        """Copies beside one copy, the attention, and the perplexity."""
        proof = self.proof
        if proof is None:
            return []
        copies, once = int(proof.stands_out[0].sum()), int(proof.stands_out_once[0].sum())
        lines = [
            f"Of {count_of(len(proof.words), 'word')}, the norm of {copies} stands out in {proof.repeats} copies, and "
            f"of {once} in one copy there behind other tokens."
        ]
        taken, restored = proof.taken
        if taken:
            share = f"{restored / taken:.0%}"
            lines.append(f"Of the attention that repetition takes from the first token, {share} returns.")
        if np.isfinite(proof.perplexity).all():
            _, patch, random = proof.perplexity / proof.perplexity[0] - 1
            lines.append(
                f"The patch changes the perplexity of held-out text by {patch:+.3%}, a random one by {random:+.3%}."
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
    sinks, made = find_sinks.on(setup), sink_neurons(setup)
    setup.record(max_repeats=most)
    if made.made is None:
        return PatchMade(verdict="no-sink", reason=f"no MLP makes a norm spike; {made.instead}.")
    if not made.made.spike.place.is_first:
        reason = f"the norm spike is at {made.made.spike.place}, and this patch keeps the first token's value alone."
        return PatchMade(verdict="no-sink", reason=reason)
    try:
        patch = SinkPatch.from_result(sinks)
    except SinkscopeError:
        reason = "no neuron is causal, alone or in a set."
        if sinks.repetition is not None and sinks.repetition.other_neurons:
            reason = "repeated words go another way than the first token, and no neurons were found that they need."
        return PatchMade(verdict="not-repaired", reason=reason)
    words, slowest = repeated_words(sinks, most)
    if not words:
        number = len(sinks.repeats.tokens)
        reason = f"none of {number} words reaches half of the first token's norm when it is repeated {most} times."
        return PatchMade(verdict="no-repeats", reason=reason)
    # Twice as many repetitions as the slowest word needs: well inside the sink, and no longer than that.
    count = min(most, 2 * slowest)
    starts = prefixes(setup, [word.id for word in words])
    rows = torch.tensor([[start, *[word.id] * count] for start, word in zip(starts, words, strict=True)])
    scan = made.made.context.scan
    ordinary = text_rows(setup.tokenizer, setup.text, len(rows), rows.shape[1], setup.bos)
    others = ordinary[torch.arange(len(rows)) % len(ordinary)]
    one_copy = torch.cat([others[:, :-1], rows[:, -1:]], 1)
    edits = (None, patch, random_patch(setup, patch))
    layers = list(range(max(scan.stages), target.n_layers))
    after = [f"blocks.{layer}.hook_resid_post" for layer in layers]
    before = largest_norms(target, [f"blocks.{min(scan.stages)}.hook_resid_pre"], scan.shared_dims, rows)
    text = held_out(setup, pieces, length)
    proof = PatchProof(
        words=tuple(word.token for word in words),
        repeats=count,
        layers=np.array(layers),
        ceiling=np.maximum(typical_ceiling(scan, layers), HEADROOM * before),
        norms=np.array([largest_norms(target, after, scan.shared_dims, rows, edit) for edit in edits]),
        once=np.array([largest_norms(target, after, scan.shared_dims, ids, since=-1) for ids in (one_copy, others)]),
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


def repeated_words(sinks: FindSinks, most: int) -> tuple[list[RepeatedToken], int]:
    """The words that become sinks within so many repetitions, and the number that the slowest one needs."""
    words = [word for word in sinks.repeats.tokens if word.repeats is not None and word.repeats <= most]
    if not words and sinks.repetition is not None:  # they become sinks after the sink layer
        return list(sinks.repeats.tokens), sinks.repetition.repeats
    return words, max((word.repeats or 0 for word in words), default=0)


def typical_ceiling(scan: LayerScan, layers: list[int]) -> Float[np.ndarray, " layer"]:
    """Norms up to this value count as typical, in each layer; where the spike is made, there is no slack."""
    ceilings = HEADROOM * scan.norms[layers, :, 1:].flatten(1).quantile(0.95, 1).double().numpy()
    slack = SLACK * np.array(scan.spike_norm)[layers]
    return np.append(ceilings[0], np.maximum(ceilings, slack)[1:])


@torch.no_grad()
def largest_norms(
    target: Target,
    sites: list[str],
    without: list[int],
    rows: TokenRows,
    edit: Intervention | None = None,
    since: int = 1,
) -> Float[np.ndarray, "row site"]:
    """Largest norm of the residual stream from a position on; dimensions in `without` are left out."""

    def read(resid: Tensor) -> Tensor:
        return norm_of(resid, without)[:, since:].amax(1)

    with under(edit, target):
        norms = trace(target, rows, sites, read, batch_size=SEQUENCES)
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
