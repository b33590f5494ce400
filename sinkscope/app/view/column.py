"""The circuit as a page shows it: of each spike where it is, what marks the place and writes it, and who reads it."""

from __future__ import annotations

from sinkscope.app.view.model_sink import ModelSink
from sinkscope.app.view.result import CircuitPart, CircuitSpike
from sinkscope.sinks.spikes import sentences
from sinkscope.sinks.spikes.needs import reading_heads
from sinkscope.sinks.spikes.records import SpikeResult


def column_of(sink: ModelSink) -> tuple[CircuitSpike, ...]:
    """Return the spikes of the circuit, those that most heads read first."""
    column: list[CircuitSpike] = []
    for spike, measured in zip(sink.circuit.spikes, sink.sinks.spikes, strict=True):
        reading = reading_heads(measured.survey, measured.spike)
        marks = [CircuitPart(_words(mark.part), left=mark.left) for mark in spike.marks]
        one = CircuitSpike(
            place=spike.place.words,
            layers=spike.layers,
            peak=spike.peak,
            ratio=spike.ratio,
            marks=tuple(marks),
            writers=writers_of(spike),
            readers=tuple(CircuitPart(str(head), share=share) for head, share in reading.items()),
            sentence="" if spike.needed is None else sentences.without(spike, spike.needed),
        )
        column.append(one)
    return tuple(column)


def writers_of(spike: SpikeResult) -> tuple[CircuitPart, ...]:
    """The neurons that a sentence names, or else the components: their shares, and what is left without each alone."""
    left = {str(one.address): one.left for one in spike.alone}
    neurons = sentences.named(spike)
    if neurons:
        return tuple(CircuitPart(name, share, left.get(name)) for name, share in neurons)
    named = [one for one in spike.writers if one.share >= sentences.WRITES]
    return tuple(CircuitPart(_words(one.part), one.share) for one in named)


def _words(part: str) -> str:
    """A part, or parts that are judged as one, in a few words."""
    return " and ".join(sentences.component(name) for name in part.split(" and "))
