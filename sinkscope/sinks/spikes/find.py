"""The circuit of a sink, step by step, and the measurements `find_sinks` and `why_sink`, which has all tables.

1. Survey: one pass over texts of four kinds reads norms and attention; half of the texts choose, half report.
2. Spikes: places, directions and runs of layers in which the residual stream stands out.
3. Writers and needs: which neurons write a spike, by shares, and the fewest that suffice, by their removal.
4. Marks: what makes the writers fire at the place (`why_sink`).
5. Effects: what the needed neurons do at the place, beside others that write as much.
6. Readers: which heads attend to the place.
7. Conditions: what makes a position the place: its token, seeing only itself, its position id; and why heads read the
   place: the spike makes its state constant (`why_sink`).
8. Purpose: what later tokens lose without the place (`why_sink`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from sinkscope.engine.tap import check_attention_visible
from sinkscope.errors import UnsupportedError, warn
from sinkscope.measure import Setup, measurement
from sinkscope.measure.margin import count_above, mean_of
from sinkscope.results.mean import Mean
from sinkscope.results.table import Row, whole
from sinkscope.sinks.spikes.conditions import conditions_of
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.edited import left_at_place
from sinkscope.sinks.spikes.effects import SpikeCircuit, effects_of
from sinkscope.sinks.spikes.marks import heads_that_mark, marks_of
from sinkscope.sinks.spikes.needs import Needs, like_needs, needs_of
from sinkscope.sinks.spikes.purpose import purpose_of
from sinkscope.sinks.spikes.result import FindSinks, SpikeResult, WhySink
from sinkscope.sinks.spikes.sentences import sufficient
from sinkscope.sinks.spikes.spike import (
    Parts,
    PlaceKey,
    PlaceKind,
    Spike,
    at_position,
    attended,
    find_spikes,
    mean_by_row,
    split_by_label,
)
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.spikes.tables import Attended, AttendedKind, Attention, Largest, Size, Writer
from sinkscope.sinks.spikes.why_tables import Constancy
from sinkscope.sinks.spikes.writers import components_of, shares_on
from sinkscope.sinks.thresholds import READS, SINK_HEADS

NO_FIRST_SPIKE = "No neurons are known that a norm spike at the first token needs"


@measurement(loading="fits")
def find_sinks(setup: Setup) -> FindSinks:
    """Find the norm spikes of a model, the fewest neurons that make them, and the heads that attend to their places.

    A spike is a place, a direction in the residual stream and a run of layers. Half of the texts choose the neurons;
    the other half measure what zeroing them does, against other neurons that write as much (Sun et al. 2024; Yona et
    al. 2025, section 4).
    """
    return FindSinks(**fields_of(setup))


@measurement(loading="fits")
def why_sink(setup: Setup) -> WhySink:
    """Ask what makes a position the sink, and what it is for; then trace its circuit to the heads that read it.

    An ordinary position gets the place's token, sees only itself, or has its position id; each is taken away at the
    place. The place is hidden from later tokens, or they read another value from it. Then components are replaced at
    the place by what they write on average at ordinary positions, and heads at many tokens that are put first, each
    alone.
    """
    chosen = spike_of(setup)
    fields = fields_of(setup, why=True)
    if chosen is None:
        return WhySink(**fields)
    marking, tokens = heads_that_mark(setup, chosen)
    return WhySink(marking=tuple(marking), marked=chosen.spike.layers, tokens=tokens, **fields)


@dataclass(frozen=True, eq=False)
class Sinks:
    """The spikes of a model.

    Attributes:
        survey: The survey of the texts that choose.
        report: The survey of the texts that report.
        spikes: The spikes, each with what it needs; most read first.
    """

    survey: Survey
    report: Survey
    spikes: tuple[SpikeCircuit, ...]

    @property
    def at_first(self) -> tuple[SpikeCircuit, ...]:
        """The spikes of the first token."""
        return tuple(circuit for circuit in self.spikes if circuit.spike.place.is_first)


def sinks_of(setup: Setup) -> Sinks:
    """Take steps 1 to 3, once for each setup."""
    return setup.once((sinks_of, setup.seed), partial(_sinks_of, setup))


def spike_of(setup: Setup) -> SpikeCircuit | None:
    """Return the spike of the first token that most heads read, of those that need neurons; None without any."""
    return next((circuit for circuit in sinks_of(setup).at_first if circuit.needs.units), None)


def _sinks_of(setup: Setup) -> Sinks:
    # Step 1: survey
    survey = survey_of(setup)
    report = survey_of(setup, "report")
    # Step 2: spikes
    spikes = find_spikes(survey, setup.tokenizer)
    # Step 3: writers, and what is needed of them; a spike that needs those of an earlier spike is like it
    circuits: list[SpikeCircuit] = []
    alike: list[SpikeCircuit] = []
    for spike in spikes:
        reported = spike.on(report) or spike
        for known in circuits:
            needs = like_needs(spike, known.spike, known.needs)
            if needs is not None:
                alike.append(SpikeCircuit(spike, reported, needs, known))
                break
        else:
            others = [*spikes]
            others.remove(spike)
            circuits.append(SpikeCircuit(spike, reported, needs_of(spike, others)))
        setup.progress("spikes", len(circuits) + len(alike), len(spikes))
    circuits.sort(key=attrgetter("heads"), reverse=True)
    alike.sort(key=attrgetter("heads"), reverse=True)
    return Sinks(survey, report, (*circuits, *alike))


def answers_of(sinks: Sinks, seed: int) -> dict[SpikeCircuit, dict[str, tuple[Row, ...]]]:
    """Return, of each spike of the first token, what makes its place and what the place is for.

    Args:
        sinks: The spikes.
        seed: Seed of ordinary positions and tokens.
    """
    circuits: list[SpikeCircuit] = []
    for circuit in sinks.at_first:
        if circuit.like is None and circuit.reported.survey is sinks.report:
            circuits.append(circuit)
    if not circuits:
        for circuit in sinks.spikes:
            place = circuit.spike.place.label.words
            warn(f"what makes the sink is asked of the first token, and this spike is at {place}")
        return {}
    spikes = [circuit.reported for circuit in circuits]
    first_layer = min(spike.layers[0] for spike in spikes)
    answers: dict[SpikeCircuit, dict[str, tuple[Row, ...]]] = {}
    try:
        check_attention_visible(sinks.survey.target)
        conditions = conditions_of(spikes, seed)
        purposes = purpose_of(circuits)
        for circuit, rows, purpose in zip(circuits, conditions, purposes, strict=True):
            constant: list[Constancy] = []
            if rows:
                causes = next(iter(sufficient(rows)), ())
                constant = constancy_of(circuit.reported, first_layer, causes, seed)
            answers[circuit] = {"conditions": tuple(rows), "constant": tuple(constant), "purpose": tuple(purpose)}
    except UnsupportedError as error:  # no key can be hidden in this model
        warn(f"what makes the sink, and what it is for, is not measured: {error}")
        return {}
    return answers


def fields_of(setup: Setup, why: bool = False) -> dict[str, Any]:
    """Measure the circuit, and who attends where; return the fields of a result.

    Args:
        setup: The model and its text.
        why: Whether marks, conditions and purpose are measured, too.
    """
    sinks = sinks_of(setup)
    target = setup.target
    results = list[SpikeResult]()
    report = sinks.report
    # Steps 7 and 8: conditions and purpose
    answers = answers_of(sinks, setup.seed) if why else {}
    for circuit in sinks.spikes:
        tables: dict[str, tuple[Row, ...]] = dict(answers.get(circuit, {}))
        # Step 4: marks
        if why:
            tables["marks"] = tuple(marks_of(circuit))
        # Step 5: effects
        if circuit.like is None:
            tables["effects"] = tuple(effects_of(circuit, sinks.survey, setup.seed))
        results.append(record_of(sinks, circuit, tables))
        setup.progress("effects", len(results), len(sinks.spikes))
    setup.record(texts=len(report.ids))
    heads = torch.full((target.n_layers, target.n_heads), torch.nan)
    heads[target.attending] = report.received(at_position(report.ids, 0)).mean(-1)[target.attending]
    return {
        "spikes": tuple(results),
        "attention": tuple(attention_of(sinks, setup.tokenizer)),
        "largest": largest_of(report, setup.tokenizer),
        "heads": heads.numpy(),
        "typical_norm": tuple(report.typical_norm),
        "first_token_norm": tuple(report.norms[:, :, 0].median(1).values.tolist()),
    }


def attention_of(sinks: Sinks, tokenizer: Any) -> list[Attention]:
    """Take step 6: the heads that attend to the place of the first spike, or else to the first token.

    Then the sink rate of position 0, heads that attend to learned sink logits, and places that heads attend to and at
    which there is no spike.
    """
    report = sinks.report
    layers = report.target.attending
    total = whole(len(layers) * report.target.n_heads)
    place = PlaceKey(PlaceKind.FIRST)
    mask = at_position(report.ids, 0)
    first = next(iter(sinks.spikes), None)
    if first is not None and first.heads and first.reported.survey is report:
        place = first.reported.place.label.key
        mask = first.reported.place.mask
    received = report.received(mask)[layers][:, :, mask.any(1)]
    rate = mean_of(report.sink_rate, "share")
    length = whole(report.ids.shape[1])
    rows = [
        Attention(key=Attended(AttendedKind.PLACE, place), heads=count_above(received, READS), total=total),
        Attention(key=Attended(AttendedKind.SINK_RATE), share=rate, length=length, eps=Mean(READS)),
    ]
    n_learned = int((report.learned.mean(-1) > READS).sum())
    if n_learned:
        rows.append(Attention(key=Attended(AttendedKind.LEARNED), heads=whole(n_learned), total=total))
    return [*rows, *attention_without_spike(sinks, tokenizer, total)]


def attention_without_spike(sinks: Sinks, tokenizer: Any, total: Mean) -> list[Attention]:
    """Return the places that heads attend to and at which there is no spike, most heads first.

    Args:
        sinks: The spikes.
        tokenizer: Its `decode` gives words for places.
        total: Number of all heads that attend.
    """
    survey = sinks.survey
    report = sinks.report
    layers = report.target.attending
    positions = attended(survey)
    for circuit in sinks.spikes:
        positions &= ~circuit.spike.place.mask
    rows: list[Attention] = []
    for place in split_by_label(survey.ids, positions, tokenizer.decode):
        received = report.received(place.matches(report.ids)).nanmean(-1)
        n_heads = int((received[layers] > READS).sum())
        if n_heads >= SINK_HEADS:
            key = Attended(AttendedKind.PLACE_WITHOUT_SPIKE, place.label.key)
            rows.append(Attention(key=key, heads=whole(n_heads), total=total))
    return sorted(rows, key=lambda row: -row["heads"].value)


def largest_of(report: Survey, tokenizer: Any) -> Largest:
    """Return the largest norm over the typical one that was seen anywhere."""
    layer, text, position = map(int, torch.unravel_index(report.ratios.argmax(), report.ratios.shape))
    token = tokenizer.decode([int(report.ids[text, position])])
    return Largest(token=token, layer=layer, ratio=Mean(float(report.ratios.max())))


def record_of(sinks: Sinks, circuit: SpikeCircuit, tables: Mapping[str, Any]) -> SpikeResult:
    """Return the record of a spike: what was chosen on one half of the texts, in numbers of the other half.

    Args:
        sinks: All spikes.
        circuit: The spike and what it needs.
        tables: What was measured of it beyond, by the fields of its record.
    """
    spike = circuit.reported
    components, erasers = components_of(spike)
    return SpikeResult(
        place=spike.place.label,
        layers=spike.layers,
        peak=spike.peak,
        highest=spike.highest,
        dims=spike.dims,
        needed=circuit.needs.needed,
        like=None if circuit.like is None else sinks.spikes.index(circuit.like),
        held_out=spike.survey is sinks.report,
        texts=tuple(spike.texts.tolist()),
        size=size_of(spike, circuit.needs.needed),
        writers=writer_rows(spike, circuit.needs),
        components=tuple(components),
        erasers=tuple(erasers),
        **tables,
    )


def size_of(spike: Spike, needed: Parts) -> Size:
    """Return how large a spike is, how many heads read it, and what is left of it without the needed parts."""
    survey = spike.survey
    place = spike.place.mask
    norms = survey.norms[spike.highest, place]
    over = norms / survey.typical_norm[spike.highest]
    ratio = mean_of(mean_by_row(over, place)[spike.texts])
    assert ratio is not None
    left = None
    if needed:
        left = mean_of(left_at_place(spike, [needed])[0, 0], "share")
    n_layers = sum(layer in spike.reading_layers for layer in survey.target.attending)
    return Size(
        norm_before=Mean(float(survey.entered[spike.layers[0], place].norm(dim=-1).mean())),
        norm_after=Mean(float(survey.norms[spike.peak, place].mean())),
        ratio=replace(ratio, value=float(over.mean())),
        norm_at_ratio=Mean(float(norms.mean())),
        typical=Mean(float(survey.typical_norm[spike.highest])),
        heads=count_above(spike.attention, READS),
        total=whole(n_layers * spike.attention.shape[1]),
        left=left,
    )


def writer_rows(spike: Spike, needs: Needs) -> tuple[Writer, ...]:
    """Return what each candidate writes of a spike, and what its removal does, the largest share first."""
    written = shares_on(spike, needs.neutral)
    rows: list[Writer] = []
    for unit, left in needs.alone.items():
        for neuron in unit:
            share, _ = written[neuron]
            row = Writer(
                key=neuron,
                share=share,
                role=needs.role(unit),
                left=Mean(left[0], kind="share"),
                neutral=Mean(needs.neutral[neuron]),
            )
            rows.append(row)
    return tuple(sorted(rows, key=lambda row: -row.share.value))
