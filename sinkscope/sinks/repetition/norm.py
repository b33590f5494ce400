"""Norm of repeated tokens at the sink layer, also with sink neurons zeroed (Yona et al. 2025, Fig. 2, 3, 6, 7, 9)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from sinkscope.hooks.edit import Ablate
from sinkscope.measure import Setup
from sinkscope.results.claims import Claim, Outcome
from sinkscope.results.parts import sites_of
from sinkscope.results.style import GREY, long_table
from sinkscope.results.tables import Table
from sinkscope.sinks.find.layer_scan import LayerScan, typical_quantiles
from sinkscope.sinks.find.repetitions import repeats_until_half
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.removal.components import Sites
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
from sinkscope.sinks.tokens import PerToken, TokenRows

AT_ONCE = "Every token reaches half of the norm of the spike at once, so repetition has nothing to show."


@dataclass(frozen=True, kw_only=True)
class NormReading(Reading):
    """L2 norm of the residual stream after the sink layer.

    Attributes:
        sweep: What was repeated.
        place: Where the spike is whose norm is the reference.
        conditions: "intact"; "set": the sink neurons are zeroed; "control": as many random neurons of the same layers.
        zeroed: The neurons that are zeroed under each condition, (layer, neuron) or (layer, expert, neuron).
        norms: Norm of the repeated token after n repetitions.
        repeats: First number of repetitions whose intact norm reaches half of the reference. NaN if never.
        reference: Norm of the spike in typical text, median over texts.
        typical: The 5 % quantile, the median and the 95 % quantile of norms at later positions of typical text.
    """

    sweep: Sweep
    place: str
    conditions: tuple[str, ...]
    zeroed: tuple[Sites, ...]
    norms: Float[np.ndarray, "condition token n"]
    repeats: PerToken
    reference: float
    typical: Float[np.ndarray, " quantile"]

    @property
    def lost(self) -> Float[np.ndarray, "condition token"]:
        """Share of the intact norm at the last repetition that a condition takes away."""
        return 1 - self.norms[:, :, -1] / self.norms[0, :, -1]

    def conclusion(self) -> str:
        """What copies reach of the spike's norm and when, or what neurons do for it; each beside its control."""
        if not self.claims:
            return AT_ONCE
        copies, *neurons = self.claims
        if neurons and neurons[0].verdict == "needed":
            norm = f"the norm of {self.sweep.max_repeats} copies of a token"
            return f"{neurons[0].finding(('makes', 'make'), norm, 'that norm')}."
        if neurons:
            return f"For the norm after {self.sweep.max_repeats} copies of a token, {neurons[0].phrase()}."
        said = self.copies("reach", f"of the norm at {self.place}")
        reached = self.repeats[self.repeats > 1]
        if not len(reached):
            return f"{said} (the most: {copies.search.most:.0%})."
        return f"{said}; half after {np.median(reached):.0f} (median, {len(reached)} of {len(self.repeats)} tokens)."

    def details(self) -> list[str]:
        """The norms, and what the copies do where the conclusion is about neurons."""
        low, middle, high = self.typical
        typical = f"that of typical text {middle:.4g} (5-95 %: {low:.4g} to {high:.4g})"
        lines = [f"The norm at {self.place} is {self.reference:.4g}, and {typical}."]
        at_once = int((self.repeats == 1).sum())
        if at_once and self.claims:
            lines.append(f"Left out, with half of it at once: {at_once} of {len(self.repeats)} tokens.")
        return [*lines, *(claim.sentence() for claim in self.claims[:-1])]

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


def norms_of_copies(setup: Setup, scan: LayerScan, rows: TokenRows, before: int, tried: int) -> Claim:
    """The share of the spike's norm that copies reach, beside one copy at that position and other tokens there.

    Args:
        setup: The model and its text.
        scan: The model at the place of its spike.
        rows: The sequences, which end with the copies.
        before: Number of tokens before the copies.
        tried: Number of tokens of which these were taken.
    """
    texts = beside_copies(setup, rows, before)
    shares = torch.stack([norms_at_sink(scan, ids)[:, -1] for ids in texts]) / scan.spike_norm[scan.layer]
    return claim_of_copies(rows.shape[1] - before, Outcome("norm", (scan.layer,)), shares, tried)


def read_norms(setup: Setup, made: MadeSpike, sweep: Sweep, ids: TokenRows, ablate: bool) -> NormReading:
    """The norms of repeated tokens at the layer of a spike."""
    scan, before = made.scan, len(sweep.before)
    neurons = tuple(neuron.address for neuron in made.neurons)
    reference = scan.spike_norm[scan.layer]
    zeroed: dict[str, Sites] = {"intact": ()}
    if ablate and neurons:
        control = random_neurons(setup.target, neurons, neurons, setup.seed)
        zeroed |= {"set": sites_of(neurons), "control": sites_of(control)}
    norms = []
    for sites in zeroed.values():
        with Ablate(sites=sites).on(setup.target) if sites else nullcontext():
            norms.append(norms_at_sink(scan, ids))
        setup.progress("repetitions", len(norms), len(zeroed))
    table = torch.stack(norms)  # condition token pos
    repeats = np.array([repeats_until_half(intact[before:], reference) for intact in table[0]], dtype=float)
    tried = np.flatnonzero(repeats != 1)
    reached = np.flatnonzero(repeats > 1)
    rows = reached if len(reached) else tried
    claims = []
    if len(rows):
        copies = norms_of_copies(setup, scan, ids[rows], before, len(tried))
        claims.append(copies)
        if len(zeroed) > 1 and len(reached):
            left = (table[:, rows, -1] / table[0, rows, -1])[[1, 0, 2]]
            claims.append(claim_of_cases(neurons, copies.place, copies.outcome, left, len(tried)))
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
