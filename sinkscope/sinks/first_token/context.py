"""What the steps of `find_sinks` share: where the sinks and the spikes are, and the model's layers at these places."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.attention_received import (
    AttentionReading,
    AttentionReceived,
    attention_of_all,
    attention_received,
    with_long_texts,
)
from sinkscope.sinks.first_token.entering import NOT_READ, Entering
from sinkscope.sinks.first_token.layer_scan import KEPT_POSITIONS, LayerScan, scan_far_enough, scan_layers
from sinkscope.sinks.first_token.places import LEAST_CASES, Description, Places, Rule, describe, spike_places
from sinkscope.sinks.first_token.records import SinkRate
from sinkscope.sinks.tokens import TokenRows

PLACE_TEXTS = (
    4  # texts in which a place is looked at that always has the same token; of different tokens four times as many
)


@dataclass(frozen=True, eq=False)
class SinkContext:
    """The model, texts with a place in each, and their layer scan. Every step after the scan reads it.

    Attributes:
        target: The model.
        ids: The texts.
        scan: The layers, as these texts show them at the place.
        generator: Source of all random draws.
        at: The place in each text.
        entering: What entered each layer when `ids` were read.
        typical_ids: Typical text.
        typical_entering: What entered each layer when this was read.
    """

    target: Target
    ids: Int[Tensor, "row pos"]
    scan: LayerScan
    generator: torch.Generator
    at: Int[Tensor, " row"]
    entering: Entering = NOT_READ
    typical_ids: Int[Tensor, "text length"] = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.long))
    typical_entering: Entering = NOT_READ

    @classmethod
    def at_first(cls, target: Target, ids: TokenRows, scan: LayerScan, seed: int = 0) -> SinkContext:
        """The first token of typical text."""
        generator = torch.Generator().manual_seed(seed)
        at = torch.zeros(len(ids), dtype=torch.long)
        return cls(target, ids, scan, generator, at, scan.entering, ids, scan.entering)

    @property
    def sink_layer(self) -> int | None:
        """The layer that builds most of the spike. None if no MLP makes one."""
        return self.scan.sink_layer

    @property
    def layer(self) -> int:
        """The sink layer of a model that has one."""
        assert self.sink_layer is not None
        return self.sink_layer

    @property
    def up_to_place(self) -> int:
        """The number of tokens up to the last of the places."""
        return int(self.at.max()) + 1

    def elsewhere(self, ids: TokenRows, at: Int[Tensor, " row"], depth: int) -> SinkContext:
        """The same model at places of other texts.

        Args:
            ids: The texts.
            at: The place in each.
            depth: Number of layers to read.
        """
        scan = scan_layers(self.target, ids, whole=True, upto=depth - 1, at=at)
        scan = replace(scan, beside=self.scan.beside or self.scan)
        return replace(self, ids=ids, scan=scan, at=at, entering=scan.entering)


@dataclass(frozen=True, eq=False)
class Survey:
    """Where the attention sink and the norm spike of a model are.

    Attributes:
        first: The first token of all typical texts.
        received: The texts in which attention sinks were looked for.
        sink: Words for the attention sink. None if there is none, or only learned sink logits.
        norms: The texts in which norm spikes were looked for.
        spike: Words for the norm spike. None if there is none.
        lengths: Lengths of the texts that were read.
        rate: The sink rate of position 0. None if not all layers were read.
    """

    first: SinkContext
    received: AttentionReceived
    sink: Description | None
    norms: AttentionReceived
    spike: Description | None
    lengths: tuple[int, ...]
    rate: SinkRate | None = None

    @classmethod
    def of(cls, setup: Setup, *, whole: bool | None = None) -> Survey:
        """Read typical text and find the places; a survey is made once for a setup.

        Args:
            setup: The model and its text.
            whole: Read every layer. None: if the model is in memory.
        """
        if whole is None:
            whole = setup.target.resident
        key = (Survey, whole, setup.seed, len(setup.ids))
        if key not in setup.memory:
            setup.memory[key] = cls._made(setup, whole)
        return setup.memory[key]

    @classmethod
    def _made(cls, setup: Setup, whole: bool) -> Survey:
        reading = None
        all_loaded = len(setup.target.layers) == setup.target.n_layers
        if not whole and all_loaded:  # the layers are read from disk, and in one pass
            reading = AttentionReading(setup.target, setup.ids)
            with reading.listening(slice(None), setup.target.n_layers):
                scan = scan_far_enough(setup, setup.ids, whole=False)
        else:
            scan = scan_far_enough(setup, setup.ids, whole=whole)
        first = SinkContext.at_first(setup.target, setup.ids, scan, setup.seed)
        without = tuple(scan.shared_dims)
        depth = len(scan.layers)
        rate = None
        if whole:
            received, rate = attention_of_all(setup, without)
        elif reading is not None:
            received = replace(reading.received(depth), norms=scan.norms)
        else:
            received = attention_received(setup.target, setup.ids, layers=depth, without=without)
        decode = setup.tokenizer.decode
        sink = received.described(decode)
        spike = described_spike(received, setup)
        survey = cls(first, received, sink, received, spike, (received.ids.shape[1],), rate)
        if depth == setup.target.n_layers and sink is None and not received.learned_heads:
            return survey.in_longer_texts(setup, without)
        return survey

    def in_longer_texts(self, setup: Setup, without: tuple[int, ...]) -> Survey:
        """What is found in longer texts, where shorter ones do not show a sink."""
        longer = with_long_texts(setup)
        if longer is None:
            return self
        received = attention_received(longer.target, longer.ids, without=without)
        lengths = (*self.lengths, longer.ids.shape[1])
        survey = replace(self, lengths=lengths)
        sink = received.described(setup.tokenizer.decode)
        if sink is not None or received.learned_heads:
            survey = replace(survey, received=received, sink=sink)
        if self.spike is None:
            spike = described_spike(received, setup)
            if spike is not None:
                survey = replace(survey, norms=received, spike=spike)
        return survey

    @cached_property
    def spikes(self) -> Places:
        """The positions whose norm stands out."""
        return spike_places(self.norms.norms, self.norms.ids)

    def context(self, rule: Rule) -> SinkContext:
        """The model at the places of the spike that words mean."""
        if rule.position == 0 and not rule.tokens:
            return self.first
        ids, at = texts_with(rule, self.spikes.there, self.norms.ids)
        return self.first.elsewhere(ids, at, len(self.first.scan.layers))

    @property
    def first_spike(self) -> SinkContext:
        """The model at the first token, in the texts in which its norm stands out if only some have that."""
        if self.spike is not None and self.spike.is_first:
            return self.context(self.spike.rules[0])
        return self.first


def described_spike(received: AttentionReceived, setup: Setup) -> Description | None:
    """Words for the positions whose norm stands out."""
    return describe(spike_places(received.norms, received.ids), setup.tokenizer.decode)


def texts_with(
    rule: Rule, there: Bool[Tensor, "text at"], ids: Int[Tensor, "text pos"]
) -> tuple[TokenRows, Int[Tensor, " row"]]:
    """Some texts with a place that words mean, and the place in each; those in which it comes first.

    Args:
        rule: The words.
        there: Where such places are.
        ids: The texts.
    """
    meant = rule.means(ids)
    meant[:, : there.shape[1]] &= there
    meant[:, there.shape[1] :] = False
    rows = meant.any(1).nonzero().flatten()
    at = meant[rows].int().argmax(1)
    order = at.argsort(stable=True)
    rows, at = rows[order], at[order]
    number = PLACE_TEXTS
    if len(ids[rows, at].unique()) >= LEAST_CASES:
        number = min(4 * PLACE_TEXTS, max(PLACE_TEXTS, KEPT_POSITIONS // ids.shape[1]))
    return ids[rows[:number]], at[:number]
