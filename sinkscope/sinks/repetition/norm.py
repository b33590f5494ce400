"""Norm of repeated tokens at the sink layer, also with sink neurons zeroed (Yona et al. 2025, Fig. 2, 3, 7, 9).

Of every token of the vocabulary, it says after how many repetitions the token becomes a sink (Fig. 6).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.express as px
import torch
from jaxtyping import Float, Int

from sinkscope.hooks.edit import Ablate
from sinkscope.measure import Setup
from sinkscope.models.draws import seed_of
from sinkscope.results.claims import Claim, Claims, Outcome
from sinkscope.results.notation import count_of, head_name
from sinkscope.results.style import GREY, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.attack.clusters import find_clusters
from sinkscope.sinks.chunks import Columns, Resume, hold_layers, in_chunks, token_texts
from sinkscope.sinks.find.layer_scan import LayerScan, typical_quantiles
from sinkscope.sinks.find.repetitions import repeat_until_half, repeats_until_half
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.removal.components import Neurons
from sinkscope.sinks.removal.search import random_neurons
from sinkscope.sinks.repetition.sweep import (
    Reading,
    Sweep,
    beside_copies,
    claim_of_cases,
    claim_of_copies,
    norms_at_sink,
    rounded,
)
from sinkscope.sinks.tokens import PerToken, TokenRows, prefixes, repeated, sample_tokens, vocabulary

TOKENS = 64  # tokens of a vocabulary in one chunk
COMPARED = 16  # of these whose copies are compared with one copy and with other tokens


@dataclass(frozen=True, kw_only=True)
class NormReading(Reading):
    """L2 norm of the residual stream after the sink layer.

    Attributes:
        sweep: What was repeated.
        place: Where the spike is whose norm is the reference.
        conditions: "intact"; "set": the sink neurons are zeroed; "control": as many random neurons of the same layers.
        zeroed: The neurons that are zeroed under each condition.
        norms: Norm of the repeated token after n repetitions.
        repeats: First number of repetitions whose intact norm reaches half of the reference. NaN if never.
        reference: Norm of the spike in typical text, median over texts.
        typical: The 5 % quantile, the median and the 95 % quantile of norms at later positions of typical text.
    """

    sweep: Sweep
    place: str
    conditions: tuple[str, ...]
    zeroed: tuple[Neurons, ...]
    norms: Float[np.ndarray, "condition token n"]
    repeats: PerToken
    reference: float
    typical: Float[np.ndarray, " quantile"]

    @property
    def lost(self) -> Float[np.ndarray, "condition token"]:
        """Share of the intact norm at the last repetition that a condition takes away."""
        return 1 - self.norms[:, :, -1] / self.norms[0, :, -1]

    def facts(self) -> list[str]:
        """The norms, and when copies reach half of that of the spike."""
        low, middle, high = self.typical
        typical = f"that of typical text {middle:.4g} (5-95 %: {low:.4g} to {high:.4g})"
        lines = [f"The norm at {self.place} is {self.reference:.4g}, and {typical}."]
        reached, at_once = self.repeats[self.repeats > 1], int((self.repeats == 1).sum())
        if len(reached):
            some = f"{len(reached)} of {len(self.repeats)} tokens"
            lines.append(f"In the median, a token needs {np.median(reached):.0f} copies for half of it ({some}).")
        if at_once and self.claims:
            lines.append(f"Left out, with half of it at once: {at_once} of {len(self.repeats)} tokens.")
        return lines

    def rows(self) -> Table:
        """One row per sequence; `lost_*` is the share of the norm at the last repetition that zeroing removes."""
        last = self.norms[0, :, -1]
        columns = {"repeats": self.repeats, "last_norm": last, "of_spike": last / self.reference}
        for name, lost in zip(self.conditions[1:], self.lost[1:], strict=True):
            columns[f"lost_{name}"] = lost
        return long_table(columns, repeated=self.sweep.tokens)

    def draw(self) -> Any:
        """Norm over the number of repetitions, a panel per condition; half of the spike's norm, and typical text."""
        titles = {"set": "sink neurons zeroed", "control": "random neurons zeroed"}
        fig = self.sweep.curves(self.norms, [titles.get(name, name) for name in self.conditions], "norm")
        for level, words in ((self.reference, "spike"), (self.reference / 2, "half of it")):
            place = {"y": np.log10(level), "xanchor": "left", "x": 0}  # the axis is logarithmic
            fig.add_hline(level, line={"color": GREY, "dash": "dot"}, annotation={"text": words, **place})
        fig.add_hrect(self.typical[0], self.typical[2], fillcolor="grey", opacity=0.2)
        return fig


