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
from sinkscope.sinks.spikes.needs import like_needs, needs_of
from sinkscope.sinks.spikes.purpose import purpose_of
from sinkscope.sinks.spikes.result import FindSinks, SpikeResult, WhySink
from sinkscope.sinks.spikes.sentences import sufficient
from sinkscope.sinks.spikes.spike import (
    PlaceKey,
    PlaceKind,
    at_position,
    attended,
    find_spikes,
    mean_by_row,
    split_by_label,
)
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.spikes.tables import Attended, AttendedKind, Attention, Largest, Size, Writer
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
    for some in (circuits, alike):
        some.sort(key=attrgetter("heads"), reverse=True)
    return Sinks(survey, report, (*circuits, *alike))


def answers_of(sinks: Sinks, seed: int) -> dict[SpikeCircuit, dict[str, tuple[Row, ...]]]:
    """Return, of each spike of the first token, what makes its place and what the place is for.

    Args:
        sinks: The spikes.
        seed: Seed of ordinary positions and tokens.
    """
    asked = [one for one in sinks.at_first if one.like is None and one.reported.survey is sinks.report]
    answers: dict[SpikeCircuit, dict[str, tuple[Row, ...]]] = {circuit: {} for circuit in asked}
    for circuit in sinks.spikes[: not asked]:
        place = circuit.spike.place.label.words
        warn(f"what makes the sink is asked of the first token, and this spike is at {place}")
    if not asked:
        return {}
    spikes = [circuit.reported for circuit in asked]
    begins = min(spike.layers[0] for spike in spikes)
    try:
        check_attention_visible(sinks.survey.target)
        for circuit, rows in zip(asked, conditions_of(spikes, seed), strict=True):
            enough = next(iter(sufficient(rows)), ())
            constant = constancy_of(circuit.reported, begins, enough, seed) if rows else []
            answers[circuit] |= {"conditions": tuple(rows), "constant": tuple(constant)}
        for circuit, rows in zip(asked, purpose_of(asked), strict=True):
            answers[circuit]["purpose"] = tuple(rows)
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
    survey = sinks.survey
    report = sinks.report
    layers = sinks.report.target.attending
    total = whole(len(layers) * report.target.n_heads)
    place = PlaceKey(PlaceKind.FIRST)
    mask = at_position(report.ids, 0)
    for circuit in sinks.spikes[:1]:
        if circuit.heads and circuit.reported.survey is report:
            place = circuit.reported.place.label.key
            mask = circuit.reported.place.mask
    received = report.received(mask)[layers][:, :, mask.any(1)]
    rate = mean_of(report.sink_rate, "share")
    learned = int((report.learned.mean(-1) > READS).sum())
    length = whole(report.ids.shape[1])
    rows = [
        Attention(key=Attended(AttendedKind.PLACE, place), heads=count_above(received, READS), total=total),
        Attention(key=Attended(AttendedKind.SINK_RATE), share=rate, length=length, eps=Mean(READS)),
    ]
    if learned:
        rows.append(Attention(key=Attended(AttendedKind.LEARNED), heads=whole(learned), total=total))
    there = attended(survey)
    without = list[Attention]()
    for circuit in sinks.spikes:
        there &= ~circuit.spike.place.mask
    for other in split_by_label(survey.ids, there, tokenizer.decode):
        heads = int((report.received(other.matches(report.ids)).nanmean(-1)[layers] > READS).sum())
        if heads >= SINK_HEADS:
            key = Attended(AttendedKind.PLACE_WITHOUT_SPIKE, other.label.key)
            without.append(Attention(key=key, heads=whole(heads), total=total))
    return [*rows, *sorted(without, key=lambda row: -row["heads"].value)]


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
    needs = circuit.needs
    place = spike.place.mask
    layers = spike.survey.target.attending
    over = spike.survey.norms[spike.highest, place] / spike.survey.typical_norm[spike.highest]
    ratio = mean_of(mean_by_row(over, place)[spike.texts])
    assert ratio is not None
    left = mean_of(left_at_place(spike, [needs.needed])[0, 0], "share") if needs.needed else None
    size = Size(
        norm_before=Mean(float(spike.survey.entered[spike.layers[0], place].norm(dim=-1).mean())),
        norm_after=Mean(float(spike.survey.norms[spike.peak, place].mean())),
        ratio=replace(ratio, value=float(over.mean())),
        norm_at_ratio=Mean(float(spike.survey.norms[spike.highest, place].mean())),
        typical=Mean(float(spike.survey.typical_norm[spike.highest])),
        heads=count_above(spike.attention, READS),
        total=whole(sum(layer in spike.reading_layers for layer in layers) * spike.attention.shape[1]),
        left=left,
    )
    written = shares_on(spike, needs.neutral)
    writers = list[Writer]()
    for unit, without in needs.alone.items():
        for neuron in unit:
            writers.append(
                Writer(
                    key=neuron,
                    share=written[neuron][0],
                    role=needs.role(unit),
                    left=Mean(without[0], kind="share"),
                    neutral=Mean(needs.neutral[neuron]),
                )
            )
    components, erasers = components_of(spike)
    return SpikeResult(
        place=spike.place.label,
        layers=spike.layers,
        peak=spike.peak,
        highest=spike.highest,
        dims=spike.dims,
        needed=needs.needed,
        like=None if circuit.like is None else sinks.spikes.index(circuit.like),
        held_out=spike.survey is sinks.report,
        texts=tuple(spike.texts.tolist()),
        size=size,
        writers=tuple(sorted(writers, key=lambda row: -row.share.value)),
        components=tuple(components),
        erasers=tuple(erasers),
        **tables,
    )
