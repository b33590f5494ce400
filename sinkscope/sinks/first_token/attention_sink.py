"""Who attends to the sink, how much, and what carries it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from einops import reduce
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure.evidence import NEEDED
from sinkscope.measure.margin import margin_of
from sinkscope.sinks.first_token.attention_received import AttentionReceived
from sinkscope.sinks.first_token.carriers import Carried, carriers
from sinkscope.sinks.first_token.context import Survey, texts_with
from sinkscope.sinks.first_token.members import RATE_EPS, CausalSet, Heads
from sinkscope.sinks.first_token.places import ENOUGH, Places, Rule
from sinkscope.sinks.first_token.records import (
    SHORT,
    AttentionSink,
    LayerAttention,
    NormSpike,
    PlacedSpike,
    SinkPosition,
)

CARRIER_TEXTS = 2
CARRIER_LENGTH = 48  # typical text in which components are replaced


@dataclass(frozen=True)
class MadeSpike:
    """What makes the spike of one kind of place.

    Attributes:
        rule: The places.
        makers: Components, named as carriers are.
        set: Neurons that make it. None if no set that was tried does.
        fallen: Components that take it away again: without them, it hides what heads read.
    """

    rule: Rule
    makers: tuple[str, ...]
    set: CausalSet | None
    fallen: tuple[str, ...] = ()


def made_spikes(
    spike: NormSpike | None, minimal: CausalSet | None, further: Sequence[tuple[Rule, PlacedSpike]]
) -> list[MadeSpike]:
    """What makes the spike of every kind of place, the first kind first."""
    if spike is None:
        return []
    made = [MadeSpike(spike.place.rules[0], spike.makers, minimal, spike.fallen)]
    made += [MadeSpike(rule, (each.made_by or "",), each.set) for rule, each in further]
    return made


def attention_sink(survey: Survey, made: Sequence[MadeSpike]) -> AttentionSink | None:
    """The positions that receive attention, and what carries it; None if no position does.

    Args:
        survey: Where the sinks are.
        made: What makes the spikes.
    """
    received = survey.received
    length = received.ids.shape[1]
    if survey.sink is None:
        if not received.learned_heads:
            return None
        layers = tuple(LayerAttention(rate) for rate in received.learned_rates)
        rate = received.learned_rate
        return AttentionSink(rate, RATE_EPS, None, (), len(layers), "learned logits", layers, length=length)
    rule = survey.sink.rules[0]
    heads = received.readers(rule)
    spikes = [one for one in made if _is_at(received.places, rule, one.rule)]
    carried = Carried()
    if any(_spike_carries(heads, one.set) for one in spikes):
        carrier = "spike"
    else:
        fallen = {name for each in spikes for name in each.fallen}
        makers = {name for each in spikes for name in each.makers} - fallen
        carried = _tried(survey, rule, makers)
        carrier = carried.main
    positions = []
    for each in survey.sink.rules:
        position = int(received.places.of(each).there.any(0).int().argmax())
        positions.append(SinkPosition(position, each.token, received.rate_of(each), each.words))
    attention = AttentionOfReaders(received, rule)
    return AttentionSink(
        rate=received.rate_of(rule),
        eps=RATE_EPS,
        place=survey.sink,
        positions=tuple(positions),
        layers_read=len(received.above),
        carried_by=carrier,
        layers=tuple(attention.layer(layer) for layer in range(len(received.above))),
        carriers=carried.tried,
        reads=carried.reads,
        mark=carried.mark,
        length=length,
        window=received.window(heads),
        learned_rate=received.learned_rate if received.learned_heads else 0.0,
        attention=attention.mean(attention.readers),
        rate_margin=attention.rate_margin(received.attending),
        attention_margin=attention.margin(attention.readers),
    )


@dataclass(frozen=True, eq=False)
class AttentionOfReaders:
    """How much attention one kind of place receives, and from how many heads."""

    received: AttentionReceived
    rule: Rule

    @property
    def readers(self) -> Bool[Tensor, "layer head"]:
        """The heads that attend in most cases."""
        readers = torch.zeros(self.received.above.shape[:2], dtype=torch.bool)
        for layer, head in self.received.readers(self.rule):
            readers[layer, head] = True
        return readers

    def by_text(self, values: Float[Tensor, "layer head text at"]) -> Float[Tensor, "layer head case"]:
        """Mean over the places of each text that has one."""
        where = self.received.places.of(self.rule).there
        texts = where.any(1)
        total = reduce(values[:, :, texts] * where[texts], "layer head text at -> layer head text", "sum")
        return total / where[texts].sum(1)

    def mean(self, heads: Bool[Tensor, "layer head"]) -> float | None:
        """Mean attention of some heads; None if there are none."""
        if not bool(heads.any()):
            return None
        return float(self.by_text(self.received.received)[heads].mean())

    def margin(self, heads: Bool[Tensor, "layer head"]) -> float | None:
        """Two standard errors of this mean over texts."""
        if not bool(heads.any()):
            return None
        return margin_of(self.by_text(self.received.received)[heads].mean(0).numpy())

    def rate_margin(self, layers: Any) -> float | None:
        """Two standard errors of the share of heads that attend, over texts."""
        return margin_of(self.by_text(self.received.above.float())[layers].flatten(0, -2).mean(0).numpy())

    def layer(self, layer: int) -> LayerAttention:
        """The attention of one layer."""
        if not bool(self.received.attending[layer]):
            return LayerAttention(None)
        here = torch.zeros_like(self.readers)
        here[layer] = self.readers[layer]
        return LayerAttention(
            rate=float(self.by_text(self.received.above.float())[layer].mean()),
            readers=int(here.sum()),
            attention=self.mean(here),
            rate_margin=self.rate_margin(layer),
            attention_margin=self.margin(here),
        )


def _is_at(places: Places, rule: Rule, other: Rule) -> bool:
    """Whether other words mean nearly all of the places that words mean."""
    mine = places.of(rule).there
    return bool(float(other.means(places.ids)[mine].float().mean()) >= ENOUGH)


def _spike_carries(heads: Heads, minimal: CausalSet | None) -> bool:
    """Whether at least half of the heads that attend to the sink lose it without the spike."""
    if minimal is None or minimal.heads_lost is None:
        return False
    behind = [layer for layer, _ in heads if layer > minimal.sites[0].layer]
    return minimal.heads_lost * len(behind) / len(heads) >= NEEDED


def _tried(survey: Survey, rule: Rule, makers: set[str]) -> Carried:
    """What the heads need of the components at the sink."""
    received = survey.received
    ids, at = texts_with(rule, received.places.there, received.ids)
    number = CARRIER_TEXTS
    length = max(CARRIER_LENGTH, int(at[:CARRIER_TEXTS].max()) + CARRIER_LENGTH // 3)
    if ids.shape[1] > SHORT:  # a sink of long texts shows in the whole text only
        number, length = 1, ids.shape[1]
    return carriers(survey.first.target, ids[:number, :length], received.readers(rule), at[:number], makers)
