"""`find_sinks`: steps 1 to 5 and 7 of `steps`, and few copies, as a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sinkscope.measure import Natural, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.text import beginning, resolve_bos
from sinkscope.sinks.spikes.figure import draw
from sinkscope.sinks.spikes.find import attended, find_spikes
from sinkscope.sinks.spikes.places import split_by_label
from sinkscope.sinks.spikes.records import (
    Attended,
    Largest,
    OtherBos,
    OtherSpike,
    Readers,
    SinkRate,
    words_of,
)
from sinkscope.sinks.spikes.removal import count_readers
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.steps import Sinks, sinks_of, with_copies
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.thresholds import READS, SINK_HEADS
from sinkscope.sinks.tokens import Mask, repetition_limit

FEW_COPIES = 64  # copies that `find_sinks` tries


@measurement(
    loading="fits",
    figure=draw,
)
def find_sinks(setup: Setup, *, tokens: Sequence[str] | None = None, max_repeats: Natural | None = None) -> FindSinks:
    """Find the norm spikes of a model, what writes them, what they need, and the heads that attend to their places.

    A spike is a place, a direction in the residual stream and a run of layers. Typical text is read once; what each
    component and neuron adds along the direction are shares of the spike. Then its writers are removed, one by one and
    together, beside random neurons of the same layers (Sun et al. 2024; Yona et al. 2025, section 4).

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        max_repeats: Number of copies of each. By default 64, or what the
            context holds.
    """
    limit = repetition_limit(setup.target, max_repeats)
    if max_repeats is None:
        limit = min(FEW_COPIES, limit)
    return FindSinks(**fields_of(setup, sinks_of(setup), tokens, limit))


def fields_of(setup: Setup, sinks: Sinks, tokens: Sequence[str] | None, limit: int) -> dict[str, Any]:
    """Take steps 6 and 7, with so many copies of some tokens, and return the fields of a result."""
    sinks, target = with_copies(setup, sinks, tokens, limit), setup.target
    survey = sinks.survey
    setup.record(max_repeats=limit)
    first = at_first(survey)
    received = survey.received(first)
    heads: list[tuple[float | None, ...]] = []
    for layer, given in enumerate(received.mean(-1)):
        heads.append(tuple(given.tolist()) if target.has_attention(layer) else (None,) * target.n_heads)
    place, mask = "the first token", first
    if sinks.spikes and sinks.spikes[0].result.heads:
        place, mask = sinks.spikes[0].spike.place.words, sinks.spikes[0].spike.mask
    rate = survey.sink_rate
    return {
        "spikes": tuple(one.result for one in sinks.spikes),
        "readers": readers_of(survey, place, mask),
        "attended": attended_places(survey, sinks, setup.tokenizer),
        "learned_heads": int((survey.learned.mean(-1) > READS).sum()),
        "largest": largest_norm(survey, setup.tokenizer),
        "heads": tuple(heads),
        "bos": other_bos(setup),
        "sink_rate": SinkRate(READS, survey.ids.shape[1], len(rate), float(rate.mean()), margin_of(rate.numpy())),
        "typical_norm": tuple(survey.typical_norm),
        "first_token_norm": tuple(survey.first_norm),
        "layers_read": target.n_layers,
        "first_ids": tuple(beginning(setup.tokenizer, setup.bos)),
    }


def at_first(survey: Survey) -> Mask:
    """Return the first position of each text."""
    mask = torch.zeros_like(survey.ids, dtype=torch.bool)
    mask[:, 0] = True
    return mask


def readers_of(survey: Survey, place: str, mask: Mask) -> Readers:
    """Return heads that attend to a place, in the texts that have it."""
    received = survey.received(mask)[survey.target.attending][:, :, mask.any(1)]
    heads, margin = count_readers(received)
    by_text = (received > READS).flatten(0, 1).sum(0).tolist()
    return Readers(place, heads, received[..., 0].numel(), margin, received.shape[2], tuple(by_text))


def attended_places(survey: Survey, sinks: Sinks, tokenizer: Any) -> tuple[Attended, ...]:
    """Return places that heads attend to and at which there is no spike."""
    there, layers = attended(survey), survey.target.attending
    for one in sinks.spikes:
        there &= ~one.spike.mask
    found: list[Attended] = []
    for place in split_by_label(survey.ids, there, tokenizer.decode):
        heads = int((survey.received(place.mask).nanmean(-1)[layers] > READS).sum())
        if heads >= SINK_HEADS:
            found.append(Attended(words_of(place), heads))
    return tuple(sorted(found, key=lambda one: -one.heads))


def largest_norm(survey: Survey, tokenizer: Any) -> Largest:
    """Return the largest norm over the typical one that was seen anywhere."""
    ratios = survey.ratios
    layer, text, position = map(int, torch.unravel_index(ratios.argmax(), ratios.shape))
    token = tokenizer.decode([int(survey.ids[text, position])])
    return Largest(float(ratios.max()), token, position, layer)


def other_bos(setup: Setup) -> OtherBos | None:
    """Step 7: heads and spikes with the other choice of BOS; None if there is no BOS token."""
    bos = resolve_bos(setup.tokenizer, setup.target.config, None) if setup.bos is None else None
    if setup.bos is None and bos is None:
        return None
    survey, spikes = survey_of(setup, bos), list[OtherSpike]()
    for one in find_spikes(survey, setup.tokenizer):
        spikes.append(OtherSpike(words_of(one.place), (one.first, one.last), one.ratio))
    token = setup.tokenizer.decode([bos if bos is not None else setup.bos])
    received = readers_of(survey, "the first token", at_first(survey))
    return OtherBos(bos is not None, token, received.heads, received.margin, tuple(spikes))
