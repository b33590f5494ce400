"""What the packing of a model may not change: every answer is the same however neurons are packed."""

from __future__ import annotations

import re

import pytest
from attack_kit import measured_spikes, options_of
from organisms import organism
from packings import gauged, split

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.sinks.spikes.find import find_sinks
from sinkscope.sinks.spikes.records import SpikeResult

pytestmark = pytest.mark.few_texts

CLOSE = {"rel": 1e-2, "abs": 2e-3}
"""How near numbers are: a hundredth, as float32 allows."""


def shape_of(spike: SpikeResult):
    return spike.place.words, spike.layers, spike.peak, spike.highest, spike.heads


def effects(spike: SpikeResult) -> list[float]:
    """What the needed set does, and what the busiest others do."""
    rows = [*spike.table("effects").values(), spike.named("controls", "busiest")]
    return [row.get(number) for row in rows for number in ("left", "intact", "heads", "loss") if number in row.numbers]


def test_every_measurement_says_the_same_under_gauges(tmp_path):
    o = organism()
    new, names = gauged(o.model, 7)
    said, numbers = [], []
    for model, own in ((o.model, names), (new, {})):

        def renamed(text: str, own: dict[str, str] = own) -> str:
            return re.sub(r"L\d+\.[NH]\d+", lambda part: own.get(part[0], part[0]), text)

        setup = Setup.open(model, **options_of(o, tmp_path))
        found, patch = ss.why_sink.on(setup), ss.patch.on(setup, max_repeats=64, pieces=4, length=16)
        attack = ss.attack.on(setup, n_tokens=24, sequences=4)
        words = [re.sub(r"\d+\.\d+", "#", renamed(one.conclusion())).split() for one in (found, patch, attack)]
        sites = {renamed(str(site)) for site in patch.sites}
        said.append(([sorted(some) for some in words], sites, patch.reason, shape_of(found.spikes[0])))
        rows = [row for result in (found, patch, attack) for row in result.findings() if row.name != "random"]
        every = {(row.table, renamed(row.name), number): row.get(number) for row in rows for number in row.numbers}
        numbers.append({key: value for key, value in every.items() if key[2] != "neutral"})  # which is on its own scale
    assert said[0] == said[1]
    assert numbers[0] == pytest.approx(numbers[1], nan_ok=True, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "parts", "more"),
    [
        ("redundant_pair", (3.0, -2.0), 1),
        ("sink", (0.999 / 60,) * 60 + (0.001,), 60),  # all are writers, though none alone writes 2 %; one writes less
    ],
)
def test_what_a_spike_does_is_the_same_however_many_neurons_share_the_work(kind, parts, more, tmp_path):
    """The needed set is another one; what is left without all writers, the heads and the perplexity are not."""
    o, _, found = measured_spikes(find_sinks, kind)
    new = split(o.model, *o.truth.neurons[0], parts)
    one, other = found.spikes[0], find_sinks(new, **options_of(o, tmp_path)).spikes[0]
    assert shape_of(one) == shape_of(other) and len(other.table("writers")) == len(one.table("writers")) + more
    assert effects(one) == pytest.approx(effects(other), **CLOSE)