@dataclass(frozen=True, kw_only=True)
class AtlasReading(Reading):
    """Repetition of every token of the vocabulary. NaN stands for never, and for no head.

    The claim is of 16 of the tokens that repetition brings to half of the spike's norm or, if there are none, of all.

    Attributes:
        tokens: The tokens.
        ids: Their ids.
        repeats: First number of repetitions whose norm at the sink layer reaches half of the spike's.
        head: Head of layer 0 that serves the token, as in `attack`; none if the spike is not at the first token, or
            layer 0 has no heads.
        max_repeats: Largest number of repetitions tried.
        place: Where the spike is.
    """

    tokens: tuple[str, ...]
    ids: Int[np.ndarray, " token"]
    repeats: PerToken
    head: PerToken
    max_repeats: int
    place: str = "the first token"

    @property
    def resists(self) -> np.ndarray:
        """Which tokens never become a sink, `[token]`."""
        return np.isnan(self.repeats)

    def facts(self) -> list[str]:
        """How many tokens need copies and how many, and whether those that resist are those that no head serves."""
        resists, served, needed = self.resists, np.isfinite(self.head), self.repeats[self.repeats > 1]
        line = (
            f"Of {len(self.ids)} tokens, {len(needed)} reach half of the norm at {self.place} within "
            f"{self.max_repeats} copies, and {(self.repeats == 1).sum()} with one copy"
        )
        lines = [f"{line}; in the median they need {np.median(needed):.0f}." if len(needed) else f"{line}."]
        if resists.any() and not resists.all() and served.any():
            lines.append(
                f"A single head of layer 0 is enough to mark {served[resists].mean():.1%} of the {resists.sum()} "
                f"tokens that never reach it, and {served[~resists].mean():.1%} of the others."
            )
        return lines

    def rows(self) -> Table:
        """One row per token, those first that never become a sink."""
        rows = long_table({"id": self.ids, "repeats": self.repeats, "head": self.head}, token=self.tokens)
        return sorted(rows, key=lambda row: row["repeats"] is not None)

    def draw(self) -> Any:
        """Number of tokens by the repetitions they need, coloured by the head that serves them."""
        names = []
        for head in self.head:
            names.append("no single head" if np.isnan(head) else head_name(0, int(head)))
        never = np.where(self.resists, 2.0 * self.max_repeats, self.repeats)
        words = f"log2 of the repetitions until a sink (last bar: never within {self.max_repeats})"
        fig = px.histogram(x=np.log2(never), color=names, nbins=48, labels={"color": "head", "x": words})
        return fig.update_yaxes(title_text="tokens")


def reached(repeats: PerToken) -> list[int]:
    """Tokens that copies bring to half of the spike's norm; if there are none, those that one copy does not."""
    return np.flatnonzero(repeats > 1).tolist() or np.flatnonzero(repeats != 1).tolist()


