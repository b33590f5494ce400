"""The circuit as a page shows it: of each spike where it is, what marks the place and writes it, and who reads it."""

from __future__ import annotations

from collections.abc import Sequence

from sinkscope.app.view.model_sink import ModelSink
from sinkscope.app.view.result import CircuitPart, CircuitSpike, Remaining
from sinkscope.sinks.spikes import sentences
from sinkscope.sinks.spikes.records import Needed, PartShare, SpikeResult
from sinkscope.sinks.spikes.texts import SpikeTexts

SHOWN = 0.05  # share from which what a component writes beside its named neurons is shown
ELSE = "everything else"


def column_of(sink: ModelSink) -> tuple[CircuitSpike, ...]:
    """Return the spikes of the circuit, those that most heads read first."""
    column: list[CircuitSpike] = []
    for spike, measured in zip(sink.circuit.spikes, sink.sinks.spikes, strict=True):
        needed = spike.needed
        attention = SpikeTexts.of(measured.survey, measured.spike).attention.mean(-1)
        one = CircuitSpike(
            place=spike.place.words,
            layers=spike.layers,
            peak=spike.peak,
            norm=spike.norm,
            before=spike.before,
            ratio=spike.ratio,
            dims=spike.dims,
            marks=tuple(CircuitPart(_words(mark.names), left=mark.left, others=mark.others) for mark in spike.marks),
            writers=(*shown_neurons(spike), *shown_components(spike)),
            erasers=tuple(CircuitPart(sentences.component(part.part), part.share) for part in spike.erasers),
            heads=spike.heads,
            first_reader=measured.spike.reading_layers.start,
            attention=tuple(tuple(round(share, 5) for share in layer) for layer in attention.tolist()),
            needed=None if needed is None else Remaining(needed.parts, needed.left, needed.heads[1], needed.perplexity),
            random=random_remaining(needed),
            sentence="" if needed is None else sentences.without(spike, needed),
        )
        column.append(one)
    return tuple(column)


def shown_neurons(spike: SpikeResult) -> tuple[CircuitPart, ...]:
    """Return the neurons that a sentence names or the spike needs: their shares, and what remains without each."""
    needed = () if spike.needed is None else tuple(map(str, spike.needed.neurons))
    left = {str(one.address): one.left for one in spike.alone}
    shares: dict[str, float | None] = {str(one.address): one.share for one in sentences.named(spike)}
    for name in needed:
        shares.setdefault(name, None)
    return tuple(CircuitPart(name, share, left.get(name), needed=name in needed) for name, share in shares.items())


def shown_components(spike: SpikeResult) -> tuple[CircuitPart, ...]:
    """Return what each component writes beside its named neurons, if it is much, and what all others write together."""
    named = {str(one.address): one.share for one in sentences.named(spike)}
    needed = () if spike.needed is None or spike.needed.neurons else spike.needed.parts
    parts: list[CircuitPart] = []
    for one in spike.writers:
        rest = one.share - _named_in(spike, one, named)
        if abs(rest) >= SHOWN or one.part in needed:
            name = sentences.component(one.part)
            words = name if rest == one.share else f"the rest of {name}"
            parts.append(CircuitPart(words, rest, needed=one.part in needed))
    shown = sum(named.values()) + sum(part.share or 0.0 for part in parts)
    return (*parts, CircuitPart(ELSE, 1 - shown))


def _named_in(spike: SpikeResult, component: PartShare, named: dict[str, float]) -> float:
    """What the named neurons of a component write."""
    total = 0.0
    for one in spike.neurons:
        if component.part == f"mlp {one.layer}":
            total += named.get(str(one.address), 0.0)
    return total


def random_remaining(needed: Needed | None) -> Remaining | None:
    """Return what remains without random parts, the control of the needed ones."""
    if needed is None or needed.random is None:
        return None
    return Remaining((), needed.random.left, needed.random.heads, needed.random.perplexity)


def _words(names: Sequence[str]) -> str:
    """Parts that are judged as one, in a few words."""
    return " and ".join(map(sentences.component, names))
