"""What the steps of `find_sinks` share: where the sinks and the spikes are, and the model's layers at these places."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.results.parts import Parts
from sinkscope.sinks.find.attention_received import (
    AttentionReceived,
    attention_of_all,
    attention_received,
    long_texts,
)
from sinkscope.sinks.find.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.find.places import ENOUGH, MOST_TEXTS, Decode, LeftOver, Place, pieces, spike_places, texts_with
from sinkscope.sinks.find.records import SinkRate
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.removal.rows import Trial
from sinkscope.sinks.tokens import TokenRows


def ordinary_position(norms: Float[Tensor, "text pos"], barred: Bool[Tensor, "text pos"]) -> Int[Tensor, " text"]:
    """The position of each text that is not barred whose norm is nearest to the typical one of the text."""
    distance = (norms / norms[:, 1:].median(1, keepdim=True).values).log().abs()
    return distance.masked_fill(barred, torch.inf).argmin(1)


@dataclass(frozen=True, eq=False)
class SinkContext:
    """The model, texts with a place in each, and their layer scan. Every step after the scan reads it.

    Attributes:
        target: The model.
        ids: The texts.
        scan: The layers, as these texts show them at the place.
        seed: Seed of every random draw.
        beside: The first token of typical text. None: this is it.
    """

    target: Target
    ids: Int[Tensor, "row pos"]
    scan: LayerScan
    seed: int
    beside: SinkContext | None = None

    @cached_property
    def at(self) -> Int[Tensor, " row"]:
        """The place in each text."""
        return torch.as_tensor(self.scan.at).expand(len(self.ids))

    @property
    def typical(self) -> SinkContext:
        """The same model in typical text."""
        return self.beside or self

    @property
    def layer(self) -> int:
        """The sink layer of a model that has one."""
        assert self.scan.sink_layer is not None
        return self.scan.sink_layer

    @property
    def up_to_place(self) -> int:
        """The number of tokens up to the last of the places."""
        return int(self.at.max()) + 1

    def trial(
        self, edits: Sequence[Parts], length: int | None = None, texts: slice = slice(None), **reading: Any
    ) -> Trial:
        """Edits whose effects are read at the places, in some of the texts up to a length, or to the last place.

        If all texts are the same up to the same place, such as a BOS token, up to there one of them is enough.
        """
        if length is None:
            length = self.up_to_place
            begins = self.ids[:, :length]
            if bool((begins == begins[0]).all() & (self.at == self.at[0]).all()):
                texts = slice(1)
        return Trial(
            self.ids[texts, :length],
            edits,
            at=self.at[texts],
            without=self.scan.shared_dims,
            entering=self.scan.entering.part(texts, length),
            **reading,
        )

    @cached_property
    def directions(self) -> Float[Tensor, "layer d_model"]:
        """The direction of the spike after each layer: of the residual stream at the places, mean over texts."""
        size = len(self.scan.layers)
        spikes = torch.stack([self.scan.spike_after(layer) for layer in range(size)])
        return spikes / spikes.norm(dim=1, keepdim=True).clamp(min=1e-9)

    def ordinary(self, layer: int, length: int) -> Int[Tensor, " row"]:
        """The position of the beginning of each text whose norm after a layer is nearest to the typical one.

        The first eighth of this beginning is left out, and so is the place.
        """
        positions = torch.arange(length).expand(len(self.ids), -1)
        barred = (positions < length // 8) | (positions == self.at[:, None])
        return ordinary_position(self.scan.norms[layer][:, :length], barred)

    def elsewhere(self, ids: TokenRows, at: Int[Tensor, " row"], upto: int | None = None) -> SinkContext:
        """The same model at places of other texts, `at` in each; up to a layer, or as far as this was read."""
        if upto is None:
            upto = len(self.scan.layers) - 1
        scan = scan_layers(self.target, ids, whole=True, upto=upto, at=at)
        scan = replace(scan, beside=self.typical.scan)
        return SinkContext(self.target, ids, scan, self.seed, self.typical)


@dataclass(frozen=True, eq=False)
class Survey:
    """Where heads attend and where norms stand out; every measurement of sinks opens with it.

    Attributes:
        first: The first token of all typical texts.
        received: The texts in which attention sinks were looked for.
        sinks: The places that heads attend to, in pieces; empty if there is none, or only learned sink logits.
        other_sinks: Places that heads attend to and that belong to no piece.
        norms: The texts in which norm spikes were looked for.
        spikes: The places whose norm stands out, in pieces.
        other_spikes: Places whose norm stands out and that belong to no piece.
        lengths: Lengths of the texts that were read.
        rate: The sink rate of position 0. None if not all layers were read.
    """

    first: SinkContext
    received: AttentionReceived
    sinks: tuple[Place, ...]
    other_sinks: LeftOver
    norms: AttentionReceived
    spikes: tuple[Place, ...]
    other_spikes: LeftOver
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
        scan, received = _scanned(setup, whole)
        without = tuple(scan.shared_dims)
        rate, longer = None, None
        if whole:
            received, rate = attention_of_all(setup, without)
        norms, lengths, decode = received, (received.ids.shape[1],), setup.tokenizer.decode
        spikes, other_spikes = pieces(spike_places(norms.norms, norms.ids), decode)
        sinks, other_sinks = _sinks(received, spikes, decode)
        if len(scan.layers) == setup.target.n_layers and not sinks and not received.learned_heads:
            longer = long_texts(setup)  # they may show a sink that short ones do not
        if longer is not None:
            lengths = (*lengths, longer.shape[1])
            more = attention_received(setup.target, longer, without=without)
            in_longer = _sinks(more, (), decode)
            if in_longer[0] or more.learned_heads:
                received, (sinks, other_sinks) = more, in_longer
        first = SinkContext(setup.target, setup.ids, scan, setup.seed)
        return cls(first, received, sinks, other_sinks, norms, spikes, other_spikes, lengths, rate)

    def context(self, place: Place) -> SinkContext:
        """The model at a place of a spike."""
        if place.is_first and place.rule is not None and not place.rule.tokens:
            return self.first
        judged = self.received.places.ids.shape[1]  # behind that too few queries see a place to read its attention
        early = replace(place, cases=tuple(case for case in place.cases if case[1] < judged) or place.cases)
        rows, at = texts_with(early, self.norms.ids)
        return self.first.elsewhere(self.norms.ids[rows], at)

    def spiking(self, place: Place) -> Bool[Tensor, "text pos"]:
        """The positions of a spike in the texts in which sinks were looked for."""
        if self.norms is self.received:
            return place.there(self.received.ids)
        return place.means(self.received.ids)

    def readers(self, place: Place) -> Heads:
        """The heads that attend to a place of a spike."""
        attended = self.received.places.there
        return self.received.readers(attended & self.spiking(place)[:, : attended.shape[1]])

    def stands_at(self, spike: Place, place: Place) -> bool:
        """Whether a spike stands at nearly all of the places that heads attend to."""
        there = place.there(self.received.ids)
        return float(self.spiking(spike)[there].float().mean()) >= ENOUGH


def _sinks(received: AttentionReceived, spikes: Sequence[Place], decode: Decode) -> tuple[tuple[Place, ...], LeftOver]:
    """The places that heads attend to, those with most heads first; that of a spike in these texts is one place."""
    attended = received.places
    found: list[Place] = []
    for spike in spikes:
        there = spike.there(attended.ids)
        share = float(attended.there[there].float().mean()) if bool(there.any()) else 0.0
        if share >= MOST_TEXTS and received.readers(there & attended.there):
            found.append(Place.of(attended, there, spike.rule, decode))
            attended = attended.without(there)
    further, left = pieces(attended, decode, lambda there: bool(received.readers(there)))
    left = replace(left, share=left.count / max(1, len(received.places)))
    found = sorted([*found, *further], key=lambda place: -len(received.readers(place.there(attended.ids))))
    return tuple(found), left


def _scanned(setup: Setup, whole: bool) -> tuple[LayerScan, AttentionReceived]:
    """The layers of typical text and, unless all of them are read, its attention in the same pass."""
    target = setup.target
    received = AttentionReceived.unread(target, setup.ids, target.n_layers)
    listening = nullcontext()
    if not whole:
        listening = received.listening(target, slice(None))
    with listening:
        scan = scan_layers(target, setup.ids, whole=whole, progress=setup.progress)
    depth = len(scan.layers)
    received.norms[:depth] = scan.norms
    received.attending[depth:] = False
    return scan, received
