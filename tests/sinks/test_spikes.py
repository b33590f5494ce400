"""Spikes of planted models: what is said is what was planted, and every number is that of plain hooks."""

from __future__ import annotations

from statistics import median

import plain_spikes as plain
import pytest
from attack_kit import measured_spikes, words_of
from covering import slow
from organisms import HARD, UNSEEN

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.find import find_sinks, sinks_of
from sinkscope.sinks.spikes.result import FindSinks

KINDS = HARD | UNSEEN
CASES = []
for number, (name, families) in enumerate(KINDS.items()):
    for family in families:
        one = (name, family)
        CASES.append(one if family == families[number % len(families)] else slow(*one))
PLACED = [
    ("decoy_spike", "neox"),
    ("two_sinks", "llama"),
    ("decorative_head", "neox"),
    ("second_special", "llama"),
    ("two_delimiters", "llama"),
    slow("two_sinks", "mixtral"),
    slow("two_sinks", "gemma2"),
    slow("two_delimiters", "gpt2"),
    slow("all_specials", "qwen3"),
    slow("hybrid", "lfm2"),
]


@pytest.mark.parametrize(("name", "family"), [*CASES, *PLACED])
def test_the_planted_spikes_their_neurons_places_and_heads_are_found_and_no_others(name, family):
    h, setup, found = measured_spikes(find_sinks, name, family)
    assert bool(found.spikes) == bool(h.truth.spike)
    for place in h.truth.spike:
        words, said = words_of(h, place), [f"{spike.place.words} {spike.place.token!r}" for spike in found.spikes]
        assert any(words in one for one in said), said
    planted = {frozenset(one) for one in h.truth.sets}
    for spike in found.spikes:
        assert spike.needed is not None
        if planted:
            assert frozenset(neuron.site for neuron in spike.needed.neurons) in planted
            assert spike.needed.left == pytest.approx(0, abs=0.05)
            assert abs(spike.without_writers.left) < 0.05 and spike.without_writers.random.left > 0.95
            assert {neuron.site for neuron in spike.needed.neurons} <= {one.site for one in spike.neurons}
        else:
            assert not spike.needed.neurons
        assert sum(one.share for one in spike.writers) == pytest.approx(1, abs=0.05)
    assert len(found.details()) <= 5
    plain.check_heads(h.model, sinks_of(setup).survey.ids, found.heads)


@pytest.mark.parametrize(("name", "family"), [("plain", "llama"), ("both", "gemma2"), ("redundant_pair", "gpt2")])
def test_shares_and_what_is_left_are_those_of_plain_hooks(name, family):
    h, setup, found = measured_spikes(find_sinks, name, family)
    model, ids = h.model, sinks_of(setup).survey.ids
    seen = plain.run(model, ids)
    expected = plain.spikes(seen)
    assert sorted(one.layers for one in found.first_spikes) == [(one.first, one.last) for one in expected]
    for spike in found.first_spikes:
        own = next(one for one in expected if (one.first, one.last) == spike.layers)
        assert spike.peak == own.peak and spike.norm == pytest.approx(own.norm, rel=1e-3)
        shares = plain.mlp_shares(seen, own)
        for writer in spike.writers:
            if writer.part.startswith("mlp "):
                assert writer.share == pytest.approx(shares[int(writer.part[4:])], abs=1e-3)
        assert spike.needed is not None
        without = spike.without_writers
        left = plain.without(model, ids, own, [(one.layer, one.neuron) for one in spike.neurons])
        assert without.left == pytest.approx(left.left, abs=1e-3)
        assert without.heads == (plain.readers(seen.attention, own), left.heads)
        assert without.perplexity == pytest.approx(left.perplexity, rel=1e-3)
        left = plain.without(model, ids, own, [(one.layer, one.neuron) for one in spike.needed.neurons])
        assert spike.needed.left == pytest.approx(left.left, abs=1e-3)


HEADS = (
    "20 of 48 heads give the first token more than 0.3 of their attention; ablating L1.N338 cuts it by 85% (random "
    "neurons: 0%)."
)
"""What is said of the model in the package."""


@pytest.fixture(scope="module")
def bundled() -> Setup:
    return Setup.open(ss.load("bundled"))


def test_the_model_in_the_package_has_the_planted_neuron_and_the_file_returns_it(bundled, tmp_path):
    found = find_sinks.on(bundled)
    assert found.needed == (Neuron(1, None, 338),)
    assert found.conclusion() == HEADS
    again = FindSinks.load(found.save(tmp_path / "sinks.json"))
    assert again.to_dict() == found.to_dict() and again.summary() == found.summary()
    patch = ss.SinkPatch.from_result(again)
    assert patch.checked_sites == (Neuron(1, None, 338),)


def test_the_circuit_says_what_marks_the_place_beside_other_components_as_plain_hooks_do(bundled):
    model, ids = bundled.target.model, sinks_of(bundled).survey.ids
    found, seen = ss.circuit.on(bundled, max_repeats=4), plain.run(model, ids)
    (own,), parts = plain.spikes(seen), ("attention 0", "embedding", "mlp 0", "attention 1")
    mark, *others = [plain.without_part(model, ids, seen, own, part) for part in parts]
    left = found.spikes[0].marks[0]
    assert (left.part, left.heads) == ("attention 0", mark[1])
    assert left.left == pytest.approx(mark[0], abs=1e-3)
    assert left.others == pytest.approx(median(other for other, _ in others), abs=1e-3)
    assert found.conclusion() == (
        "The attention of layer 0 marks the first token: without it, 0% of the spike remains (without others: 100%), "
        "and 10 of 20 heads attend there."
    )
    assert found.details()[0] == HEADS
    said = dict(found.cards()[0].rows)["marks"]
    assert said.startswith("without attention 0 0%, 10 heads   without L0.H0 0%, 1 head")
    assert {row["part"] for row in found.rows() if row["role"] == "mark"} == {"attention 0", "L0.H0"}
