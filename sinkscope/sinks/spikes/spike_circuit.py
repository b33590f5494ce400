"""What is known of one spike after all steps, and its record, which is made once."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.answer_records import Answers
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.effects import SpikeEffects, count_readers
from sinkscope.sinks.spikes.needs import Needs
from sinkscope.sinks.spikes.places import Place, per_text
from sinkscope.sinks.spikes.records import Candidate, Copies, MarkLeft, Needed, NeuronShare, SpikeResult
from sinkscope.sinks.spikes.spike import Parts, Spike, over_typical
from sinkscope.sinks.spikes.writers import components_of, shares_on


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
            if self.needs.role(unit) in ("needed", "lowers", "backup"):
                values |= {neuron: self.needs.writers.neutral[neuron] for neuron in unit}
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

    @property
    def heads(self) -> int:
        """Heads that attend to the place in the layers that read it."""
        return count_readers(SpikeTexts.of(self.reported).attention)[0]


def record_of(
    circuit: SpikeCircuit,
    measured: SpikeEffects | None,
    marks: tuple[MarkLeft, ...],
    copies: tuple[Copies, ...],
    answers: Answers,
) -> SpikeResult:
    """Return the record of a spike: what was chosen on one half of the texts, in numbers of the other half.

    Args:
        circuit: The spike and what it needs.
        measured: What the needed set does. None: it was not measured.
        marks: What marks the place.
        copies: What copies of tokens reach.
        answers: What makes the place, what it is for, and why heads read it.
    """
    spike, survey, mask = circuit.reported, circuit.reported.survey, circuit.reported.place.mask
    over, layers = over_typical(survey, mask)[spike.highest], slice(spike.layers[0], spike.layers[1] + 1)
    ratio_by_text = per_text(over, mask)
    writers, erasers = components_of(spike)
    texts = SpikeTexts.of(spike)
    heads, heads_margin = count_readers(texts.attention)
    held_out = circuit.reported.survey is not circuit.spike.survey
    return SpikeResult(
        place=spike.place.label,
        layers=spike.layers,
        peak=spike.peak,
        norm=float(survey.norms[spike.peak, mask].mean()),
        before=float(survey.entered[spike.layers[0], mask].norm(dim=-1).mean()),
        ratio=float(over.mean()),
        ratio_layer=spike.highest,
        ratio_margin=margin_of(ratio_by_text.numpy()),
        ratio_beside=float(survey.ratios[:, mask].mean(1)[layers].max()),
        dims=spike.dims,
        writers=writers,
        neurons=candidates_of(circuit),
        backups=circuit.needs.backups,
        erasers=erasers,
        needed=needed_of(texts, circuit.needs),
        effect=None if measured is None else measured.effects,
        controls=None if measured is None else measured.controls,
        alone=() if measured is None else measured.alone,
        marks=marks,
        copies=copies,
        like=circuit.like,
        heads=heads,
        heads_margin=heads_margin,
        texts=len(texts.rows),
        held_out=held_out,
        conditions=answers.conditions,
        purpose=answers.purpose,
        constancy=answers.constancy,
        ratio_by_text=tuple(ratio_by_text.tolist()),
        text_numbers=tuple(texts.rows.tolist()),
    )


def candidates_of(circuit: SpikeCircuit) -> tuple[Candidate, ...]:
    """Return the candidates with what each writes in the texts of the report, largest share first."""
    needs, candidates = circuit.needs, list[Candidate]()
    neurons = [neuron.address for neuron in needs.writers.neurons]
    written: dict[Neuron, NeuronShare] = {}
    if neurons:
        written = dict(zip(neurons, shares_on(circuit.reported, neurons), strict=True))
    for unit in needs.writers.units:
        for neuron in unit:
            writer, left = written[neuron], float(needs.alone[unit][0])
            what = writer.share, writer.margin, needs.writers.neutral[neuron], left, needs.role(unit)
            candidates.append(Candidate(neuron.layer, neuron.expert, neuron.neuron, *what, by_text=writer.by_text))
    return tuple(sorted(candidates, key=lambda candidate: -candidate.share))


def needed_of(texts: SpikeTexts, needs: Needs) -> Needed | None:
    """Return the record of the needed set; None if there is none."""
    parts: Parts = needs.needed
    if not parts:
        return None
    left = texts.along([parts])[0]
    neurons = tuple(part for part in parts if isinstance(part, Neuron))
    return Needed(neurons, tuple(map(str, parts)), float(left.mean()), margin_of(left.numpy()))
