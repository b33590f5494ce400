"""Step 2, the spikes: places at which states stand out, and runs of layers in which the direction of each stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure.margin import margin_of
from sinkscope.sinks.spikes.places import Place, per_text, sink_places, split_by_label
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import LATER, READS, SAME, SMALLEST, STANDS_OUT
from sinkscope.sinks.tokens import Mask


def find_spikes(survey: Survey, tokenizer: Any) -> list[Spike]:
    """The spikes of each place, first layers first.

    Args:
        survey: The survey.
        tokenizer: Its `decode` gives words for places.
    """
    high = survey.ratios > STANDS_OUT
    anywhere = high.any(0)
    ordinary = ~anywhere
    ordinary[:, 0] = False
    if not bool(ordinary.any()):  # every position stands out somewhere
        ordinary = torch.ones_like(anywhere)
        ordinary[:, 0] = False
    spikes: list[Spike] = []
    for place in split_by_label(survey.ids, anywhere, tokenizer.decode):
        spikes += sorted(spikes_at(survey, place, ordinary), key=lambda spike: spike.first)
    return spikes


def first_spikes(survey: Survey, tokenizer: Any) -> list[Spike]:
    """Return the spikes of the first token, first layers first."""
    return [spike for spike in find_spikes(survey, tokenizer) if spike.place.is_first]


def attended(survey: Survey) -> Mask:
    """Mark the positions that heads attend to as a sink, of those that enough later queries follow."""
    layers = survey.target.attending
    if not layers:
        return torch.zeros_like(survey.ids, dtype=torch.bool)
    above = survey.attention[layers] > READS
    above[..., max(0, above.shape[-1] - LATER) :] = False
    return sink_places(above)


def spikes_at(survey: Survey, place: Place, ordinary: Mask) -> Iterator[Spike]:
    """Yield the spikes at one place, the highest first."""
    mask = place.mask
    mean = survey.states[:, ordinary].mean(1)
    away = survey.states[:, mask].mean(1) - mean
    size = away.norm(dim=-1)
    beside, over = survey.ratios[:, mask].mean(1), survey.norms[:, mask] / typical_of(survey)[:, None]
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
        run = slice(first, last + 1)
        highest = first + int(over[run].mean(1).argmax())
        yield Spike(
            place=place,
            ordinary=ordinary,
            first=first,
            last=last,
            peak=peak,
            mean=mean[peak],
            direction=direction,
            size=float(size[peak]),
            norm=float(survey.norms[peak, mask].mean()),
            before=float(survey.entered[first, mask].norm(dim=-1).mean()),
            ratio=float(over[highest].mean()),
            ratio_layer=int(highest),
            ratio_margin=margin_of(per_text(over[highest], mask).numpy()),
            ratio_beside=float(beside[run].max()),
        )
        free[run] = False


def typical_of(survey: Survey) -> Float[Tensor, " layer"]:
    """Return the typical norm after each layer, as a divisor."""
    return torch.tensor(survey.typical_norm).clamp(min=SMALLEST)
