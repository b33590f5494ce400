"""What a spike is, and what is measured of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.cards import run
from sinkscope.sinks.spikes.places import Place
from sinkscope.sinks.spikes.records import SpikeResult, part_of
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import COUNTS
from sinkscope.sinks.tokens import Mask

Part = Neuron | Head | Component
Parts = tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Spike:
    """A place, a direction in the residual stream, and a run of layers in which the place's norm stands out along it.

    Attributes:
        place: Where it is, in the texts of the survey.
        ordinary: Positions at which nothing stands out.
        first: First layer of the run.
        last: Last layer of the run.
        peak: The layer of the run after which the state departs most from that of ordinary positions.
        mean: Mean state of ordinary positions after the peak.
        direction: Unit vector from there to the mean state of the place.
        size: Projection of the place's departure on it, mean over the place.
        norm: Norm of the residual stream at the place after the peak, mean over the place.
        before: The same before the run.
        ratio: Norm at the place over the typical one, mean over the place, in the layer of the run where it is largest.
        ratio_layer: That layer.
        ratio_margin: Two standard errors of the ratio over texts. None: too few texts.
        ratio_beside: The largest ratio of the run without what dimensions that are massive at all positions have
            everywhere.
    """

    place: Place
    ordinary: Mask
    first: int
    last: int
    peak: int
    mean: Float[Tensor, " d_model"]
    direction: Float[Tensor, " d_model"]
    size: float
    norm: float
    before: float
    ratio: float
    ratio_layer: int
    ratio_margin: float | None
    ratio_beside: float

    @property
    def mask(self) -> Mask:
        """The place as a mask over the texts of the survey."""
        return self.place.mask

    @property
    def name(self) -> str:
        """The spike by its layers."""
        return f"layer{run(self.first, self.last)}"

    @property
    def dims(self) -> tuple[int, ...]:
        """The residual dimensions that hold a tenth of the direction's square or more, the largest first."""
        square = self.direction.square()
        order = square.argsort(descending=True, stable=True)
        return tuple(order[square[order] >= COUNTS].tolist())

    def along(self, states: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n"]:
        """Projection of states on the direction, from the mean of ordinary positions, as a share of the spike."""
        return (states - self.mean) @ self.direction / self.size

    @property
    def reading_layers(self) -> range:
        """The layers whose heads can read it: from the second of the run to the one after the last."""
        return range(self.first + 1, self.last + 2)


@dataclass(frozen=True, eq=False)
class Measured:
    """A spike, and what is measured of it step by step.

    Attributes:
        spike: The spike.
        survey: Where it was found.
        result: What is measured.
        written: What every neuron writes of it, by layer.
    """

    spike: Spike
    survey: Survey
    result: SpikeResult
    written: Mapping[int, Float[Tensor, " neuron"]] = field(default_factory=dict)

    def adding(self, **measured: Any) -> Measured:
        """Return the same with more fields of the result."""
        return replace(self, result=replace(self.result, **measured))

    @property
    def needed(self) -> Parts:
        """The smallest set found that it needs; empty: no set that was tried leaves less than a quarter."""
        return () if self.result.needed is None else tuple(map(part_of, self.result.needed.parts))

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The neurons of the smallest set that was found."""
        return () if self.result.needed is None else self.result.needed.neurons

    @property
    def writers(self) -> tuple[Neuron, ...]:
        """All neurons that write it, for it or against it, and backups."""
        return tuple(self.result.calibrated)

    @property
    def patch(self) -> SinkPatch:
        """The patch of all its writers, which holds the median that each has on ordinary text."""
        calibrated = self.result.calibrated
        return SinkPatch(sites=tuple(calibrated), calibrated=calibrated)

    @property
    def first_writer(self) -> int:
        """The layer of the first neuron or component that the spike needs; of none the first layer of its run."""
        return min((part.layer or 0 for part in self.needed), default=self.spike.first)
