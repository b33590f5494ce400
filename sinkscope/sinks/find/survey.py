"""Where the sinks and the spikes are, and the model's layers at these places: what every measurement opens with."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from sinkscope.measure import Setup
from sinkscope.sinks.find.attention_received import AttentionReceived, attention_of_all
from sinkscope.sinks.find.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.find.places import MOST_TEXTS, Decode, Place, pieces, spike_places, texts_with
from sinkscope.sinks.find.records import SinkRate


@dataclass(frozen=True, eq=False)
class Survey:
    """Where heads attend and where norms stand out; every measurement of sinks opens with it.

    Attributes:
        first: The first token of all typical texts.
        received: The texts in which attention sinks and norm spikes were looked for.
        sinks: The places that heads attend to, in pieces; empty if there is none, or only learned sink logits.
        other_sinks: What heads attend to beside them, too little to be a piece.
        spikes: The places whose norm stands out, in pieces.
        other_spikes: What stands out beside them, too little to be a piece.
        rate: The sink rate of position 0. None if not all layers were read.
    """

    first: LayerScan
    received: AttentionReceived
    sinks: tuple[Place, ...]
    other_sinks: Place | None
    spikes: tuple[Place, ...]
    other_spikes: Place | None
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
        target, decode, rate = setup.target, setup.tokenizer.decode, None
        received, listening = AttentionReceived.unread(target, setup.ids), nullcontext()
        if not whole:  # attention is read in the same pass
            listening = received.listening(target, slice(None))
        with listening:
            scan = scan_layers(target, setup.ids, whole=whole, progress=setup.progress)
        if whole:
            received, rate = attention_of_all(setup, scan.shared_dims)
        else:
            received.norms[: len(scan.layers)] = scan.norms
            received.attending[len(scan.layers) :] = False
        spikes, other_spikes = pieces(received.ids, spike_places(received.norms), decode)
        sinks, other_sinks = _sinks(received, spikes, decode)
        return cls(scan, received, sinks, other_sinks, spikes, other_spikes, rate)

    def scan(self, place: Place) -> LayerScan:
        """The model at a place of a spike."""
        if place.rule is not None and place.rule.position == 0:
            return self.first
        rows, at = texts_with(place.cases, self.received.ids)
        return self.first.elsewhere(self.received.ids[rows], at)


def _sinks(
    received: AttentionReceived, spikes: Sequence[Place], decode: Decode
) -> tuple[tuple[Place, ...], Place | None]:
    """The places that heads attend to, those with most heads first, and what is left; that of a spike is one place."""
    ids, attended = received.judged, received.places
    found: list[Place] = []
    for spike in spikes:
        there = spike.there(ids)
        both = there & attended
        if int(both.sum()) >= MOST_TEXTS * int(there.sum()) and received.readers(both):
            found.append(Place.of(ids, attended, both, spike.rule, decode))
            attended = attended & ~both
    further, left = pieces(ids, attended, decode, lambda there: bool(received.readers(there)))
    found = sorted([*found, *further], key=lambda place: -len(received.readers(place.there(ids))))
    return tuple(found), left
