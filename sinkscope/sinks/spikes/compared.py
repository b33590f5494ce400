"""The numbers of two `find_sinks` or `why_sink` results side by side.

Two spikes are the same if they stand at the same place and share layers; each spike has at most one partner, the one
with most common layers. A spike without a partner came or went.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sinkscope.results.notation import word_list
from sinkscope.results.result import Number
from sinkscope.sinks.spikes import cards
from sinkscope.sinks.spikes.answer_records import Conditions, Purpose
from sinkscope.sinks.spikes.records import Candidate, Outcome, SpikeResult

ATTENTION, SPIKES = "Attention", "Spikes"
COMES = 0.05
"""Share of a spike that a neuron writes whose coming or going counts: below it, the search for candidates decides."""


def numbers_beside(first: Any, second: Any) -> tuple[list[Number], list[Number]]:
    """Return the numbers of two `FindSinks`; numbers of the same spike have the same key in both lists."""
    names = matched(first.spikes, second.spikes)
    sides: list[list[Number]] = []
    for result, own in zip((first, second), names, strict=True):
        numbers = attention_numbers(result)
        for spike, name in zip(result.spikes, own, strict=True):
            numbers += spike_numbers(spike, name)
        sides.append(numbers)
    return sides[0], sides[1]


def title_of(spike: SpikeResult) -> str:
    """Return a spike by its place and layers, as its card has it."""
    return f"Spike at {spike.place.words}, layers {cards.span(*spike.layers)}"


def matched(first: Sequence[SpikeResult], second: Sequence[SpikeResult]) -> tuple[list[str], list[str]]:
    """Return a name for each spike of two results; the same spike has the same name in both."""
    names = [title_of(spike) for spike in first]
    own: dict[int, str] = {}
    pairs: list[tuple[int, int, int]] = []
    for number, spike in enumerate(first):
        for place, candidate in enumerate(second):
            common = min(spike.layers[1], candidate.layers[1]) - max(spike.layers[0], candidate.layers[0]) + 1
            if common > 0 and place_without_numbers(spike) == place_without_numbers(candidate):
                pairs.append((-common, number, place))
    taken = set[int]()
    for _, number, place in sorted(pairs):
        if number not in taken and place not in own:
            taken.add(number)
            own[place] = names[number]
    return names, [own.get(place, title_of(spike)) for place, spike in enumerate(second)]


def place_without_numbers(spike: SpikeResult) -> str:
    """Return the words for a spike's place without numbers: how many positions no words mean differs by model."""
    return re.sub(r"\d+", "", spike.place.words)


def by_number(values: Sequence[float], numbers: Sequence[int] | None = None) -> dict[str, float]:
    """Return the values of texts by the names of the texts."""
    places = range(len(values)) if numbers is None else numbers
    return {f"text {number}": float(value) for number, value in zip(places, values, strict=False)}


def attention_numbers(result: Any) -> list[Number]:
    """Return who attends where: the heads of the first spike's place, the sink rate, and places without a spike."""
    (heads,) = (number for number in result.numbers() if number.key == "heads")
    readers, rate = result.readers, result.sink_rate
    label = f"heads that attend to {readers.place}"
    numbers = [replace(heads, key=f"heads at {readers.place}", label=label, about=ATTENTION, whole=readers.total)]
    numbers.append(
        Number("sink_rate", "sink rate", rate.value, margin=rate.margin, share=True, about=ATTENTION,
               samples=by_number(rate.by_text))
    )  # fmt: skip
    for sink in result.attended:
        key, label = f"attended.{sink.place.words}", f"heads at {sink.place.words}, without a spike"
        numbers.append(Number(key, label, float(sink.heads), about=ATTENTION, comes=True))
    return numbers


def spike_numbers(spike: SpikeResult, name: str) -> list[Number]:
    """Return what is compared of one spike.

    Args:
        spike: The spike.
        name: The name that it has in both results.
    """
    numbers = [
        Number(f"{name}.there", name, cards.span(*spike.layers), about=SPIKES, comes=True),
        Number(f"{name}.ratio", "norm over the typical one", spike.ratio, margin=spike.ratio_margin,
               samples=by_number(spike.ratio_by_text, spike.text_numbers)),
    ]  # fmt: skip
    if spike.needed is not None:
        parts = spike.needed.parts
        numbers.append(Number(f"{name}.needed", "needed", word_list(parts, 6), items=parts))
    if spike.effect is not None:
        numbers += outcome_numbers(name, spike.effect.at_place, spike.text_numbers)
    numbers += [neuron_number(name, neuron, spike.text_numbers) for neuron in spike.neurons if neuron.role != "nothing"]
    for mark in spike.marks[:1]:
        numbers.append(Number(f"{name}.mark", "what marks the place", mark.part, items=mark.names))
        label = "left with the mark replaced"
        numbers.append(Number(f"{name}.marked", label, mark.left, mark.others, mark.margin, share=True))
    if spike.conditions is not None:
        numbers += condition_numbers(name, spike.conditions)
    if spike.purpose is not None:
        numbers += purpose_numbers(name, spike.purpose)
    return [number if number.about else replace(number, about=name) for number in numbers]


def outcome_numbers(name: str, outcome: Outcome, texts: Sequence[int]) -> list[Number]:
    """Return what is lost and left without the needed set, zeroed at the place."""
    numbers: list[Number] = []
    if outcome.loss is not None:
        label, samples = "nats lost without the needed", by_number(outcome.loss_by_text, texts)
        numbers.append(Number(f"{name}.loss", label, outcome.loss, margin=outcome.margin, samples=samples))
    label, samples = "left without the needed", by_number(outcome.left_by_text, texts)
    left = Number(f"{name}.left", label, outcome.left, margin=outcome.left_margin, share=True, samples=samples)
    return [*numbers, left]


def neuron_number(name: str, neuron: Candidate, texts: Sequence[int]) -> Number:
    """Return the share of a neuron."""
    return Number(
        f"{name}.{neuron.address}", f"share of {neuron.address}", neuron.share, margin=neuron.margin, share=True,
        samples=by_number(neuron.by_text, texts), site=(neuron.layer, neuron.expert, neuron.neuron),
        comes=abs(neuron.share) >= COMES,
    )  # fmt: skip


def condition_numbers(name: str, conditions: Conditions) -> list[Number]:
    """Return which causes are sufficient and necessary, and the spike that an ordinary position has under each."""
    words: Mapping[str, Sequence[str]] = {"sufficient": conditions.sufficient, "necessary": conditions.necessary}
    numbers: list[Number] = []
    for word, causes in words.items():
        numbers.append(Number(f"{name}.{word}", word, " and ".join(causes) or "none of these", items=tuple(causes)))
    for cell in conditions.cells:
        label = f"spike elsewhere by {' and '.join(cell.causes) or 'nothing'}"
        key = f"{name}.cell.{'.'.join(cell.causes)}"
        numbers.append(Number(key, label, cell.share, margin=cell.margin, share=True))
    for taken in conditions.taken:
        label = f"left at the place without {taken.cause}"
        numbers.append(Number(f"{name}.taken.{taken.cause}", label, taken.share, margin=taken.margin, share=True))
    return numbers


def purpose_numbers(name: str, purpose: Purpose) -> list[Number]:
    """Return what later tokens lose in each way of reading the place."""
    numbers: list[Number] = []
    for change in purpose.changes:
        label = f"nats lost, {change.name}"
        numbers.append(Number(f"{name}.change.{change.name}", label, change.loss, margin=change.margin))
    return numbers
