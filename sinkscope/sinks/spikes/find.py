"""The circuit of a sink, step by step, and the measurement `find_sinks`; `why_sink` has all tables.

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

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sinkscope.engine.tap import check_attention_visible
from sinkscope.errors import UnsupportedError, warn
from sinkscope.measure import Setup, measurement
from sinkscope.measure.margin import mean_of
from sinkscope.results.row import Mean, Row, row_of
from sinkscope.sinks.spikes.asked import conditions_of, count_readers, effects_of, hidden_of, purpose_of
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.marks import marks_of
from sinkscope.sinks.spikes.needs import SpikeCircuit, like_needs, needs_of
from sinkscope.sinks.spikes.places import at_position, per_text, split_by_label
from sinkscope.sinks.spikes.records import SpikeResult, sufficient
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.spike import Spike, attended, find_spikes, over_typical
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.spikes.writers import components_of, shares_on, writers_of
from sinkscope.sinks.thresholds import READS, SINK_HEADS
from sinkscope.sinks.tokens import Mask

FIND_SINKS = frozenset({"effects"})
ALL_PARTS = FIND_SINKS | {"marks", "conditions", "purpose"}
NO_FIRST_SPIKE = "No neurons are known that a norm spike at the first token needs"


@measurement(loading="fits")
def find_sinks(setup: Setup) -> FindSinks:
    """Find the norm spikes of a model, the fewest neurons that make them, and the heads that attend to their places.

    A spike is a place, a direction in the residual stream and a run of layers. One half of the texts finds spikes and
    the neurons that they need; the other half tells what these do at the place, beside others that write as much (Sun
    et al. 2024; Yona et al. 2025, section 4).
    """
    return FindSinks(**fields_of(setup, FIND_SINKS))


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
        return tuple(spike for spike in self.spikes if spike.place.is_first)


def sinks_of(setup: Setup) -> Sinks:
    """Take steps 1 to 3, once for each setup."""
    return setup.once((sinks_of, setup.seed), partial(_sinks_of, setup))


def spike_of(setup: Setup) -> SpikeCircuit | None:
    """Return the spike of the first token that most heads read, of those that need neurons; None without any."""
    return next((circuit for circuit in sinks_of(setup).at_first if circuit.needed_neurons), None)


def _sinks_of(setup: Setup) -> Sinks:
    # Step 1: survey
    survey, report = survey_of(setup), survey_of(setup, "report")
    # Step 2: spikes
    spikes = find_spikes(survey, setup.tokenizer)
    # Step 3: writers, and what is needed of them; a spike that needs those of an earlier spike is like it
    circuits: list[SpikeCircuit] = []
    for spike in spikes:
        others, like, needs = [other for other in spikes if other is not spike], None, None
        for number, known in enumerate(circuits):
            if needs is None and known.like is None:
                needs = like_needs(spike, known.spike, known.needs)
                like = None if needs is None else number
        if needs is None:
            needs = needs_of(spike, writers_of(spike), others)
        circuits.append(SpikeCircuit(spike, spike.on(report) or spike, needs, like))
        setup.progress("spikes", len(circuits), len(spikes))
    ordered = sorted(circuits, key=lambda circuit: (circuit.like is not None, -circuit.heads))  # duplicates last
    for number, circuit in enumerate(ordered):
        if circuit.like is not None:
            ordered[number] = replace(circuit, like=ordered.index(circuits[circuit.like]))
    return Sinks(survey, report, tuple(ordered))


def answers_of(sinks: Sinks, hidden: Mapping[int, Row | None], seed: int, parts: Set[str]) -> dict[int, list[Row]]:
    """Return, by the number of each spike of the first token, what makes its place and what the place is for.

    Args:
        sinks: The spikes.
        hidden: What hiding the place of each spike does, by its number.
        seed: Seed of ordinary positions, tokens and keys.
        parts: What is asked: "conditions", "purpose".
    """
    asked, answers = [n for n, circuit in enumerate(sinks.spikes) if circuit.asked_in(sinks.report)], dict[int, Any]()
    if sinks.spikes and not asked and parts & {"conditions", "purpose"}:
        place = sinks.spikes[0].place.label.words
        warn(f"what makes the sink is asked of the first token, and this spike is at {place}")
    spikes = [sinks.spikes[number].reported for number in asked]
    try:
        if spikes and parts & {"conditions", "purpose"}:
            check_attention_visible(sinks.survey.target)
        conditions = conditions_of(spikes, seed) if "conditions" in parts else [list[Row]() for _ in spikes]
        for number, spike, rows in zip(asked, spikes, conditions, strict=True):
            begins, answers[number] = min(spike.layers[0] for spike in spikes), [*rows]
            if rows:
                answers[number] += constancy_of(spike, begins, sufficient(rows), seed)
            if "purpose" in parts:
                first_writer = sinks.spikes[number].first_writer
                answers[number] += purpose_of(spike, first_writer, hidden.get(number), seed)
    except UnsupportedError as error:  # no key can be hidden in this model
        warn(f"what makes the sink, and what it is for, is not measured: {error}")
    return answers


def fields_of(setup: Setup, parts: Set[str]) -> dict[str, Any]:
    """Measure parts of the circuit, and who attends where; return the fields of a result.

    Args:
        setup: The model and its text.
        parts: What is measured: "effects", "marks", "conditions", "purpose".
    """
    sinks, target, results = sinks_of(setup), setup.target, list[SpikeResult]()
    report = sinks.report
    hidden: dict[int, Row | None] = {}
    for number, circuit in enumerate(sinks.spikes):
        # Effects of neurons and the purpose ask what hiding the place does.
        if circuit.like is None and ("purpose" in parts or ("effects" in parts and circuit.needs.units)):
            hidden[number] = hidden_of(circuit.texts, circuit.first_writer)
    # Steps 7 and 8: conditions and purpose
    answers = answers_of(sinks, hidden, setup.seed, parts)
    for number, circuit in enumerate(sinks.spikes):
        rows: list[Row] = []
        # Step 4: marks
        if "marks" in parts:
            rows += marks_of(circuit, setup.seed)
        # Step 5: effects
        if "effects" in parts and circuit.like is None:
            rows += effects_of(circuit.texts, circuit.needs, sinks.survey, hidden.get(number), setup.seed)
        results.append(record_of(circuit, [*rows, *answers.get(number, [])]))
        setup.progress("effects", number + 1, len(sinks.spikes))
    setup.record(texts=len(report.ids))
    # Step 6: readers
    place, mask = "the first token", at_position(report.ids, 0)
    heads = torch.full((target.n_layers, target.n_heads), torch.nan)
    heads[target.attending] = report.received(mask).mean(-1)[target.attending]
    if results and sinks.spikes[0].heads and sinks.spikes[0].reported.survey is report:
        place, mask = results[0].place.words, sinks.spikes[0].reported.place.mask
    attention = [*readers_of(report, place, mask), *seen_of(report), *attended_places(sinks, setup.tokenizer)]
    return {
        "spikes": tuple(results),
        "attention": (*attention, largest_norm(report, setup.tokenizer)),
        "heads": heads.numpy(),
        "typical_norm": tuple(report.typical_norm),
        "first_token_norm": tuple(report.first_norm),
    }


def readers_of(survey: Survey, place: str, mask: Mask) -> list[Row]:
    """Return heads that attend to a place, in the texts that have it: in all, and in those of each kind."""
    there = mask.any(1)
    received = survey.received(mask)[survey.target.attending][:, :, there]
    total = len(survey.target.attending) * survey.target.n_heads
    rows = [row_of("attention", place, heads=count_readers(received), total=total)]
    kinds = [kind for kind, has in zip(survey.kinds, there.tolist(), strict=True) if has]
    for kind in dict.fromkeys(filter(None, kinds)):
        of_kind = torch.tensor([own == kind for own in kinds])
        rows.append(row_of("attention by kind of text", kind, heads=count_readers(received[..., of_kind])))
    return rows


def attended_places(sinks: Sinks, tokenizer: Any) -> list[Row]:
    """Return places that heads attend to and at which there is no spike."""
    survey, rows = sinks.survey, list[Row]()
    there, layers = attended(survey), survey.target.attending
    for circuit in sinks.spikes:
        there &= ~circuit.place.mask
    for place in split_by_label(survey.ids, there, tokenizer.decode):
        mask = place.matches(sinks.report.ids)
        if not bool(place.matches(survey.ids).any()):  # no words mean it
            mask = attended(sinks.report) & (at_position(sinks.report.ids, 0) == place.is_first)
        if not bool(mask.any()):
            continue
        heads = int((sinks.report.received(mask).nanmean(-1)[layers] > READS).sum())
        if heads >= SINK_HEADS:
            rows.append(row_of("attention without a spike", place.label.words, heads=heads))
    return sorted(rows, key=lambda row: -row.get("heads"))


def seen_of(survey: Survey) -> list[Row]:
    """Return the sink rate of position 0, and how many heads attend to learned sink logits, if any do."""
    length, learned = survey.ids.shape[1], int((survey.learned.mean(-1) > READS).sum())
    rows = [row_of("attention", "sink rate", share=mean_of(survey.sink_rate, "share"), length=length, eps=READS)]
    return [*rows, row_of("attention", "learned sink logits", heads=learned)] if learned else rows


def largest_norm(survey: Survey, tokenizer: Any) -> Row:
    """Return the largest norm over the typical one that was seen anywhere."""
    ratios = survey.ratios
    layer, text, position = map(int, torch.unravel_index(ratios.argmax(), ratios.shape))
    where = f"at {tokenizer.decode([int(survey.ids[text, position])])!r} after layer {layer}"
    return row_of("norm", "largest", where, ratio=float(ratios.max()))


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
