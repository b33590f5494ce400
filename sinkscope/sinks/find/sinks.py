"""The places that heads attend to, how much they do, and what they need for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.find.layer_scan import ordinary_position
from sinkscope.sinks.find.places import Place, texts_with
from sinkscope.sinks.find.readers import HeadByHead
from sinkscope.sinks.find.records import RATE_EPS, SHORT, Readers, Sink
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.removal.position_effect import PositionEffect

READER_TEXTS = 2
READER_LENGTH = 48  # typical text in which components are replaced


def attention_sinks(setup: Setup, survey: Survey, made: Sequence[MadeSpike]) -> tuple[Sink, ...]:
    """The places that receive attention, and what the heads need; the last may be the learned sink logits.

    Args:
        setup: The model and its text.
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    sinks: list[Sink] = []
    for place in survey.sinks:
        sinks.append(_sink(setup, survey, made, place, received.readers(place.there(received.ids))))
    if received.learned_heads:
        sinks.append(_sink(setup, survey, made, None, received.learned_heads))
    return tuple(sinks)


def _sink(setup: Setup, survey: Survey, made: Sequence[MadeSpike], place: Place | None, heads: Heads) -> Sink:
    """A place, or the learned sink logits, with the heads that attend to it.

    The attention to several places of a text is their sum.
    """
    received = survey.received
    attention, rates = received.learned, (received.learned > RATE_EPS).float()
    spike, groups, window = None, (), None
    if place is not None:
        there = place.there(received.places.ids)
        texts = there.any(1)
        attention = received.given(there)[:, :, texts]
        rates = (received.above & there)[:, :, texts].sum(-1) / there[texts].sum(1)
        standing = [one for one in made if survey.stands_at(one.spike.place, place)]
        spike = made.index(standing[0]) if standing else None
        groups = _readers(setup, survey, place, heads, standing)
        windows = [received.windows[layer] for layer, _ in heads]
        window = None if None in windows else min(filter(None, windows))
    layer, head = torch.tensor(heads).T
    each, of_all = attention[layer, head], rates[received.attending].flatten(0, 1)
    layer_rates: list[float | None] = []
    for attends, of_layer in zip(received.attending.tolist(), rates, strict=True):
        layer_rates.append(float(of_layer.mean()) if attends else None)
    return Sink(
        place=place,
        rate=float(of_all.mean()),
        layer_rates=tuple(layer_rates),
        n_heads=len(of_all),
        readers=len(heads),
        attention=float(each.mean()),
        rate_margin=margin_of(of_all.mean(0).numpy()),
        attention_margin=margin_of(each.mean(0).numpy()),
        groups=groups,
        spike=spike,
        length=received.ids.shape[1],
        window=window,
    )


def _readers(
    setup: Setup, survey: Survey, place: Place, heads: Heads, standing: Sequence[MadeSpike]
) -> tuple[Readers, ...]:
    """The heads that attend to a place, by what they need, unless the search for neurons has shown it of all."""
    known = standing[0].found.minimal if len(standing) == 1 else None
    if known is not None and known.readers is not None and len(known.readers.heads) == len(heads):
        if len(known.neurons) == 1:  # of several, each head may need another one
            return (known.readers,)
    received = survey.received
    rows, at = texts_with(place.cases, received.ids)
    number = READER_TEXTS
    length = max(READER_LENGTH, int(at[:READER_TEXTS].max()) + READER_LENGTH // 3)
    if received.ids.shape[1] > SHORT:  # a sink of long texts shows in the whole text only
        number, length = 1, received.ids.shape[1]
    rows, at = rows[:number], at[:number]
    ids, there = received.ids[rows, :length], place.there(received.ids)[rows, :length]
    barred = there | (torch.arange(ids.shape[1]) <= at[:, None])
    source = ordinary_position(received.norms[max(heads)[0], rows, : ids.shape[1]], barred)
    effect = PositionEffect(setup.target, ids, at, source, heads=heads, places=there)
    neurons, makers = (), ()
    for one in standing:
        neurons += one.found.set or tuple(neuron.address for neuron in one.found.adding)
        makers += one.spike.makers
    return HeadByHead(setup, place.words, effect, neurons, makers).groups()
