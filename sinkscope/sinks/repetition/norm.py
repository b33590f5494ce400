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
from sinkscope.measure.evidence import Evidence
from sinkscope.measure.margin import margin_of
from sinkscope.results.notation import count_of, neuron_names, word_form
from sinkscope.results.parts import sites_of
from sinkscope.results.result import Number
from sinkscope.results.style import GREY, long_table
from sinkscope.results.tables import Table, cell
from sinkscope.sinks.find.layer_scan import norms_after, typical_quantiles
from sinkscope.sinks.find.repetitions import repeats_until_half
from sinkscope.sinks.find.spikes import sink_neurons
from sinkscope.sinks.removal.components import Sites
from sinkscope.sinks.repetition.sweep import NO_LAYER, NoReading, Reading, Sweep, rounded
from sinkscope.sinks.tokens import TokenRows, left_out_line

SEQUENCES = 4  # sequences per pass
NAMED = 5  # neurons that the conclusion names


@dataclass(frozen=True)
class NormReading(Reading):
    """L2 norm of the residual stream after the sink layer.

    Attributes:
        sweep: What was repeated.
        conditions: "intact"; "set": the sink neurons are zeroed; "control": as many random neurons of the same layers.
        zeroed: The neurons that are zeroed under each condition, (layer, neuron) or (layer, expert, neuron).
        norms: Norm of the repeated token after n repetitions.
        first_norms: Norm of the first token in the same pass.
        repeats: First number of repetitions whose intact norm reaches half of the first token's. NaN if never.
        first_norm: Norm of the first token of typical text: BOS, or without BOS the median over pieces.
        typical: The 5 % quantile, the median and the 95 % quantile of norms at later positions of typical text.
    """

    sweep: Sweep
    conditions: tuple[str, ...]
    zeroed: tuple[Sites, ...]
    norms: Float[np.ndarray, "condition token n"]
    first_norms: Float[np.ndarray, "condition token"]
    repeats: Float[np.ndarray, " token"]
    first_norm: float
    typical: Float[np.ndarray, " quantile"]

    @property
    def lost(self) -> Float[np.ndarray, "condition token"]:
        """Share of the intact norm at the last repetition that a condition takes away."""
        return 1 - self.norms[:, :, -1] / self.norms[0, :, -1]

    @property
    def needed(self) -> list[float]:
        """Median of `lost` over sequences that become sinks, by condition; none if nothing was zeroed or no sink."""
        reached = np.isfinite(self.repeats)
        if len(self.conditions) == 1 or not reached.any():
            return []
        return np.median(self.lost[:, reached], axis=1).tolist()

    def conclusion(self) -> str:
        """The number of repetitions beside the norm of typical text, or what zeroing takes away beside its control."""
        tried = [row for row in self.sweep.single if self.repeats[row] != 1]
        reached = [row for row in tried if np.isfinite(self.repeats[row])]
        typical = f"in typical text the median is {self.typical[1] / self.first_norm:.1%} of that norm"
        if not tried:
            return "Every token reaches half of the first token's norm at once, so repetition has nothing to show."
        if not reached:
            return (
                f"No repeated token reaches half of the first token's norm within {self.sweep.times} "
                f"({count_of(len(tried), 'token')}); {typical}."
            )
        if self.needed:
            return self._needed(*self.needed[1:])
        tokens = word_form(len(tried), "token", "tokens")
        return (
            f"A repeated token reaches half of the first token's norm after {np.median(self.repeats[reached]):.0f} "
            f"repetitions (median of {len(reached)} of {len(tried)} {tokens}); {typical}."
        )

    def _needed(self, lost: float, chance: float) -> str:
        count = len(self.zeroed[1])
        verdict = f"{word_form(count, 'makes', 'make')} the norm of repetitions"
        if not Evidence(lost, chance).holds:
            verdict = f"{word_form(count, 'is', 'are')} not needed for the norm of repetitions"
        return (
            f"{neuron_names(self.zeroed[1], NAMED)} {verdict}: zeroing {word_form(count, 'it', 'them')} takes away "
            f"{cell(lost, percent=True)} of it, zeroing as many random neurons {cell(chance, percent=True)}."
        )

    def details(self) -> list[str]:
        """Norms, and tokens that need no repetition."""
        low, middle, high = self.typical.tolist()
        lines = [
            f"The first token's norm is {self.first_norm:.4g}, and that of typical text {middle:.4g} (5-95 %: "
            f"{low:.4g} to {high:.4g})."
        ]
        lines += left_out_line([self.sweep.tokens[row] for row in self.sweep.single if self.repeats[row] == 1])
        return lines

    def rows(self) -> Table:
        """One row per sequence; `lost_*` is the share of the norm at the last repetition that zeroing removes."""
        last = self.norms[0, :, -1]
        columns = {"repeats": self.repeats, "last_norm": last, "of_first": last / self.first_norms[0]}
        for name, lost in zip(self.conditions[1:], self.lost[1:], strict=True):
            columns[f"lost_{name}"] = lost
        return long_table(columns, repeated=self.sweep.tokens)

    def numbers(self) -> list[Number]:
        """The norm after the last repetition, and what ablation takes away."""
        last = self.norms[0, self.sweep.single, -1]
        middle = float(np.median(last))
        numbers = [Number("norm after the last repetition", middle, float(self.typical[1]), margin_of(last, np.median))]
        if self.needed:
            _, lost, chance = self.needed
            margin = margin_of(self.lost[1, np.isfinite(self.repeats)], np.median)
            numbers.append(Number("norm then lost without the neurons", lost, chance, margin))
        return numbers

    def draw(self) -> Any:
        """Norm over the number of repetitions, a panel per condition."""
        titles = {"set": "sink neurons zeroed", "control": "random neurons zeroed"}
        fig = self.sweep.curves(self.norms, [titles.get(name, name) for name in self.conditions], "norm")
        for share, dash, words in ((1, "solid", "first token"), (0.5, "dot", "half of it")):
            level, line = share * self.first_norm, {"color": GREY, "dash": dash, "width": 1}
            place = {"y": np.log10(level), "xanchor": "left", "x": 0}  # the axis is logarithmic
            fig.add_hline(level, line=line, annotation={"text": words, **place})
        fig.add_hrect(self.typical[0], self.typical[2], fillcolor="grey", opacity=0.2)
        return fig


