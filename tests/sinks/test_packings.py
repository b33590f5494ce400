"""What the packing of a model may not change: every answer is the same under gauges of neurons and heads, and splits.

`tests/packings.py` has the packings. Only the names of what they rename are others.
"""

from __future__ import annotations

import re

import pytest
from attack_kit import measured_spikes, options_of
from organisms import organism
from packings import GAUGES, Names, packed, split

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.notation import Head, Neuron
from sinkscope.sinks.spikes.find import find_sinks, spike_of
from sinkscope.sinks.spikes.marks import heads_that_mark
from sinkscope.sinks.spikes.records import SpikeResult, part_of

pytestmark = pytest.mark.few_texts

CLOSE = {"rel": 1e-2, "abs": 2e-3}
"""How near numbers are: a hundredth, as float32 allows."""


def renamed(part: str, names: Names) -> str:
    """The new name of a part in a file."""
    if not re.fullmatch(r"L\d+\.[NH]\d+", part):
        return part
    old = part_of(part)
    if isinstance(old, Neuron):
        layer, neuron = names.neuron(old.layer, old.neuron)
        return str(Neuron(layer, None, neuron))
    return str(Head(*names.head(old.layer, old.head)))


def same_words(text: str, names: Names) -> list[str]:
    """The words with the new names; neurons of one share may come in any order, and decimals may be rounded apart."""
    named = re.sub(r"L\d+\.[NH]\d+", lambda found: renamed(found[0], names), text)
    return sorted(re.sub(r"\d+\.\d+", "#", named).split())


def shape_of(spike: SpikeResult):
    return spike.place.words, spike.layers, spike.peak, spike.highest, spike.heads


def effects(spike: SpikeResult) -> list[float]:
    """What the needed set does, and what the busiest others do."""
    rows = [*spike.table("effects").values(), spike.named("controls", "busiest")]
    return [row.get(number) for row in rows for number in ("left", "intact", "heads", "loss") if number in row.numbers]


def test_every_measurement_says_the_same_under_gauges(tmp_path):
    o = organism()
    new, names = packed(o.model, GAUGES, 7)
    said, rows = [], []
    for model, own in ((o.model, names), (new, Names())):
        setup = Setup.open(model, **options_of(o, tmp_path))
        found, patch = find_sinks.on(setup), ss.patch.on(setup, max_repeats=64, pieces=4, length=16)
        results = [found, ss.repeat.on(setup, max_repeats=32), ss.attack.on(setup, n_tokens=24, sequences=4), patch]
        sites = {renamed(str(site), own) for site in patch.sites}
        (spike,) = found.spikes
        needed = {renamed(part, own) for part in spike.needed}
        words = [same_words(one.conclusion(), own) for one in [*results, ss.why_sink.on(setup)]]
        said.append((words, sites, patch.reason, shape_of(spike), needed))
        marking = heads_that_mark(setup, spike_of(setup), count=6)
        numbers = {renamed(row.name, own): row.get("left") for row in marking if "left" in row.numbers}
        for table in ("spike", "writers", "components", "erasers", "alone"):
            for name, row in spike.table(table).items():
                for number in ("norm_before", "norm_after", "ratio", "share", "left", "heads"):
                    numbers[f"{table} {renamed(name, own)} {number}"] = row.get(number)
        rows.append(numbers)
        assert effects(spike) == pytest.approx(effects(measured_spikes(find_sinks, "sink")[2].spikes[0]), **CLOSE)
    assert said[0] == said[1]
    assert rows[0] == pytest.approx(rows[1], nan_ok=True, **CLOSE)


@pytest.mark.parametrize(
    ("kind", "parts", "more"),
    [
        ("redundant_pair", (0.7, 0.25, 0.05), 2),
        ("redundant_pair", (3.0, -2.0), 1),
        ("sink", (0.999 / 60,) * 60 + (0.001,), 60),  # all are writers, though none alone writes 2 %; one writes less
    ],
)
def test_what_a_spike_does_is_the_same_however_many_neurons_share_the_work(kind, parts, more, tmp_path):
    """The needed set is another one; what is left without all writers, the heads and the perplexity are not."""
    o, _, found = measured_spikes(find_sinks, kind)
    new, _ = packed(o.model, [split(*o.truth.neurons[0], parts)])
    one, other = found.spikes[0], find_sinks(new, **options_of(o, tmp_path)).spikes[0]
    assert shape_of(one) == shape_of(other) and len(other.table("writers")) == len(one.table("writers")) + more
    assert effects(one) == pytest.approx(effects(other), **CLOSE)
