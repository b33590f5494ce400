"""An open model, and what is known of its sink: its survey, its spikes, and the circuit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from sinkscope.measure import Setup
from sinkscope.results.parts import Head, Neuron
from sinkscope.sinks.spikes.find import Sinks, circuit, sinks_of
from sinkscope.sinks.spikes.records import part_of
from sinkscope.sinks.spikes.result import Circuit

COPIES = 300  # copies of a token that the circuit of a view tries


S = TypeVar("S", bound="ModelSink")  # the shape checks of the tests refuse typing.Self


@dataclass
class ModelSink:
    """An open model and what is known of its sink.

    Attributes:
        setup: The model and typical text.
        sinks: Its survey, and its spikes.
        circuit: The circuit of the sink, as a result.
    """

    setup: Setup
    sinks: Sinks
    circuit: Circuit

    @classmethod
    def open(cls: type[S], model: object = None, **options: Any) -> S:
        """Open a model as `Setup.open` does, whole, and measure its sink."""
        setup = Setup.open(model, **options, loading="whole")
        setup.target.check_alone("view")
        context = setup.target.max_positions or COPIES + 1
        return cls(setup, sinks_of(setup), circuit.on(setup, max_repeats=min(COPIES, context - 1)))

    @property
    def layer(self) -> int:
        """The peak of the spike that most heads read, or the layer after which the first token stands out most."""
        if self.sinks.spikes:
            return self.sinks.spikes[0].result.peak
        return int(self.sinks.survey.ratios[:, :, 0].mean(1).argmax())

    @property
    def typical_norm(self) -> list[float]:
        """Median norm of later positions after each layer."""
        return self.sinks.survey.typical_norm

    @property
    def neurons(self) -> tuple[Neuron, ...]:
        """The neurons that write the spike with most readers, if it needs neurons."""
        if not self.sinks.spikes or not self.sinks.spikes[0].needed_neurons:
            return ()
        return self.sinks.spikes[0].writers

    @property
    def marks(self) -> list[Head]:
        """The heads that mark the places of spikes."""
        parts = [part_of(name) for spike in self.circuit.spikes for mark in spike.marks for name in mark.names]
        return [part for part in dict.fromkeys(parts) if isinstance(part, Head)]
