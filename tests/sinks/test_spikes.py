"""Spikes of planted models: what is said is what was planted, and every number is that of plain hooks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import plain_spikes as plain
import pytest
import torch
from attack_kit import text_file
from covering import slow
from organisms import HARD, UNSEEN, HardModel, hard
from organisms.build import FIRST, SECOND
from organisms.hard import attentions
from repository import FIGURES

import sinkscope as ss
from sinkscope.measure import Setup
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.find_sinks import find_sinks
from sinkscope.sinks.spikes.records import PartShare
from sinkscope.sinks.spikes.result import FindSinks
from sinkscope.sinks.spikes.sentences import share_left, spike_line, with_margin
from sinkscope.sinks.spikes.steps import sinks_of

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


def options(h: HardModel, folder: Path) -> dict[str, Any]:
    rows, seed = 20, 0
    if h.truth.share < 1:
        rows, seed = 40, 1  # with 0, two of twelve texts of one model begin with a token that is marked: too few
    text = text_file(h, folder, rows, seed=seed)
    return {"tokenizer": h.tokenizer, "text": text, "bos": None if h.truth.bos else False}


def words_of(h: HardModel, place) -> str:
    if place == FIRST:
        return "the first token" if h.truth.share == 1 else "some first tokens"
    if place == SECOND:
        return "at position 1"
    return repr(h.tokenizer.decode([place]))


@pytest.mark.parametrize(("name", "family"), [*CASES, *PLACED])
def test_the_planted_spikes_their_neurons_and_their_places_are_found_and_no_others(name, family, tmp_path):
    h = hard(name, family)
    found = find_sinks(h.model, max_repeats=8, **options(h, tmp_path))
    assert bool(found.spikes) == bool(h.truth.spike)
    for place in h.truth.spike:
        words, said = words_of(h, place), [f"{spike.place.words} {spike.place.token!r}" for spike in found.spikes]
        assert any(words in one for one in said), said
    planted = {frozenset(one) for one in h.truth.sets}
    for spike in found.spikes:
        assert spike.needed is not None
        if planted:
            assert frozenset(neuron.site for neuron in spike.needed.neurons) in planted
            assert spike.needed.left == pytest.approx(0, abs=0.05) and spike.needed.random.left > 0.95
        else:
            assert not spike.needed.neurons
        assert sum(one.share for one in spike.writers) == pytest.approx(1, abs=0.05)
    said = " ".join([found.conclusion(), *found.details()])
    assert "gone" not in said and "undecided" not in said
    assert len(found.details()) <= 5


@pytest.mark.parametrize(("name", "family"), [*CASES, *PLACED])
def test_the_heads_that_are_counted_are_those_that_attend_in_the_models_own_attention(name, family, tmp_path):
    h = hard(name, family)
    setup = Setup.open(h.model, **options(h, tmp_path))
    found, ids = find_sinks.on(setup, max_repeats=8), sinks_of(setup).survey.ids
    own = attentions(h.model, ids).float()  # layer text head query key
    if family == "lfm2":
        pytest.skip("layers without attention are not in the model's own list")
    windowless = own[:, :, :, -1, 0] > 0
    mean = own[:, :, :, 1:, 0].mean((1, 3))
    given = torch.tensor([[torch.nan if one is None else one for one in row] for row in found.heads])
    full = windowless.all(1) & given.isfinite()
    torch.testing.assert_close(given[full], mean[full], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("name", "family"), [("plain", "llama"), ("both", "gemma2"), ("redundant_pair", "gpt2")])
def test_shares_and_what_is_left_are_those_of_plain_hooks(name, family, tmp_path):
    h = hard(name, family)
    setup = Setup.open(h.model, **options(h, tmp_path))
    found, ids = find_sinks.on(setup, max_repeats=8), sinks_of(setup).survey.ids
    seen = plain.run(h.model, ids)
    compare(h.model, ids, seen, found)


def compare(model, ids, seen: plain.Pass, found: FindSinks):
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
        left = plain.without(model, ids, own, [(one.layer, one.neuron) for one in spike.needed.neurons])
        assert spike.needed.left == pytest.approx(left.left, abs=1e-3)
        assert spike.needed.heads == (plain.readers(plain.run(model, ids[:4]).attention, own), left.heads)
        assert spike.needed.perplexity == pytest.approx(left.perplexity, rel=1e-3)


def test_the_model_in_the_package_has_the_planted_neuron_and_the_file_returns_it(tmp_path):
    found = ss.find_sinks()
    assert found.needed == (Neuron(1, None, 338),)
    assert found.conclusion() == (
        "20 of 48 heads give the first token more than 0.3 of their attention, with or without <s>: 20 in layers 2-5."
    )
    again = FindSinks.load(found.save(tmp_path / "sinks.json"))
    assert again.to_dict() == found.to_dict() and again.summary() == found.summary()
    patch = ss.SinkPatch.from_result(again)
    assert patch.checked_sites == (Neuron(1, None, 338),)


@pytest.mark.parametrize(
    ("shares", "it"),
    [((-0.5, -0.41), "it"), ((-0.3, -0.21), "most of it"), ((-0.3, -0.19), "part of it"), ((-0.06,), "part of it")],
)
def test_erasers_take_away_as_much_as_their_shares(shares, it):
    found, spike = spike_of_figure()
    erasers = tuple(PartShare(f"mlp {3 + number}", share, None) for number, share in enumerate(shares))
    said = spike_line(replace(spike, erasers=erasers), found.typical_norm)
    assert said.endswith(f" {'take' if len(shares) > 1 else 'takes'} {it} away again.")


def spike_of_figure():
    """The result of the model in the package, and its spike at the first token."""
    found = FindSinks.load(FIGURES / "find_sinks.json")
    (spike,) = [one for one in found.spikes if one.place.words == "the first token"]
    return found, spike


def test_the_norm_is_compared_with_the_typical_one_of_its_layer():
    """Where dimensions that are large at all positions hide a spike, what is compared leaves them out, and says so."""
    found, spike = spike_of_figure()
    plain_ratio = spike.norm / found.typical_norm[spike.peak]
    assert f", {plain_ratio:,.0f} times the typical one. " in spike_line(spike, found.typical_norm)
    hidden = spike_line(replace(spike, ratio=7.5), [spike.norm / 2] * len(found.typical_norm))
    assert ", 7.5 times the typical one beside what is large at all positions. " in hidden


@torch.no_grad()
def left_without(model, module, ids, own: plain.PlainSpike) -> float:
    """What is left of a spike of the first token where a module writes there its mean over ordinary positions."""
    written: list[torch.Tensor] = []

    def replaced(_module, _args, out):
        written.append(plain.first(out).clone())
        plain.first(out)[:, 0] = written[0][own.ordinary].mean(0)

    intact = (plain.run(model, ids).states[own.peak + 1, :, 0] - own.mean) @ own.direction
    handle = module.register_forward_hook(replaced)
    edited = (plain.run(model, ids).states[own.peak + 1, :, 0] - own.mean) @ own.direction
    handle.remove()
    return float(edited.mean() / intact.mean())


def test_the_circuit_says_what_marks_the_place_beside_other_components_as_plain_hooks_do():
    found = ss.circuit(max_repeats=4)
    model = ss.load("bundled")
    ids = sinks_of(Setup.open("bundled")).survey.ids
    (own,) = plain.spikes(plain.run(model, ids))
    first, second = plain.blocks(model)[:2]
    mark, *others = [first.self_attn, model.model.embed_tokens, first.mlp, second.self_attn]
    left = found.spikes[0].marks[0]
    assert left.part == "attention 0"
    assert left.left == pytest.approx(left_without(model, mark, ids, own), abs=1e-3)
    beside = median(left_without(model, other, ids, own) for other in others)
    assert left.others == pytest.approx(beside, abs=1e-3)
    assert found.conclusion() == (
        "The attention of layer 0 marks the first token: without it, 0% of the spike remains (without others: 100%), "
        "and 9 of 20 heads still attend there."
    )
    assert found.details()[:2] == [
        ss.find_sinks().conclusion(),
        "With L0.H0 replaced at the place, 0% of the spike remains, and 1 of 20 heads still attend there "
        "(random heads: 102%, 20 heads).",
    ]


def test_a_streamed_model_gives_what_the_same_model_gives_in_memory(tmp_path):
    from sinkscope.opening.open import open_stream

    h = hard("plain", "llama")
    h.model.save_pretrained(tmp_path / "m")
    h.tokenizer.save_pretrained(tmp_path / "m")
    text = options(h, tmp_path)
    whole = find_sinks(h.model, max_repeats=8, **text)
    streamed = find_sinks(open_stream(tmp_path / "m"), max_repeats=8, text=text["text"])
    assert streamed.needed == whole.needed and streamed.spikes[0].layers == whole.spikes[0].layers
    assert streamed.spikes[0].needed.heads == whole.spikes[0].needed.heads
    assert streamed.spikes[0].needed.perplexity is None  # it is read without its unembedding


@pytest.mark.parametrize(("share", "words"), [(-0.04, "none"), (-0.004, "0%"), (0.153, "15%")])
def test_no_negative_share_is_left(share, words):
    assert share_left(share) == words


@pytest.mark.parametrize(("margin", "words"), [(None, "2"), (0.4, "2"), (2.0, "2 (± 2)"), (7.2, "2 (at most 9)")])
def test_no_number_reaches_below_zero_by_its_margin(margin, words):
    assert with_margin(2, margin) == words
