"""Step 2, the spikes: places at which states stand out, and runs of layers in which the direction of each stays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sinkscope.measure.margin import margin_of
from sinkscope.sinks.spikes.places import Place, per_text, sink_places, split_by_label
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.thresholds import LATER, READS, SAME, STANDS_OUT
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
    free = survey.ratios[:, mask].mean(1) > STANDS_OUT
    while bool(free.any()):
        peak = int(size.masked_fill(~free, -1).argmax())
        direction, ratios = away[peak] / size[peak], survey.ratios[peak][mask]
        carries = free & (away @ direction >= SAME * size)
        first = last = peak
        while first > 0 and carries[first - 1]:
            first -= 1
        while last + 1 < len(carries) and carries[last + 1]:
            last += 1
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
            ratio=float(ratios.mean()),
            ratio_margin=margin_of(per_text(ratios, mask).numpy()),
        )
        free[first : last + 1] = False