def norms_of_copies(setup: Setup, scan: LayerScan, rows: TokenRows, before: int, repeats: PerToken) -> Claim:
    """The share of the spike's norm that copies reach, beside one copy at that position and other tokens there.

    Args:
        setup: The model and its text.
        scan: The model at the place of its spike.
        rows: The sequences, which end with the copies.
        before: Number of tokens before the copies.
        repeats: The repetitions that each token needs of all of which these were taken.
    """
    texts = beside_copies(setup, rows, before)
    shares = torch.stack([norms_at_sink(scan, ids)[:, -1] for ids in texts]) / scan.spike_norm[scan.layer]
    gives, halves = "reach {} of the spike's norm", int((repeats > 1).sum())
    if halves:
        gives = f"reach half of the spike's norm at {halves:,} of {count_of(len(repeats), 'token')}, there {{}} of it"
    outcome = Outcome("norm", (scan.layer,), gives=gives)
    return claim_of_copies(rows.shape[1] - before, outcome, shares, int((repeats != 1).sum()))


def read_norms(setup: Setup, made: MadeSpike, sweep: Sweep, ids: TokenRows, ablate: bool) -> NormReading:
    """The norms of repeated tokens at the layer of a spike."""
    scan, before = made.scan, len(sweep.before)
    neurons = tuple(neuron.address for neuron in made.neurons)
    reference = scan.spike_norm[scan.layer]
    zeroed: dict[str, Neurons] = {"intact": ()}
    if ablate and neurons:
        control = random_neurons(setup.target, neurons, neurons, setup.seed)
        zeroed |= {"set": neurons, "control": control}
    norms = []
    for members in zeroed.values():
        with Ablate(sites=members).on(setup.target) if members else nullcontext():
            norms.append(norms_at_sink(scan, ids))
        setup.progress("repetitions", len(norms), len(zeroed))
    table = torch.stack(norms)  # condition token pos
    repeats = np.array([repeats_until_half(intact[before:], reference) for intact in table[0]], dtype=float)
    claims: list[Claim] = []
    rows = reached(repeats)
    if rows:
        copies = norms_of_copies(setup, scan, ids[rows], before, repeats)
        claims.append(copies)
        if len(zeroed) > 1 and (repeats > 1).any():
            left = (table[:, rows, -1] / table[0, rows, -1])[[1, 0, 2]]
            claims.insert(0, claim_of_cases(neurons, copies.place, copies.outcome, left, copies.search.tried))
    return NormReading(
        sweep=sweep,
        place=made.spike.place.words,
        conditions=tuple(zeroed),
        zeroed=tuple(zeroed.values()),
        norms=rounded(table[:, :, before - 1 + sweep.counts]),
        repeats=repeats,
        reference=reference,
        typical=typical_quantiles(scan.typical.norms[scan.layer : scan.layer + 1])[:, 0].numpy(),
        claims=tuple(claims),
    )


def read_vocabulary(setup: Setup, made: MadeSpike, limit: int, sample: int | None, resume: Resume) -> AtlasReading:
    """The repetitions that every token needs at the layer of a spike."""
    target, scan, place = setup.target, made.scan, made.spike.place
    ids = vocabulary(target, None)
    if sample is not None:
        ids = sorted(sample_tokens(ids, sample, setup.seed))
    clusters = None
    if target.has_attention(0):
        clusters = find_clusters(setup, made, ids, resume)
    hold_layers(target, scan.layer)

    def work(tokens: list[int]) -> Columns:
        needed = repeat_until_half(scan, tokens, prefixes(setup, tokens), limit)
        return {"repeats": [token.repeats for token in needed.tokens]}

    settings = {"layer": scan.layer, "max_repeats": limit, "place": place.words}
    columns = in_chunks(setup, work, ids, resume, what="vocabulary", size=TOKENS, **settings)
    repeats = np.array(columns["repeats"], dtype=float)
    purpose = seed_of(setup.seed, "tokens to compare")
    compared = sample_tokens([ids[row] for row in reached(repeats)], COMPARED, purpose)
    claims: Claims = ()
    if compared:
        rows = repeated(prefixes(setup, compared), compared, limit)
        claims = (norms_of_copies(setup, scan, rows, 1, repeats),)
    return AtlasReading(
        tokens=token_texts(target, ids),
        ids=np.array(ids),
        repeats=repeats,
        head=np.full(len(ids), np.nan) if clusters is None else clusters.head,
        max_repeats=limit,
        place=place.words,
        claims=claims,
    )