def read_norms(setup: Setup, sweep: Sweep, ids: TokenRows, ablate: bool) -> tuple[int | None, NormReading | NoReading]:
    """The sink layer, and the norms of repeated tokens there; without a layer, what there is instead."""
    sink = sink_neurons(setup)
    if sink.made is None:
        return None, NoReading(sink.absence(NO_LAYER))
    context = sink.made.context
    layer = context.layer
    zeroed: dict[str, Sites] = {"intact": ()}
    if ablate and sink.neurons:
        zeroed |= {"set": sites_of(sink.neurons), "control": sink.controls}
    norms = []
    for name, neurons in zeroed.items():
        with Ablate(sites=list(neurons)).on(setup.target) if neurons else nullcontext():
            norms.append(norms_after(setup.target, layer, ids, SEQUENCES, setup.progress, f"repetitions, {name}"))
    table = torch.stack(norms)  # condition token pos
    norms_of_text = context.scan.whole_norms[layer : layer + 1]
    first_norm = float(norms_of_text[0, :, 0].median())
    repeats = [repeats_until_half(intact[len(sweep.before) :], first_norm) for intact in table[0]]
    return layer, NormReading(
        sweep,
        conditions=tuple(zeroed),
        zeroed=tuple(zeroed.values()),
        norms=rounded(table[:, :, sweep.places]),
        first_norms=rounded(table[:, :, 0]),
        repeats=np.array(repeats, dtype=float),
        first_norm=first_norm,
        typical=typical_quantiles(norms_of_text)[:, 0].numpy(),
    )
