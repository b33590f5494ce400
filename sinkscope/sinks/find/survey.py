"""Where the sinks and the spikes are, and the model's layers at these places: what every measurement opens with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from sinkscope.measure import Setup
from sinkscope.sinks.find.attention_received import (
    AttentionReceived,
    attention_of_all,
    attention_received,
    long_texts,
)
from sinkscope.sinks.find.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.find.places import ENOUGH, MOST_TEXTS, Decode, Place, pieces, spike_places, texts_with
from sinkscope.sinks.find.records import SinkRate
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.tokens import Mask


@dataclass(frozen=True, eq=False)
class Survey:
    """Where heads attend and where norms stand out; every measurement of sinks opens with it.

    Attributes:
        first: The first token of all typical texts.
        received: The texts in which attention sinks were looked for.
        sinks: The places that heads attend to, in pieces; empty if there is none, or only learned sink logits.
        other_sinks: How many places heads attend to that belong to no piece.
        norms: The texts in which norm spikes were looked for.
        spikes: The places whose norm stands out, in pieces.
        other_spikes: How many places with a norm that stands out belong to no piece.
        rate: The sink rate of position 0. None if not all layers were read.
    """

    first: LayerScan
    received: AttentionReceived
    sinks: tuple[Place, ...]
    other_sinks: int
    norms: AttentionReceived
    spikes: tuple[Place, ...]
    other_spikes: int
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
        return setup.once((Survey, whole, setup.seed, len(setup.ids)), lambda: cls._made(setup, whole))

    @classmethod
    def _made(cls, setup: Setup, whole: bool) -> Survey:
        scan, received = _scanned(setup, whole)
        without, rate, longer = scan.shared_dims, None, None
        if whole:
            received, rate = attention_of_all(setup, without)
        norms, decode = received, setup.tokenizer.decode
        spikes, other_spikes = pieces(norms.ids, spike_places(norms.norms), decode)
        sinks, other_sinks = _sinks(received, spikes, decode)
        if len(scan.layers) == setup.target.n_layers and not sinks and not received.learned_heads:
            longer = long_texts(setup)  # they may show a sink that short ones do not
        if longer is not None:
            more = attention_received(setup.target, longer, without=without)
            in_longer = _sinks(more, (), decode)
            if in_longer[0] or more.learned_heads:
                received, (sinks, other_sinks) = more, in_longer
        return cls(scan, received, sinks, other_sinks, norms, spikes, other_spikes, rate)

    def scan(self, place: Place) -> LayerScan:
        """The model at a place of a spike."""
        if place.is_first and place.rule is not None and not place.rule.tokens:
            return self.first
        judged = self.received.judged.shape[1]  # behind that too few queries see a place to read its attention
        early = tuple(case for case in place.cases if case[1] < judged)
        rows, at = texts_with(early or place.cases, self.norms.ids)
        return self.first.elsewhere(self.norms.ids[rows], at)

    def spiking(self, place: Place) -> Mask:
        """The positions of a spike in the texts in which sinks were looked for."""
        if self.norms is self.received:
            return place.there(self.received.ids)
        return place.means(self.received.ids)

    def readers(self, place: Place) -> Heads:
        """The heads that attend to a place of a spike."""
        attended = self.received.places
        return self.received.readers(attended & self.spiking(place)[:, : attended.shape[1]])

    def stands_at(self, spike: Place, place: Place) -> bool:
        """Whether a spike stands at nearly all of the places that heads attend to."""
        there = place.there(self.received.ids)
        return float(self.spiking(spike)[there].float().mean()) >= ENOUGH


def _sinks(received: AttentionReceived, spikes: Sequence[Place], decode: Decode) -> tuple[tuple[Place, ...], int]:
    """The places that heads attend to, those with most heads first; that of a spike in these texts is one place."""
    ids, attended = received.judged, received.places
    found: list[Place] = []
    for spike in spikes:
        there = spike.there(ids)
        share = float(attended[there].float().mean()) if bool(there.any()) else 0.0
        if share >= MOST_TEXTS and received.readers(there & attended):
            found.append(Place.of(ids, attended, there, spike.rule, decode))
            attended = attended & ~there
    further, left = pieces(ids, attended, decode, lambda there: bool(received.readers(there)))
    found = sorted([*found, *further], key=lambda place: -len(received.readers(place.there(ids))))
    return tuple(found), left


def _scanned(setup: Setup, whole: bool) -> tuple[LayerScan, AttentionReceived]:
    """The layers of typical text and, unless all of them are read, its attention in the same pass."""
    target = setup.target
    received = AttentionReceived.unread(target, setup.ids)
    listening = nullcontext()
    if not whole:
        listening = received.listening(target, slice(None))
    with listening:
        scan = scan_layers(target, setup.ids, whole=whole, progress=setup.progress)
    depth = len(scan.layers)
    received.norms[:depth] = scan.norms
    received.attending[depth:] = False
    return scan, received
