"""The circuit of a sink, step by step, and the measurement `find_sinks`.

1. Survey: one pass over texts of four kinds reads norms and attention; half of the texts choose, half report.
2. Spikes: places, directions and runs of layers in which the residual stream stands out.
3. Writers and needs: which neurons write a spike, by shares, and the fewest that suffice, by their removal.
4. Marks: what makes the writers fire at the place (`why_sink`).
5. Effects: what the needed neurons do at the place, beside others that write as much.
6. Readers: which heads attend to the place.
7. Conditions: what makes a position the place: its token, seeing only itself, its position id; and why heads read the
   place: the spike makes its state constant (`why_sink`).
8. Purpose: what later tokens lose without the place (`why_sink`).

Both also follow copies of a token along each spike of the first token, and survey the text once more with the other
choice of BOS.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sinkscope.errors import UnsupportedError, warn
from sinkscope.measure import Natural, Setup, measurement
from sinkscope.measure.margin import margin_of
from sinkscope.models.text import beginning, resolve_bos
from sinkscope.sinks.spikes.answer_records import Answers, Conditions, Constancy, Purpose
from sinkscope.sinks.spikes.conditions import conditions_of
from sinkscope.sinks.spikes.constancy import constancy_of
from sinkscope.sinks.spikes.copies import copies_of
from sinkscope.sinks.spikes.effects import SpikeEffects, count_readers, effects_of
from sinkscope.sinks.spikes.marks import marks_of
from sinkscope.sinks.spikes.needs import like_needs, needs_of
from sinkscope.sinks.spikes.places import at_position, split_by_label
from sinkscope.sinks.spikes.purpose import purposes_of
from sinkscope.sinks.spikes.records import (
    Attended,
    Copies,
    Largest,
    MarkLeft,
    OfKind,
    OtherBos,
    OtherSpike,
    Readers,
    SinkRate,
    SpikeResult,
)
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.spike import Spike, attended, find_spikes, over_typical
from sinkscope.sinks.spikes.spike_circuit import SpikeCircuit, record_of
from sinkscope.sinks.spikes.survey import Survey, survey_of
from sinkscope.sinks.spikes.writers import writers_of
from sinkscope.sinks.thresholds import READS, SINK_HEADS
from sinkscope.sinks.tokens import Mask, pick_tokens, prefix_of, repetition_limit

FEW_COPIES = 64  # copies that `find_sinks` tries
FIND_SINKS = frozenset({"effects", "copies"})
ALL_PARTS = FIND_SINKS | {"marks", "conditions", "purpose"}
OTHER_TEXTS = 8  # texts that are read with the other choice of BOS, two of each kind
NO_FIRST_SPIKE = "No neurons are known that a norm spike at the first token needs"


@measurement(loading="fits")
def find_sinks(setup: Setup, *, tokens: Sequence[str] | None = None, max_repeats: Natural | None = None) -> FindSinks:
    """Find the norm spikes of a model, the fewest neurons that make them, and the heads that attend to their places.

    A spike is a place, a direction in the residual stream and a run of layers. One half of the texts finds spikes and
    the neurons that they need; the other half tells what these do at the place, beside others that write as much (Sun
    et al. 2024; Yona et al. 2025, section 4).

    Args:
        tokens: Words to repeat, one token each. By default five words of the text.
        max_repeats: Number of copies of each. By default 64, or what the
            context holds.
    """
    limit = repetition_limit(setup.target, max_repeats)
    if max_repeats is None:
        limit = min(FEW_COPIES, limit)
    return FindSinks(**fields_of(setup, tokens, limit, FIND_SINKS))


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


def _sinks_of(setup: Setup) -> Sinks:
    # Step 1: survey
    survey, report = survey_of(setup, setup.bos), survey_of(setup, setup.bos, "report")
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


def measured_of(setup: Setup, number: int) -> SpikeEffects | None:
    """Take step 5 for a spike, once for each setup; None for a spike that is like an earlier one or needs nothing.

    Args:
        setup: The model and its text.
        number: Number of the spike.
    """
    return setup.once((measured_of, setup.seed, number), partial(_measured_of, setup, number))


def _measured_of(setup: Setup, number: int) -> SpikeEffects | None:
    sinks = sinks_of(setup)
    circuit, numbered = sinks.spikes[number], dict[int, Spike]()
    if circuit.like is not None:
        return None
    for other, other_circuit in enumerate(sinks.spikes):
        if other != number and other_circuit.like is None and other_circuit.reported.survey is circuit.reported.survey:
            numbered[other] = other_circuit.reported
    return effects_of(circuit.reported, circuit.needs, sinks.survey, numbered, setup.seed)


def answers_of(sinks: Sinks, seed: int, parts: Set[str]) -> dict[int, Answers]:
    """Return, by the number of each spike of the first token, what makes its place and what the place is for."""
    asked = [number for number, circuit in enumerate(sinks.spikes) if circuit.place.is_first and circuit.like is None]
    asked = [number for number in asked if sinks.spikes[number].reported.survey is sinks.report]
    if sinks.spikes and not asked and parts & {"conditions", "purpose"}:
        warn(
            f"what makes the sink is asked of the first token, and this spike is at {sinks.spikes[0].place.label.words}"
        )
    circuits = [sinks.spikes[number] for number in asked]
    spikes = [circuit.reported for circuit in circuits]
    conditions, purposes, constancies = list[Conditions](), list[Purpose](), list[Constancy | None]()
    try:
        if "conditions" in parts:
            conditions = conditions_of(spikes, seed)
        for spike, answer in zip(spikes, conditions, strict=False):
            begins = min(spike.layers[0] for spike in spikes)
            constancies.append(constancy_of(spike, begins, answer.sufficient, seed))
        if "purpose" in parts:
            purposes = purposes_of(sinks.report, [circuit.first_writer for circuit in circuits], seed)
    except UnsupportedError as error:  # no key can be hidden in this model
        warn(f"what makes the sink, and what it is for, is not measured: {error}")
    answers: dict[int, Answers] = {}
    for order, number in enumerate(asked):
        answers[number] = Answers(
            conditions[order] if conditions else None,
            purposes[order] if purposes else None,
            constancies[order] if constancies else None,
        )
    return answers


def fields_of(setup: Setup, tokens: Sequence[str] | None, limit: int, parts: Set[str]) -> dict[str, Any]:
    """Measure parts of the circuit, read copies of some tokens, and who attends where; return the fields of a result.

    Args:
        setup: The model and its text.
        tokens: Words to repeat. None: words of the text.
        limit: Largest number of copies.
        parts: What is measured: "effects", "copies", "marks", "conditions", "purpose".
    """
    sinks, target, results = sinks_of(setup), setup.target, list[SpikeResult]()
    words, at_first, report = pick_tokens(setup, tokens), sinks.at_first, sinks.report
    spikes = [circuit.spike for circuit in at_first]
    copies = [tuple[Copies, ...]()] * len(spikes)
    if "copies" in parts:
        copies = copies_of(target, spikes, words, prefix_of(setup, words), limit, setup.progress)
    # Steps 7 and 8: conditions and purpose
    answers = answers_of(sinks, setup.seed, parts)
    for number, circuit in enumerate(sinks.spikes):
        own = copies[at_first.index(circuit)] if circuit in at_first else ()
        # Step 4: marks
        marked: tuple[MarkLeft, ...] = ()
        if "marks" in parts:
            marked = marks_of(circuit, setup.seed)
        # Step 5: effects
        measured: SpikeEffects | None = None
        if "effects" in parts:
            measured = measured_of(setup, number)
        results.append(record_of(circuit, measured, marked, own, answers.get(number, Answers())))
        setup.progress("effects", number + 1, len(sinks.spikes))
    setup.record(texts=len(report.ids), max_repeats=limit)
    # Step 6: readers
    first = at_position(report.ids, 0)
    heads = torch.full((target.n_layers, target.n_heads), torch.nan)
    heads[target.attending] = report.received(first).mean(-1)[target.attending]
    readers = readers_of(report, "the first token", first)
    if results and results[0].heads and sinks.spikes[0].reported.survey is report:
        readers = readers_of(report, results[0].place.words, sinks.spikes[0].reported.place.mask)
    return {
        "spikes": tuple(results),
        "readers": readers,
        "attended": attended_places(sinks, setup.tokenizer),
        "learned_heads": int((report.learned.mean(-1) > READS).sum()),
        "largest": largest_norm(report, setup.tokenizer),
        "heads": heads.numpy(),
        "bos": other_bos(setup),
        "sink_rate": rate_of(report),
        "typical_norm": tuple(report.typical_norm),
        "first_token_norm": tuple(report.first_norm),
        "layers_read": target.n_layers,
        "first_ids": tuple(beginning(setup.tokenizer, setup.bos)),
    }


def rate_of(survey: Survey) -> SinkRate:
    """Return the sink rate of position 0 over the texts of a survey."""
    rate, length = survey.sink_rate, survey.ids.shape[1]
    margin = margin_of(rate.numpy())
    return SinkRate(READS, length, len(rate), float(rate.mean()), margin, tuple(rate.tolist()))


def readers_of(survey: Survey, place: str, mask: Mask) -> Readers:
    """Return heads that attend to a place, in the texts that have it."""
    there = mask.any(1)
    received, kinds = survey.received(mask)[survey.target.attending][:, :, there], list[OfKind]()
    heads, margin = count_readers(received)
    by_text = (received > READS).flatten(0, 1).sum(0).tolist()
    own = [kind for kind, has in zip(survey.kinds, there.tolist(), strict=True) if has]
    for kind in dict.fromkeys(own):
        if kind:
            some = torch.tensor([of_text == kind for of_text in own])
            kinds.append(OfKind(kind, *count_readers(received[..., some])))
    total = received[..., 0].numel()
    return Readers(place, heads, total, margin, received.shape[2], tuple(by_text), tuple(kinds))


def attended_places(sinks: Sinks, tokenizer: Any) -> tuple[Attended, ...]:
    """Return places that heads attend to and at which there is no spike."""
    survey = sinks.survey
    there, layers = attended(survey), survey.target.attending
    for circuit in sinks.spikes:
        there &= ~circuit.place.mask
    spikeless: list[Attended] = []
    for place in split_by_label(survey.ids, there, tokenizer.decode):
        mask = place.matches(sinks.report.ids)
        if not bool(place.matches(survey.ids).any()):  # no words mean it
            mask = attended(sinks.report) & (at_position(sinks.report.ids, 0) == place.is_first)
        if not bool(mask.any()):
            continue
        heads = int((sinks.report.received(mask).nanmean(-1)[layers] > READS).sum())
        if heads >= SINK_HEADS:
            spikeless.append(Attended(place.label, heads))
    return tuple(sorted(spikeless, key=lambda sink: -sink.heads))


def largest_norm(survey: Survey, tokenizer: Any) -> Largest:
    """Return the largest norm over the typical one that was seen anywhere."""
    ratios = survey.ratios
    layer, text, position = map(int, torch.unravel_index(ratios.argmax(), ratios.shape))
    token = tokenizer.decode([int(survey.ids[text, position])])
    return Largest(float(ratios.max()), token, position, layer)


def other_bos(setup: Setup) -> OtherBos | None:
    """Survey the text with the other choice of BOS; None if there is no BOS token."""
    bos = resolve_bos(setup.tokenizer, setup.target.config, None) if setup.bos is None else None
    if setup.bos is None and bos is None:
        return None
    survey, spikes = survey_of(setup, bos, "report", OTHER_TEXTS), list[OtherSpike]()
    for spike in find_spikes(survey, setup.tokenizer):
        ratio = float(over_typical(survey, spike.place.mask)[spike.highest].mean())
        spikes.append(OtherSpike(spike.place.label, spike.layers, ratio))
    token = setup.tokenizer.decode([bos if bos is not None else setup.bos])
    received = readers_of(survey, "the first token", at_position(survey.ids, 0))
    return OtherBos(bos is not None, token, received.heads, received.margin, tuple(spikes))
