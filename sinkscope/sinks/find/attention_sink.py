"""Who attends to the sink, how much, and what carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.find.attention_received import AttentionReceived
from sinkscope.sinks.find.carriers import Carried, carriers
from sinkscope.sinks.find.context import Survey
from sinkscope.sinks.find.members import RATE_EPS
from sinkscope.sinks.find.places import ENOUGH, Rule, texts_with
from sinkscope.sinks.find.records import SHORT, AttentionSink, LayerAttention, SinkPosition
from sinkscope.sinks.find.spikes import MadeSpike
from sinkscope.sinks.removal.components import Heads

CARRIER_TEXTS = 2
CARRIER_LENGTH = 48  # typical text in which components are replaced
LEARNED = "learned logits"


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


def _attention(received: AttentionReceived, rule: Rule | None, heads: Heads) -> list[LayerAttention]:
    """The attention of all layers together, and of each, to places, or to learned sink logits.

    That to places is the mean over those of each text that has one.
    """
    attention, rates = received.learned, (received.learned > RATE_EPS).float()
    if rule is not None:
        there = received.places.of(rule).there
        texts = there.any(1)
        attention, rates = (
            reduce(values[:, :, texts] * there[texts], "layer head text at -> layer head text", "sum")
            / there[texts].sum(1)
            for values in (received.received, received.above.float())
        )
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


def attention_sink(survey: Survey, made: Sequence[MadeSpike]) -> AttentionSink | None:
    """The positions that receive attention, and what carries it; None if no position does.

    Args:
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    rule = None
    heads = received.learned_heads
    if survey.sink is not None:
        rule = survey.sink.rules[0]
        heads = received.readers(rule)
    elif not heads:
        return None
    everywhere, *layers = _attention(received, rule, heads)
    sink = AttentionSink(
        rate=received.learned_rate,
        eps=RATE_EPS,
        place=survey.sink,
        positions=(),
        layers_read=len(layers),
        carried_by=LEARNED,
        layers=tuple(layers),
        length=received.ids.shape[1],
        learned_rate=received.learned_rate,
    )
    if survey.sink is None or rule is None:
        return sink
    positions = []
    for each in survey.sink.rules:
        places = received.places.of(each)
        rate = float(received.above[received.attending][:, :, places.there].float().mean())
        positions.append(SinkPosition(places.earliest, each.token, rate, each.words))
    windows = [received.windows[layer] for layer, _ in heads]
    carried = _carried(survey, rule, heads, made)
    return replace(
        sink,
        rate=positions[0].rate,
        positions=tuple(positions),
        carried_by=carried.main,
        reads=carried.reads,
        mark=carried.mark,
        window=min(filter(None, windows), default=None),
        attention=everywhere.attention,
        rate_margin=everywhere.rate_margin,
        attention_margin=everywhere.attention_margin,
    )


def _carried(survey: Survey, rule: Rule, heads: Heads, made: Sequence[MadeSpike]) -> Carried:
    """What the heads need: the spike at the sink, if they lose the sink without it, or else some of the components.

    A spike is there if its words mean nearly all of the places.
    """
    received = survey.received
    places = received.places.of(rule)
    makers: set[str] = set()
    for each in made:
        if places.share(each.rule) < ENOUGH:
            continue
        makers.update(each.spike.makers)
        minimal = each.sets.minimal
        if minimal is not None and minimal.heads_lost is not None:
            behind = [layer for layer, _ in heads if layer > minimal.sites[0].layer]
            if minimal.heads_lost * len(behind) / len(heads) >= NEEDED:
                return Carried("spike")
    ids, at = texts_with(rule, received.places, received.ids)
    number = CARRIER_TEXTS
    length = max(CARRIER_LENGTH, int(at[:CARRIER_TEXTS].max()) + CARRIER_LENGTH // 3)
    if ids.shape[1] > SHORT:  # a sink of long texts shows in the whole text only
        number, length = 1, ids.shape[1]
    return carriers(survey.first.target, ids[:number, :length], heads, at[:number], makers)
