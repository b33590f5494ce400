"""An open model, and what is known of its sink: the norms, the neurons that make it, and the circuit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.measure import Setup
from sinkscope.results.parts import Head
from sinkscope.sinks.circuit.circuit import COPIES, MARKS, Circuit, circuit
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.find.layer_scan import LayerScan, scan_layers
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.removal.components import Neurons


@dataclass(frozen=True)
class ModelSink:
    """An open model and what is known of its sink.

    Attributes:
        setup: The model and typical text.
        scan: Norms on typical text, without dimensions that are massive on all tokens.
        sinks: Where its sink is made.
        circuit: The circuit of the sink.
    """

    setup: Setup
    scan: LayerScan
    sinks: FindSinks
    circuit: Circuit

    @classmethod
    def open(cls, model: object = None, **options: Any) -> ModelSink:
        """Open a model as `Setup.open` does, whole, and measure its sink."""
        setup = Setup.open(model, **options, loading="whole")
        setup.target.shards.check_alone("view")
        return cls(setup, scan_layers(setup.target, setup.ids, whole=True), find_sinks.on(setup), circuit.on(setup))

    @property
    def layer(self) -> int:
        """The sink layer, or the layer after which the first token stands out most."""
        if self.scan.sink_layer is not None:
            return self.scan.sink_layer
        return int((np.array(self.scan.spike_norm) / np.array(self.scan.typical_norm)).argmax())

    @property
    def neurons(self) -> Neurons:
        """The sink neurons: the smallest set that makes the spike, or those that are causal alone."""
        return tuple(neuron.address for neuron in self.sinks.minimal or self.sinks.causal)

    @property
    def marks(self) -> list[Head]:
        """The heads that mark the first token, and those that mark a repetition."""
        marks: dict[Head, None] = {}
        for claim in (*self.circuit.of(MARKS), *self.circuit.of(COPIES)):
            marks |= {part: None for part in claim.subject if isinstance(part, Head)}
        return list(marks)
