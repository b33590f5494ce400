"""The places that heads attend to, how much they do, and what they need for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.find.attention_received import AttentionReceived
from sinkscope.sinks.find.places import Place, texts_with
from sinkscope.sinks.find.readers import HeadByHead
from sinkscope.sinks.find.records import RATE_EPS, SHORT, LayerAttention, Readers, Sink
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.find.survey import Survey, ordinary_position
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.removal.position_effect import PositionEffect

READER_TEXTS = 2
READER_LENGTH = 48  # typical text in which components are replaced


def _of_heads(
    received: Float[Tensor, "head case"], rates: Float[Tensor, "head case"], readers: Bool[Tensor, " head"]
) -> LayerAttention:
    """The attention of some heads: of those that attend in most cases, and the share of all that attend."""
    attention = None
    margin = None
    if bool(readers.any()):
        attention = float(received[readers].mean())
        margin = margin_of(received[readers].mean(0).numpy())
    return LayerAttention(
        rate=float(rates.mean()),
        readers=int(readers.sum()),
        attention=attention,
        rate_margin=margin_of(rates.mean(0).numpy()),
        attention_margin=margin,
    )


def _attention(received: AttentionReceived, place: Place | None, heads: Heads) -> list[LayerAttention]:
    """The attention of all layers together, and of each, to places, or to learned sink logits.

    That to places is the sum over those of each text that has one.
    """
    attention, rates = received.learned, (received.learned > RATE_EPS).float()
    if place is not None:
        there = place.there(received.places.ids)
        texts = there.any(1)
        attention = received.given(there)[:, :, texts]
        rates = reduce(received.above[:, :, texts] & there[texts], "layer head text at -> layer head text", "sum")
        rates = rates / there[texts].sum(1)
    readers = torch.zeros(rates.shape[:2], dtype=torch.bool)
    for layer, head in heads:
        readers[layer, head] = True
    layers = []
    each = torch.eye(len(readers), dtype=torch.bool)
    for some in (received.attending, *each):
        of_heads = LayerAttention(None)
        if bool(received.attending[some].all()):
            of_heads = _of_heads(attention[some].flatten(0, 1), rates[some].flatten(0, 1), readers[some].flatten())
        layers.append(of_heads)
    return layers


def attention_sinks(setup: Setup, survey: Survey, made: Sequence[MadeSpike]) -> tuple[Sink, ...]:
    """The places that receive attention, and what the heads need; the last may be the learned sink logits.

    Args:
        setup: The model and its text.
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    sinks: list[Sink] = []
    attending: list[tuple[Place | None, Heads]] = []
    for place in survey.sinks:
        attending.append((place, received.readers(place.there(received.ids))))
    if received.learned_heads:
        attending.append((None, received.learned_heads))
    for place, heads in attending:
        everywhere, *layers = _attention(received, place, heads)
        spike, groups, window = None, (), None
        given = received.learned if place is None else received.given(place.there(received.places.ids))
        each = [float(given[layer, head].mean()) for layer, head in heads]
        if place is not None:
            standing = [one for one in made if survey.stands_at(one.spike.place, place)]
            spike = made.index(standing[0]) if standing else None
            groups = _readers(setup, survey, place, heads, standing)
            windows = [received.windows[layer] for layer, _ in heads]
            window = None if None in windows else min(filter(None, windows))
        sinks.append(
            Sink(
                place=place,
                everywhere=everywhere,
                layers=tuple(layers),
                n_heads=int(received.attending.sum()) * setup.target.n_heads,
                groups=groups,
                spike=spike,
                length=received.ids.shape[1],
                between=(min(each), max(each)),
                window=window,
            )
        )
    return tuple(sinks)


def _readers(
    setup: Setup, survey: Survey, place: Place, heads: Heads, standing: Sequence[MadeSpike]
) -> tuple[Readers, ...]:
    """The heads that attend to a place, by what they need, unless the search for neurons has shown it of all."""
    known = standing[0].found.minimal if len(standing) == 1 else None
    if known is not None and known.readers is not None and len(known.readers.heads) == len(heads):
        return (known.readers,)
    received = survey.received
    rows, at = texts_with(place, received.ids)
    number = READER_TEXTS
    length = max(READER_LENGTH, int(at[:READER_TEXTS].max()) + READER_LENGTH // 3)
    if received.ids.shape[1] > SHORT:  # a sink of long texts shows in the whole text only
        number, length = 1, received.ids.shape[1]
    rows, at = rows[:number], at[:number]
    ids, there = received.ids[rows, :length], place.there(received.ids)[rows, :length]
    barred = there | (torch.arange(ids.shape[1]) <= at[:, None])
    source = ordinary_position(received.norms[max(heads)[0], rows, : ids.shape[1]], barred)
    effect = PositionEffect(setup.target, ids, at, source, heads=heads, places=there)
    sites, further, makers = (), (), ()
    for one in standing:
        sites += one.found.sites
        further += tuple(neuron.site for neuron in one.found.adding)
        makers += one.spike.makers
    return HeadByHead(setup, place.words, effect, sites, further, makers).groups()
