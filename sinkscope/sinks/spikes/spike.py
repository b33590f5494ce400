"""Step 2, the spikes: places at which states stand out, and runs of layers in which the direction of each stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.results.notation import Component, Head, Neuron
from sinkscope.sinks.spikes.places import Place, at_position, sink_places, split_by_label
from sinkscope.sinks.spikes.records import run
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import COUNTS, HALF, LATER, READS, SAME, SMALLEST, STANDS_OUT
from sinkscope.sinks.tokens import Mask

Part = Neuron | Head | Component
Parts = tuple[Part, ...]


@dataclass(frozen=True, eq=False)
class Spike:
    """A place, a direction in the residual stream, and a run of layers in which the place's norm stands out along it.

    Attributes:
        survey: The survey in whose texts it is.
        place: Where it is, in these texts.
        ordinary: Positions at which nothing stands out.
        mean: Mean state of ordinary positions after the peak.
        direction: Unit vector from there to the mean state of the place.
        size: Projection of the place's departure on it, mean over the place.
        layers: First and last layer of the run.
        peak: The layer after which it is largest.
        highest: The layer of the run after which its norm is farthest above the typical one.
    """

    survey: Survey
    place: Place
    ordinary: Mask
    mean: Float[Tensor, " d_model"]
    direction: Float[Tensor, " d_model"]
    size: float
    layers: tuple[int, int]
    peak: int
    highest: int

    @property
    def name(self) -> str:
        """The spike by its layers."""
        return run(*self.layers)

    @property
    def dims(self) -> tuple[int, ...]:
        """Residual dimensions that hold at least a tenth of the direction's square, the largest first."""
        square = self.direction.square()
        order = square.argsort(descending=True, stable=True)
        return tuple(order[square[order] >= COUNTS].tolist())

    def along(self, states: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n"]:
        """Project states on the direction, from the mean of ordinary positions, as a share of the spike."""
        return (states - self.mean) @ self.direction / self.size

    @cached_property
    def reading_layers(self) -> range:
        """The layers of the model whose heads can read it: from the second of the run to the one after the last."""
        first, last = self.layers
        return range(first + 1, min(last + 2, len(self.survey.mlp)))

    def on(self, survey: Survey) -> Spike | None:
        """Return the same spike in the texts of another survey: its direction and layers stay.

        Places that no words mean are then the positions that stand out along the direction.

        Args:
            survey: The other survey.

        Returns:
            None if its place is in none of these texts.
        """
        ordinary, mask = ordinary_of(survey), self.place.matches(survey.ids)
        if not bool(self.place.matches(self.survey.ids).any()):
            along = self.along(survey.states[self.peak])
            mask = (along >= HALF) & (survey.ratios[self.peak] > STANDS_OUT)
            mask &= at_position(survey.ids, 0) == self.place.is_first
        if not bool(mask.any()):
            return None
        mean = survey.states[self.peak][ordinary].mean(0)
        size = float(((survey.states[self.peak][mask] - mean) @ self.direction).mean())
        if size <= 0:
            return None
        place = replace(self.place, mask=mask)
        return replace(self, survey=survey, place=place, ordinary=ordinary, mean=mean, size=size)


def ordinary_of(survey: Survey) -> Mask:
    """Mark the positions after the first at which nothing stands out; all of them if everything does."""
    ordinary = ~(survey.ratios > STANDS_OUT).any(0)
    ordinary[:, 0] = False
    if not bool(ordinary.any()):
        ordinary = ~at_position(survey.ids, 0)
    return ordinary


def find_spikes(survey: Survey, tokenizer: Any) -> list[Spike]:
    """Return the spikes of each place, first layers first.

    Args:
        survey: The survey.
        tokenizer: Its `decode` gives words for places.
    """
    ordinary, spikes = ordinary_of(survey), list[Spike]()
    for place in split_by_label(survey.ids, (survey.ratios > STANDS_OUT).any(0), tokenizer.decode):
        spikes += sorted(spikes_at(survey, place, ordinary), key=lambda spike: spike.layers)
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
    over = over_typical(survey, mask).mean(1)
    free = survey.ratios[:, mask].mean(1) > STANDS_OUT
    while bool(free.any()):
        peak = int(size.masked_fill(~free, -1).argmax())
        direction = away[peak] / size[peak]
        carries = free & (away @ direction >= SAME * size)
        first = last = peak
        while first > 0 and carries[first - 1]:
            first -= 1
        while last + 1 < len(carries) and carries[last + 1]:
            last += 1
        highest = first + int(over[first : last + 1].argmax())
        yield Spike(survey, place, ordinary, mean[peak], direction, float(size[peak]), (first, last), peak, highest)
        free[first : last + 1] = False


def over_typical(survey: Survey, mask: Mask) -> Float[Tensor, "layer case"]:
    """Divide the norms at some positions by the typical one of their layer."""
    typical = torch.tensor(survey.typical_norm).clamp(min=SMALLEST)
    return survey.norms[:, mask] / typical[:, None]


def attended(survey: Survey) -> Mask:
    """Mark the positions that heads attend to as a sink, if enough later queries follow them."""
    layers = survey.target.attending
    if not layers:
        return torch.zeros_like(survey.ids, dtype=torch.bool)
    above = survey.attention[layers] > READS
    above[..., max(0, above.shape[-1] - LATER) :] = False
    return sink_places(above)
