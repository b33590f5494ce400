"""Norm of repeated tokens at the sink layer, also with sink neurons zeroed (Yona et al. 2025, Fig. 2, 3, 6, 7, 9)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.files.notation import agreeing, counted, neuron_names
from sinkscope.files.result import Number
from sinkscope.files.tables import cell
from sinkscope.interventions import Ablate
from sinkscope.measure import Setup
from sinkscope.measure.evidence import Evidence
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.first_token.absence import SpikeAbsence
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.layer_scan import norms_after, repeats_until_half
from sinkscope.sinks.first_token.sets import SinkNeurons, sink_neurons
from sinkscope.sinks.repetition.sweep import Sweep, SweepRows, curves_figure, rounded
from sinkscope.sinks.tokens import left_out_line

SEQUENCES = 4  # sequences per pass
NAMED = 5  # neurons that the conclusion names
Neurons = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class NormReading:
    """L2 norm of the residual stream after the sink layer.

    Attributes:
        conditions: "intact"; "one": the largest sink neuron is zeroed; "set": the set that makes the spike; "control":
            as many random neurons of the same layers.
        zeroed: The neurons that are zeroed under each condition, (layer, neuron) or (layer, expert, neuron).
        norms: Norm of the repeated token after n repetitions.
        first_norms: Norm of the first token in the same pass.
        repeats: First number of repetitions whose intact norm reaches half of the first token's. NaN if never.
        first_norm: Norm of the first token of typical text: BOS, or without BOS the median over pieces.
        typical: The 5 % quantile, the median and the 95 % quantile of norms at later positions of typical text.
    """

    conditions: tuple[str, ...]
    zeroed: tuple[Neurons, ...]
    norms: Float[np.ndarray, "condition token n"]
    first_norms: Float[np.ndarray, "condition token"]
    repeats: Float[np.ndarray, " token"]
    first_norm: float
    typical: Float[np.ndarray, " quantile"]

    @property
    def lost(self) -> Float[np.ndarray, "condition token"]:
        """Share of the intact norm at the last repetition that a condition takes away."""
        return 1 - self.norms[:, :, -1] / self.norms[0, :, -1]

    def conclusion(self, sweep: Sweep) -> str:
        """The number of repetitions beside the norm of typical text, or what zeroing takes away beside its control."""
        tried, reached = self._tried(sweep)
        typical = f"in typical text the median is {self.typical[1] / self.first_norm:.1%} of that norm"
        if not tried:
            return "Every token reaches half of the first token's norm at once, so repetition has nothing to show."
        if not reached:
            return (
                f"No repeated token reaches half of the first token's norm within {sweep.times} "
                f"({counted(len(tried), 'token')}); {typical}."
            )
        if "control" in self.conditions:
            return self._needed()
        tokens = agreeing(len(tried), "token", "tokens")
        return (
            f"A repeated token reaches half of the first token's norm after {np.median(self.repeats[reached]):.0f} "
            f"repetitions (median of {len(reached)} of {len(tried)} {tokens}); {typical}."
        )

    def _tried(self, sweep: Sweep) -> tuple[list[int], list[int]]:
        """Rows that need repetition at all, and those of them that become sinks."""
        tried = [row for row in sweep.single if self.repeats[row] != 1]
        return tried, [row for row in tried if np.isfinite(self.repeats[row])]

    def _losses(self) -> dict[str, float]:
        """Median of `lost` over sequences that become sinks, by condition."""
        reached = np.isfinite(self.repeats)
        medians = np.median(self.lost[:, reached], axis=1)
        return dict(zip(self.conditions, medians.tolist(), strict=True))

    def _needed(self) -> str:
        losses = self._losses()
        causal = "set" if "set" in losses else "one"
        zeroed = self.zeroed[self.conditions.index(causal)]
        count = len(zeroed)
        verdict = f"{agreeing(count, 'makes', 'make')} the norm of repetitions"
        if not Evidence(losses[causal], losses["control"]).holds:
            verdict = f"{agreeing(count, 'is', 'are')} not needed for the norm of repetitions"
        lost, chance = cell(losses[causal], percent=True), cell(losses["control"], percent=True)
        return (
            f"{neuron_names(zeroed, NAMED)} {verdict}: zeroing {agreeing(count, 'it', 'them')} takes away {lost} of "
            f"it, zeroing as many random neurons {chance}."
        )

    def details(self, sweep: Sweep) -> list[str]:
        """Norms, tokens that never become a sink, the cycle, and the effect of ablation on the first token."""
        low, middle, high = self.typical.tolist()
        lines = [
            f"The first token's norm is {self.first_norm:.4g}, and that of typical text {middle:.4g} (5-95 %: "
            f"{low:.4g} to {high:.4g})."
        ]
        never = [row for row in sweep.single if np.isnan(self.repeats[row])]
        if 0 < len(never) < len(sweep.single):
            reach = agreeing(len(never), "reaches", "reach")
            lines.append(f"{len(never)} of {len(sweep.single)} tokens never {reach} half of the first token's norm.")
        lines += left_out_line([sweep.tokens[row] for row in sweep.single if self.repeats[row] == 1])
        for ids, count in zip(sweep.ids, self.repeats, strict=True):
            if len(ids) > 1:
                when = "never reaches"
                if np.isfinite(count):
                    when = f"after {counted(int(count), 'token')} reaches"
                lines.append(f"The cycle of {len(ids)} words {when} half of that norm.")
        for condition in range(1, len(self.conditions)):
            first = 1 - self.first_norms[condition, 0] / self.first_norms[0, 0]
            neurons = neuron_names(self.zeroed[condition])
            lost = cell(float(first), percent=True)
            lines.append(
                f"{self._title(condition).capitalize()} ({neurons}): {lost} of the first token's norm is lost."
            )
        return lines

    def _title(self, condition: int) -> str:
        titles = {
            "intact": "intact",
            "one": "largest sink neuron zeroed",
            "set": "all sink neurons zeroed",
            "control": "random neurons zeroed",
        }
        return titles[self.conditions[condition]]

    def rows(self, sweep: Sweep) -> list[dict[str, Any]]:
        """One row per sequence; `lost_*` is the share of the norm at the last repetition that zeroing removes."""
        table: list[dict[str, Any]] = []
        for row, token in enumerate(sweep.tokens):
            repeats = self.repeats[row]
            last = self.norms[0, row, -1]
            cells = {
                "repeated": token,
                "repeats": None if np.isnan(repeats) else int(repeats),
                "last_norm": last,
                "of_first": last / self.first_norms[0, row],
            }
            for name, lost in zip(self.conditions[1:], self.lost[1:, row], strict=True):
                cells[f"lost_{name}"] = lost
            table.append(cells)
        return table

    def numbers(self, sweep: Sweep) -> list[Number]:
        """The norm after the last repetition, and what ablation takes away."""
        last = self.norms[0, sweep.single, -1]
        middle = float(np.median(last))
        typical = float(self.typical[1])
        numbers = [Number("norm after the last repetition", middle, typical, margin_of(last, np.median))]
        if "control" in self.conditions and np.isfinite(self.repeats).any():
            losses = self._losses()
            causal = "set" if "set" in losses else "one"
            by_token = self.lost[self.conditions.index(causal), np.isfinite(self.repeats)]
            margin = margin_of(by_token, np.median)
            numbers.append(Number("norm then lost without the neurons", losses[causal], losses["control"], margin))
        return numbers

    def draw(self, sweep: Sweep) -> Any:
        """Norm over the number of repetitions, a panel per condition."""
        panels: dict[str, np.ndarray] = {}
        for condition, norms in enumerate(self.norms):
            panels[self._title(condition)] = norms
        fig = curves_figure(sweep, panels, "norm")
        fig.add_hline(self.first_norm, line_width=1)
        fig.add_hline(self.first_norm / 2, line_dash="dot", line_width=1)
        fig.add_hrect(self.typical[0], self.typical[2], fillcolor="grey", opacity=0.2)
        return fig


def read_norms(setup: Setup, rows: SweepRows, ablate: bool) -> tuple[int | None, NormReading | SpikeAbsence]:
    """The sink layer, and the norms of repeated tokens there; without a layer, what there is instead."""
    target = setup.target
    context = SinkContext.read(setup)
    absence = SpikeAbsence.of(context)
    if absence is not None:
        return None, absence
    spike = context.scan
    layer = context.layer
    zeroed: dict[str, Neurons] = {"intact": ()}
    if ablate:
        zeroed |= ablated_neurons(sink_neurons(setup))
    norms: list[Tensor] = []
    for name, neurons in zeroed.items():
        edit = Ablate(sites=list(neurons)).on(target) if neurons else nullcontext()
        with edit:
            norms.append(norms_after(target, layer, rows.ids, SEQUENCES, setup.progress, f"repetitions, {name}"))
    table = torch.stack(norms)  # condition token pos
    first_norm = spike.layers[layer].first_norm
    repeats = [repeats_until_half(intact[rows.start :], first_norm) for intact in table[0]]
    return layer, NormReading(
        conditions=tuple(zeroed),
        zeroed=tuple(zeroed.values()),
        norms=rounded(table[:, :, rows.places]),
        first_norms=rounded(table[:, :, 0]),
        repeats=np.array(repeats, dtype=float),
        first_norm=first_norm,
        typical=np.array(spike.layers[layer].typical_norms),
    )


def ablated_neurons(sink: SinkNeurons) -> dict[str, Neurons]:
    """The neurons zeroed under each condition; none if no set of neurons makes the spike."""
    if not sink.neurons:
        return {}
    conditions: dict[str, Neurons] = {"one": sink.sites[:1]}
    if len(sink.sites) > 1:
        conditions["set"] = sink.sites
    conditions["control"] = sink.controls
    return conditions
