"""Spikes of planted models: what is said is what was planted, and every number is that of plain hooks."""

from __future__ import annotations

from statistics import median

import plain_spikes as plain
import pytest
import torch
from attack_kit import measured_spikes, words_of
from covering import slow
from organisms import HARD, UNSEEN

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.edited import Batch
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


@pytest.mark.few_texts
@pytest.mark.parametrize(("name", "family"), [*CASES, *PLACED])
def test_the_planted_spikes_their_neurons_places_and_heads_are_found_and_no_others(name, family):
    h, setup, found = measured_spikes(find_sinks, name, family)
    assert bool(found.spikes) == bool(h.truth.spike)
    for place in h.truth.spike:
        words, said = words_of(h, place), [f"{spike.place.words} {spike.place.token!r}" for spike in found.spikes]
        assert any(words in one for one in said), said
    planted = {frozenset(one) for one in h.truth.sets}
    for spike in found.spikes:
        assert spike.needed
        if planted:
            assert frozenset(neuron.site for neuron in spike.needed_neurons) in planted
            assert spike.named("spike", "needed").get("left") == pytest.approx(0, abs=0.05)
            needed = {name for name, row in spike.table("writers").items() if row.note == "needed"}
            assert set(spike.needed) == needed
            assert bool(spike.table("effects")) == (spike.like is None) == bool(spike.table("controls"))
            if spike.table("controls"):
                left = spike.named("controls", "busiest").numbers.get("left")
                assert left is None or left.value > 0.9 or spike.place.words != "the first token"
        else:
            assert not spike.needed_neurons
        assert sum(row.get("share") for row in spike.table("components").values()) == pytest.approx(1, abs=0.05)
    assert len(found.details()) <= 5
    plain.check_heads(h.model, sinks_of(setup).report.ids, found.heads)


@pytest.mark.few_texts
@pytest.mark.parametrize(("name", "family"), [("plain", "llama"), ("both", "gemma2"), ("redundant_pair", "gpt2")])
def test_shares_and_what_is_left_are_those_of_plain_hooks(name, family):
    h, setup, found = measured_spikes(find_sinks, name, family)
    model, ids = h.model, sinks_of(setup).report.ids
    seen = plain.run(model, ids)
    expected = plain.spikes(seen)
    assert sorted(one.layers for one in found.first_spikes) == [(one.first, one.last) for one in expected]
    for spike in found.first_spikes:
        own = next(one for one in expected if (one.first, one.last) == spike.layers)
        norm = spike.named("spike", "norm").get("norm_after")
        assert spike.peak == own.peak and norm == pytest.approx(own.norm, rel=1e-3)
        shares = plain.mlp_shares(seen, own)
        for name, row in spike.table("components").items():
            if name.startswith("mlp "):
                assert row.get("share") == pytest.approx(shares[int(name[4:])], abs=1e-3)
        neurons = [(one.layer, one.neuron) for one in spike.needed_neurons]
        for name, at, texts in (("at place", 0, len(ids)), ("everywhere", None, min(8, len(ids)))):
            left, row = plain.without(model, ids[:texts], own, neurons, at), spike.named("effects", name)
            assert row.get("left") == pytest.approx(left.left, abs=1e-3)
            assert row.get("intact") == plain.readers(plain.received(seen.attention)[..., :texts], own)
            assert row.get("heads") == left.heads and row.get("tokens") == texts * (ids.shape[1] - 2)
            assert row.get("loss") == pytest.approx(left.loss, abs=1e-3)
        left = spike.named("effects", "at place").get("left")
        assert spike.named("spike", "needed").get("left") == pytest.approx(left, abs=1e-3)


SUFFICES = (
    "L1.N338 suffices for the spike at the first token: zeroed there, it costs 0.15 (± 0.05) nats a token, no set of "
    "others writes as much (busiest: 2.51)."
)
"""What is said of the model in the package: two thirds of its small MLP write less, in norm, than that neuron."""


@pytest.fixture(scope="module")
def bundled() -> Setup:
    return Setup.open(ss.load("bundled"))


def test_the_model_in_the_package_has_the_planted_neuron_and_the_file_returns_it(bundled, tmp_path):
    found = find_sinks.on(bundled)
    assert found.needed == (Neuron(1, None, 338),)
    assert found.conclusion() == SUFFICES
    again = FindSinks.load(found.save(tmp_path / "sinks.json"))
    assert again.to_dict() == found.to_dict() and again.text() == found.text()
    patch = ss.SinkPatch.from_result(again)
    assert patch.checked_sites == (Neuron(1, None, 338),)


def test_the_circuit_says_what_marks_the_place_beside_other_components_as_plain_hooks_do(bundled):
    """The mark is measured in texts that did not choose it, the others in those that did."""
    model, sinks, found = bundled.target.model, sinks_of(bundled), ss.why_sink.on(bundled)
    outcomes: list[tuple[float, tuple[int, int]]] = []
    chose, report = sinks.survey.ids, sinks.report.ids
    for ids, parts in ((report, ("attention 0",)), (chose, ("embedding", "mlp 0", "attention 1"))):
        seen = plain.run(model, ids)
        (own,) = plain.spikes(seen)
        outcomes += [plain.without_part(model, ids, seen, own, part) for part in parts]
    mark, *others = outcomes
    left = found.spikes[0].table("marks")["attention 0"]
    assert left.get("left") == pytest.approx(mark[0], abs=1e-3)
    assert left.get("others") == pytest.approx(median(other for other, _ in others), abs=1e-3)
    assert found.details()[0] == SUFFICES
    assert found.conclusion().startswith("A position that sees only itself becomes the sink: ")
    spike_card = next(card for card in found.cards() if card.title.startswith("Spike"))
    said = dict(spike_card.rows)["marks"]
    assert said == "attention 0 0% left without it, 101% without others"


@pytest.mark.parametrize("everywhere", [False, True])
@torch.no_grad()
def test_neurons_are_zeroed_at_the_place_alone_or_everywhere(bundled, everywhere):
    """What the down projection of the planted neuron gets at each position, beside the intact model."""
    spike = sinks_of(bundled).spikes[0].spike
    batch = Batch(
        (spike,),
        spike.survey.ids[:2],
        (spike.place.mask[:2],),
        [(Neuron(1, None, 338),)],
        everywhere,
        torch.zeros(2, dtype=torch.long),
    )
    seen = []
    down = bundled.target.model.model.layers[1].mlp.down_proj
    hook = down.register_forward_hook(lambda module, args, output: seen.append(args[0][..., 338].clone()))
    bundled.target.forward(batch.ids)
    with batch.acting():
        bundled.target.forward(batch.ids)
    hook.remove()
    intact, edited = seen
    zeroed = batch.places[0] | everywhere
    assert edited[zeroed].eq(0).all() and edited[~zeroed].equal(intact[~zeroed]) and intact.ne(0).all()
