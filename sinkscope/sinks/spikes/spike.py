"""Step 2, the spikes: places at which states stand out, and runs of layers in which the direction of each stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.cards import run
from sinkscope.sinks.spikes.places import Place, per_text, sink_places, split_by_label
from sinkscope.sinks.spikes.records import SpikeResult, part_of
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import COUNTS, LATER, READS, SAME, SMALLEST, STANDS_OUT
from sinkscope.sinks.tokens import Mask

Part = Neuron | Head | Component
Parts = tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Spike:
    """A place, a direction in the residual stream, and a run of layers in which the place's norm stands out along it.

    Attributes:
        survey: The survey that shows it.
        place: Where it is, in the texts of the survey.
        ordinary: Positions at which nothing stands out.
        mean: Mean state of ordinary positions after the peak.
        direction: Unit vector from there to the mean state of the place.
        size: Projection of the place's departure on it, mean over the place.
        result: What a result says of it; each step adds to this.
        written: What every neuron writes of it, by layer.
    """

    survey: Survey
    place: Place
    ordinary: Mask
    mean: Float[Tensor, " d_model"]
    direction: Float[Tensor, " d_model"]
    size: float
    result: SpikeResult
    written: Mapping[int, Float[Tensor, " neuron"]] = field(default_factory=dict)

    def adding(self, **measured: Any) -> Spike:
        """Return the same spike with more fields of its result."""
        return replace(self, result=replace(self.result, **measured))

    @property
    def name(self) -> str:
        """The spike by its layers."""
        return run(*self.result.layers)

    def along(self, states: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n"]:
        """Project states on the direction, from the mean of ordinary positions, as a share of the spike."""
        return (states - self.mean) @ self.direction / self.size

    @cached_property
    def reading_layers(self) -> range:
        """The layers of the model whose heads can read it: from the second of the run to the one after the last."""
        first, last = self.result.layers
        return range(first + 1, min(last + 2, len(self.survey.mlp)))

    @property
    def needed(self) -> Parts:
        """The smallest set found that it needs; empty if every set that was tried leaves a quarter or more."""
        return () if self.result.needed is None else tuple(map(part_of, self.result.needed.parts))

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The neurons of the smallest set found."""
        return () if self.result.needed is None else self.result.needed.neurons

    @property
    def writers(self) -> tuple[Neuron, ...]:
        """All neurons that write it or against it, and backups."""
        return tuple(self.result.calibrated)

    @property
    def patch(self) -> SinkPatch:
        """The patch of all its writers, which holds the median that each has on ordinary text."""
        calibrated = self.result.calibrated
        return SinkPatch(sites=tuple(calibrated), calibrated=calibrated)

    @property
    def first_writer(self) -> int:
        """The layer of the first neuron or component that it needs; if it needs none, the first layer of its run."""
        return min((part.layer or 0 for part in self.needed), default=self.result.layers[0])


def find_spikes(survey: Survey, tokenizer: Any) -> list[Spike]:
    """Return the spikes of each place, first layers first.

    Args:
        survey: The survey.
        tokenizer: Its `decode` gives words for places.
    """
    anywhere = (survey.ratios > STANDS_OUT).any(0)
    ordinary = ~anywhere
    ordinary[:, 0] = False
    if not bool(ordinary.any()):  # every position stands out somewhere
        ordinary = torch.ones_like(anywhere)
        ordinary[:, 0] = False
    spikes: list[Spike] = []
    for place in split_by_label(survey.ids, anywhere, tokenizer.decode):
        spikes += sorted(spikes_at(survey, place, ordinary), key=lambda spike: spike.result.layers)
    return spikes


def first_spikes(survey: Survey, tokenizer: Any) -> list[Spike]:
    """Return the spikes of the first token, first layers first."""
    return [spike for spike in find_spikes(survey, tokenizer) if spike.place.is_first]


def spikes_at(survey: Survey, place: Place, ordinary: Mask) -> Iterator[Spike]:
    """Yield the spikes at one place, the highest first."""
    mask, states = place.mask, survey.states
    mean = states[:, ordinary].mean(1)
    away = states[:, mask].mean(1) - mean
    size = away.norm(dim=-1)
    typical = torch.tensor(survey.typical_norm).clamp(min=SMALLEST)
    beside, over = survey.ratios[:, mask].mean(1), survey.norms[:, mask] / typical[:, None]
    free = beside > STANDS_OUT
    while bool(free.any()):
        peak = int(size.masked_fill(~free, -1).argmax())
        direction = away[peak] / size[peak]
        carries = free & (away @ direction >= SAME * size)
        first = last = peak
        while first > 0 and carries[first - 1]:
            first -= 1
        while last + 1 < len(carries) and carries[last + 1]:
            last += 1
        layers = slice(first, last + 1)
        highest = first + int(over[layers].mean(1).argmax())
        square = direction.square()
        order = square.argsort(descending=True, stable=True)
        result = SpikeResult(
            place=place.label,
            layers=(first, last),
            peak=peak,
            norm=float(survey.norms[peak, mask].mean()),
            before=float(survey.entered[first, mask].norm(dim=-1).mean()),
            ratio=float(over[highest].mean()),
            ratio_layer=highest,
            ratio_margin=margin_of(per_text(over[highest], mask).numpy()),
            ratio_beside=float(beside[layers].max()),
            dims=tuple(order[square[order] >= COUNTS].tolist()),
        )
        yield Spike(survey, place, ordinary, mean[peak], direction, float(size[peak]), result)
        free[layers] = False


def attended(survey: Survey) -> Mask:
    """Mark the positions that heads attend to as a sink, if enough later queries follow them."""
    layers = survey.target.attending
    if not layers:
        return torch.zeros_like(survey.ids, dtype=torch.bool)
    above = survey.attention[layers] > READS
    above[..., max(0, above.shape[-1] - LATER) :] = False
    return sink_places(above)
