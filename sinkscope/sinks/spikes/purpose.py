"""Step 8, the purpose: what later tokens lose without the place, or with another value there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sinkscope.sinks.spikes.cases import CaseReading, case_of
from sinkscope.sinks.spikes.effects import SpikeCircuit
from sinkscope.sinks.spikes.row_edits import OtherValue
from sinkscope.sinks.spikes.spike import Spike, at_position
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.why_tables import Purpose, PurposeKey

TEXTS = 8  # two of each kind
BEGIN = 16  # tokens from here on are read: all come after the key that is hidden
KEYS = slice(4, 12)  # ordinary keys; the one with the most attention is hidden


@torch.no_grad()
def purpose_of(circuits: Sequence[SpikeCircuit]) -> list[list[Purpose]]:
    """Ask what the attention to the first token is for, of each of its spikes.

    Args:
        circuits: The spikes, each with what it needs; layers after its first writer are changed.

    Returns:
        Rows of each; none of short texts, and of a model that is streamed.
    """
    spike = circuits[0].reported
    survey = spike.survey
    if survey.ids.shape[1] <= 2 * BEGIN or not survey.target.resident:
        return [[] for _ in circuits]
    in_all_layers = rows_of_place(spike)
    most_attended = most_attended_key(survey)
    return [[*in_all_layers, *rows_of_spike(circuit, most_attended)] for circuit in circuits]


def rows_of_place(spike: Spike) -> list[Purpose]:
    """Read the intact texts, and hide the place in all layers, which is the same for all spikes of the place."""
    survey = spike.survey
    layers = survey.target.attending
    texts = case_of(spike, n_texts=TEXTS)
    intact = Purpose(key=PurposeKey.INTACT, heads=texts.read(layers, BEGIN).heads)
    hidden = purpose_row(PurposeKey.HIDDEN_EVERYWHERE, texts.hiding(spike.place.mask).read(layers, BEGIN))
    # The next position may take over.
    at_second = replace(spike, place=replace(spike.place, mask=at_position(survey.ids, 1)))
    second = case_of(at_second, n_texts=TEXTS).hiding(at_position(survey.ids, 0))
    return [intact, replace(hidden, taker_heads=second.read(layers, BEGIN).heads)]


def rows_of_spike(circuit: SpikeCircuit, most_attended: int) -> list[Purpose]:
    """Change the place in the layers after the first writer of a spike; as a control, hide the most attended key."""
    spike = circuit.reported
    layers = spike.survey.target.attending
    later = circuit.later_layers
    texts = case_of(spike, n_texts=TEXTS)
    other_key = at_position(spike.survey.ids, most_attended)
    hidden = texts.hiding(spike.place.mask, later).read(layers, BEGIN)
    zero = texts.under(OtherValue("zero", later)).read(layers, BEGIN)
    mean = texts.under(OtherValue("mean", later)).read(layers, BEGIN)
    control = texts.hiding(other_key, later).read(layers, BEGIN)
    rows = [
        purpose_row(PurposeKey.HIDDEN, hidden),
        purpose_row(PurposeKey.VALUE_ZERO, zero),
        purpose_row(PurposeKey.VALUE_MEAN, mean),
        replace(purpose_row(PurposeKey.OTHER_HIDDEN, control), other=most_attended),
    ]
    if circuit.hidden is not None:  # one number: over all texts that report
        rows[0] = replace(rows[0], loss=circuit.hidden.loss, tokens=circuit.hidden.tokens)
    return [replace(row, since=circuit.since) for row in rows]


def purpose_row(key: PurposeKey, reading: CaseReading) -> Purpose:
    """Return the row of what was read."""
    return Purpose(key=key, heads=reading.heads, loss=reading.loss, tokens=reading.tokens)


def most_attended_key(survey: Survey) -> int:
    """Return the ordinary position that gets the most attention."""
    received = survey.attention[survey.target.attending].mean((0, 1, 2))
    return KEYS.start + int(received[KEYS].argmax())
