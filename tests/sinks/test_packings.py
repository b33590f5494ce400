"""What the packing of a model may not change: every answer is the same under gauges of neurons and heads, and splits.

`tests/packings.py` has the packings. Only the names of what they rename are others.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from attack_kit import hard_options, measured_spikes
from covering import slow
from organisms import hard
from packings import GAUGES, Names, Packing, composed, packed, split

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.find import spike_of
from sinkscope.sinks.spikes.marks import heads_that_mark
from sinkscope.sinks.spikes.records import SpikeResult, part_of

pytestmark = pytest.mark.few_texts

CLOSE = {"rel": 1e-2, "abs": 2e-3}
"""How near numbers are: a hundredth, as float32 allows."""


def renamed(part: str, names: Names) -> str:
    """The new name of a part in a file."""
    old = part_of(part)
    if isinstance(old, Neuron):
        return str(Neuron(names.neuron(old.layer, old.neuron)[0], old.expert, names.neuron(old.layer, old.neuron)[1]))
    if "H" in part:
        layer, head = names.head(old.layer, old.head)
        return f"L{layer}.H{head}"
    return part


def effects(spike: SpikeResult) -> list[float]:
    """What the needed set does, and what the busiest others do."""
    rows = [*spike.table("effects").values(), spike.named("controls", "busiest")]
    return [row.get(number) for row in rows for number in ("left", "intact", "heads", "loss") if number in row.numbers]


def shape_of(spike: SpikeResult) -> tuple[Any, ...]:
    return spike.place.words, spike.layers, spike.peak, spike.highest, spike.heads


def compare(intact: SpikeResult, new: SpikeResult, names: Names) -> None:
    """A spike in another packing that renames parts and adds none."""
    assert shape_of(intact) == shape_of(new)
    assert {renamed(part, names) for part in intact.needed} == set(new.needed)
    for table in ("spike", "writers", "components", "erasers", "alone"):
        rows = {renamed(name, names) if table != "spike" else name: row for name, row in intact.table(table).items()}
        assert set(rows) == set(new.table(table))
        for name, row in new.table(table).items():
            for number in ("norm_before", "norm_after", "ratio", "share", "left", "heads"):
                assert row.get(number) == pytest.approx(rows[name].get(number), **CLOSE), (table, name, number)
    assert effects(intact) == pytest.approx(effects(new), **CLOSE)


@pytest.mark.parametrize(
    ("name", "family", "seed"),
    [
        ("plain", "llama", 0),
        ("redundant_pair", "llama", 1),
        slow("both", "gemma2", 2),
    ],
)
def test_find_sinks_says_the_same_under_drawn_gauges(name, family, seed, tmp_path):
    h, _, found = measured_spikes(ss.find_sinks, name, family)
    new, names = composed(h.model, seed)
    again = ss.find_sinks(new, **hard_options(h, tmp_path))
    assert same_words(found.conclusion(), names) == same_words(again.conclusion(), Names())
    assert len(found.spikes) == len(again.spikes) > 0
    for spike, other in zip(found.spikes, again.spikes, strict=True):
        compare(spike, other, names)


def test_every_measurement_says_the_same_under_drawn_gauges(tmp_path):
    h = hard("plain", "llama")
    new, names = packed(h.model, [GAUGES[name] for name in ("permuted_neurons", "scaled_neurons", "permuted_heads")], 7)
    said = []
    for model, own in ((h.model, names), (new, Names())):
        setup = Setup.open(model, **hard_options(h, tmp_path))
        patch = ss.patch.on(setup, max_repeats=64, pieces=4, length=16)
        found = [ss.repeat.on(setup, max_repeats=32), ss.attack.on(setup, n_tokens=24, sequences=4), patch]
        marking = heads_that_mark(setup, spike_of(setup), count=6)
        left = {renamed(row.name, own) if row.name[0] == "L" else row.name: row.get("left") for row in marking}
        sites = {renamed(str(site), own) for site in patch.sites}
        why = ss.why_sink.on(setup).conclusion()
        said.append(([same_words(one.conclusion(), own) for one in found], sites, patch.reason, why, left))
    assert said[0][:-1] == said[1][:-1] and said[0][-1] == pytest.approx(said[1][-1], **CLOSE)


def same_words(text: str, names: Names) -> list[str]:
    """The words with the new names; neurons of one share may come in any order, and decimals may be rounded apart."""
    named = re.sub(r"L\d+\.[NH]\d+", lambda found: renamed(found[0], names), text)
    return sorted(re.sub(r"\d+\.\d+", "#", named).split())


def spike_under(name: str, packing: Packing, folder: Path) -> tuple[SpikeResult, SpikeResult]:
    """The spike of a model, and that of its packing."""
    h, _, found = measured_spikes(ss.find_sinks, name, "llama")
    new, _ = packed(h.model, [packing])
    return found.spikes[0], ss.find_sinks(new, **hard_options(h, folder)).spikes[0]


def writer_of(name: str) -> tuple[int, ...]:
    """A neuron that writes a model's spike."""
    h, _, _ = measured_spikes(ss.find_sinks, name, "llama")
    return sorted(min(h.truth.sets, key=len))[0]


@pytest.mark.parametrize(
    ("name", "parts", "more"),
    [
        ("redundant_pair", (0.7, 0.25, 0.05), 2),
        ("redundant_pair", (3.0, -2.0), 1),
        ("plain", (0.999 / 60,) * 60 + (0.001,), 60),  # all are writers, though none alone writes 2 %; one writes less
    ],
)
def test_what_a_spike_does_is_the_same_however_many_neurons_share_the_work(name, parts, more, tmp_path):
    """The needed set is another one; what is left without all writers, the heads and the perplexity are not."""
    one, other = spike_under(name, split(*writer_of(name), parts), tmp_path)
    assert shape_of(one) == shape_of(other) and len(other.table("writers")) == len(one.table("writers")) + more
    assert effects(one) == pytest.approx(effects(other), **CLOSE)
