"""What is known of one spike after all steps, and its record, which is made once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure.margin import mean_of
from sinkscope.results.parts import Neuron
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.asked import count_readers
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.places import Place, per_text
from sinkscope.sinks.spikes.records import WRITES, SpikeResult
from sinkscope.sinks.spikes.spike import Spike, over_typical
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.writers import components_of, shares_on
from sinkscope.sinks.thresholds import READS


@dataclass(frozen=True, eq=False)
class SpikeCircuit:
    """A spike with what writes it and what it needs.

    Attributes:
        spike: The spike, in the texts that found it.
        reported: The same spike in the other texts; in the same texts, if those do not have its place.
        needs: What it needs.
        like: Number of an earlier spike that it repeats at another place. None: it repeats none.
    """

    spike: Spike
    reported: Spike
    needs: Needs
    like: int | None = None

    @property
    def place(self) -> Place:
        """Its place in the texts that found it."""
        return self.spike.place

    @property
    def name(self) -> str:
        """The spike by its layers."""
        return self.spike.name

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The neurons of the smallest set found."""
        return tuple(part for part in self.needs.needed if isinstance(part, Neuron))

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The neurons that write it, by what their removal does, with the median of each on ordinary text."""
        values: dict[Neuron, float] = {}
        for unit in self.needs.writers.units:
            if self.needs.role(unit) in WRITES:
                values |= {neuron: self.needs.writers.neurons[neuron].get("neutral") for neuron in unit}
        return values

    @property
    def writers(self) -> tuple[Neuron, ...]:
        """The neurons that write it, by what their removal does."""
        return tuple(self.calibrated)

    @property
    def patch(self) -> SinkPatch:
        """The patch of all its writers, which holds the median that each has on ordinary text."""
        return SinkPatch(sites=self.writers, calibrated=self.calibrated)

    @property
    def first_writer(self) -> int:
        """The layer of the first neuron or component that it needs; if it needs none, the first layer of its run."""
        return min((part.layer or 0 for part in self.needs.needed), default=self.spike.layers[0])

    def asked_in(self, report: Survey) -> bool:
        """Return whether it is asked what makes the place: a first token's, in texts that did not find it."""
        return self.place.is_first and self.like is None and self.reported.survey is report

    @cached_property
    def texts(self) -> SpikeTexts:
        """The texts of the report that have its place."""
        return SpikeTexts.of(self.reported)

    @property
    def heads(self) -> int:
        """Heads that attend to the place in the layers that read it, as `count_readers` counts them."""
        return int((self.texts.attention.double().mean(-1) > READS).sum())


def record_of(circuit: SpikeCircuit, measured: Sequence[Row]) -> SpikeResult:
    """Return the record of a spike: what was chosen on one half of the texts, in numbers of the other half.

    Args:
        circuit: The spike and what it needs.
        measured: What was measured of it beyond.
    """
    spike, needs = circuit.reported, circuit.needs
    texts, needed = circuit.texts, tuple(map(str, needs.needed))
    rows = [norm_of(spike)]
    if needed:
        rows.append(row_of("spike", "needed", left=mean_of(texts.along([needs.needed])[0], "share")))
    rows.append(row_of("spike", "read by", heads=count_readers(texts.attention)))
    backups = [row_of("backups", str(neuron), "writes nothing while the others stand") for neuron in needs.backups]
    return SpikeResult(
        place=spike.place.label,
        layers=spike.layers,
        peak=spike.peak,
        highest=spike.highest,
        dims=spike.dims,
        needed=needed,
        like=circuit.like,
        held_out=spike.survey is not circuit.spike.survey,
        texts=tuple(texts.rows.tolist()),
        rows=(*rows, *candidates_of(circuit), *backups, *components_of(spike), *measured),
    )


def norm_of(spike: Spike) -> Row:
    """Return the norm before the run and after the peak, and how far it is above the typical one in its highest layer.

    The ratio beside is the largest of the run without what dimensions that are massive at all positions have.
    """
    survey, mask, (first, last) = spike.survey, spike.place.mask, spike.layers
    over = over_typical(survey, mask)[spike.highest]
    by_text = mean_of(per_text(over, mask))
    ratio = None if by_text is None else Mean(float(over.mean()), by_text.margin, by_text.by_text)
    return row_of(
        "spike",
        "norm",
        norm_before=float(survey.entered[first, mask].norm(dim=-1).mean()),
        norm_after=float(survey.norms[spike.peak, mask].mean()),
        ratio=ratio,
        ratio_beside=float(survey.ratios[:, mask].mean(1)[first : last + 1].max()),
    )


def candidates_of(circuit: SpikeCircuit) -> list[Row]:
    """Return the candidates with what each writes in the texts of the report, largest share first."""
    needs, rows = circuit.needs, list[Row]()
    known = needs.writers.neurons
    written = shares_on(circuit.reported, [*known])
    for unit in needs.writers.units:
        left = Mean(float(needs.alone[unit][0]), kind="share")
        for neuron in unit:
            numbers = {
                "share": written[neuron].numbers["share"],
                "left": left,
                "neutral": known[neuron].numbers["neutral"],
            }
            rows.append(replace(known[neuron], numbers=numbers, note=needs.role(unit)))
    return sorted(rows, key=lambda row: -row.get("share"))
