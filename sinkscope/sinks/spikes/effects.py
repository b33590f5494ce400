"""Step 5, the effects: the needed set removed at the place, and everywhere; its units one by one; the place hidden.

Controls are other parts that write as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from sinkscope.errors import UnsupportedError, warn
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.results.mean import Mean
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.cases import CaseReading, case_of, control_of, effect_of
from sinkscope.sinks.spikes.controls import equal_sets, other_components
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.spike import Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.tables import WRITES, Done, Edit, Effect
from sinkscope.sinks.thresholds import READS

FEW = 8  # texts of controls, and of removals everywhere
ALONE = 4  # texts in which a unit is removed alone
UNITS = 8  # units that are removed alone


@dataclass(frozen=True, eq=False)
class SpikeCircuit:
    """A spike with what writes it and what it needs.

    Attributes:
        spike: The spike, in the texts that found it.
        reported: The same spike in the other texts; in the same texts, if those do not have its place.
        needs: What it needs.
        like: An earlier spike that it repeats at another place. None: it repeats none.
    """

    spike: Spike
    reported: Spike
    needs: Needs
    like: SpikeCircuit | None = None

    @property
    def patch(self) -> SinkPatch:
        """The patch of all its writers, by what their removal does; it holds the median of each on ordinary text."""
        calibrated = dict[Neuron, float]()
        for unit in self.needs.shares:
            if self.needs.role(unit) in WRITES:
                for neuron in unit:
                    calibrated[neuron] = self.needs.neutral[neuron]
        return SinkPatch(sites=tuple(calibrated), calibrated=calibrated)

    @property
    def first_writer(self) -> int:
        """The layer of the first neuron or component that it needs; if it needs none, the first layer of its run."""
        layers = list[int]()
        for part in self.needs.needed:
            layers.append(part.layer or 0)
        return min(layers, default=self.spike.layers[0])

    @property
    def heads(self) -> int:
        """Heads that attend to the place in the layers that read it, by their mean over texts."""
        return int((self.reported.attention.double().mean(-1) > READS).sum())

    @cached_property
    def hidden(self) -> Effect | None:
        """What it does to hide the place from later tokens in the layers after the first that writes its spike.

        None: no head reads the place, or no key can be hidden in the model, which a warning says.
        """
        spike = self.reported
        if not spike.is_read or not self.later_layers:
            return None
        try:
            reading = case_of(spike).hiding(spike.place.mask, self.later_layers).read(spike.reading_layers)
            return effect_of(Edit(Done.HIDDEN), reading, since=self.since)
        except UnsupportedError as error:
            warn(f"what it does to hide a place is not measured: {error}")
            return None

    @property
    def since(self) -> int:
        """The layer after the first that writes its spike."""
        return self.first_writer + 1

    @property
    def later_layers(self) -> range:
        """The layers after the first that writes its spike."""
        return range(self.since, self.spike.survey.target.n_layers)


@torch.no_grad()
def effects_of(circuit: SpikeCircuit, chosen: Survey, seed: int) -> list[Effect]:
    """Measure what the needed set of a spike does, beside what others do that write as much, and each unit of it.

    Args:
        circuit: The spike, with what it needs.
        chosen: The survey that found it, which tells what neurons write.
        seed: Seed of random sets.

    Returns:
        The intact spike, the needed parts removed, each alone, the place hidden, and the controls; none if nothing is
        needed.
    """
    spike = circuit.reported
    needed = circuit.needs.needed
    if not needed:
        return []
    layers = spike.reading_layers if spike.is_read else ()
    at_place = case_of(spike, [needed]).read(layers)
    row_of_needed = effect_of(Edit(Done.NEEDED), at_place, parts=needed)
    intact = Effect(key=Edit(Done.INTACT), left=Mean(1.0, kind="share"), heads=row_of_needed.intact)
    rows = [intact, row_of_needed]
    if not circuit.needs.units:
        return [*rows, component_control(circuit, at_place, layers)]
    everywhere = case_of(spike, [needed], n_texts=FEW, everywhere=True).read(spike.reading_layers)
    rows.append(effect_of(Edit(Done.NEEDED, everywhere=True), everywhere, parts=needed))
    rows += units_alone(circuit, layers)
    if circuit.hidden is not None:
        rows.append(circuit.hidden)
    rows += neuron_controls(circuit, at_place, layers, chosen, seed)
    return rows


def units_alone(circuit: SpikeCircuit, layers: Sequence[int]) -> list[Effect]:
    """Zero each unit alone, strongest effect first; return a row for each of its neurons, none of a single unit."""
    needs = circuit.needs
    rows: list[Effect] = []
    if len(needs.units) < 2:
        return rows
    for unit in sorted(needs.units, key=[*needs.alone].index)[:UNITS]:
        effect = effect_of(Edit(Done.PART), case_of(circuit.reported, [unit], n_texts=ALONE).read(layers))
        for neuron in unit:
            rows.append(replace(effect, key=Edit(Done.PART, part=neuron)))
    return rows


def component_control(circuit: SpikeCircuit, needed: CaseReading, layers: Sequence[int]) -> Effect:
    """Replace other components, one in each text; return the row without numbers if there are none."""
    key = Edit(Done.RANDOM)
    others = other_components(circuit.needs.order, circuit.needs.needed)
    if not others:
        return Effect(key=key)
    return control_of(key, case_of(circuit.reported, others).read(layers), needed)


def neuron_controls(
    circuit: SpikeCircuit, needed: CaseReading, layers: Sequence[int], chosen: Survey, seed: int
) -> list[Effect]:
    """Zero other neurons that write as much, everywhere: the busiest, and random sets.

    Args:
        circuit: The spike, with what it needs.
        needed: What was read without the needed neurons.
        layers: Layers whose attention is read.
        chosen: The survey that tells what neurons write.
        seed: Seed of random sets.

    Returns:
        A row of each kind of control; one without numbers if no other neuron of these layers writes anything.
    """
    rows: list[Effect] = []
    for done, norms in equal_sets(chosen, circuit.needs.units, [*circuit.needs.neutral], seed).items():
        reading = case_of(circuit.reported, [*norms], n_texts=FEW, everywhere=True).read(layers)
        norm = float(np.mean([*norms.values()]))
        rows.append(control_of(Edit(done, everywhere=True), reading, needed, norm))
    return rows or [Effect(key=Edit(Done.BUSIEST, everywhere=True))]
