"""Candidates and their controls, on layers whose random neurons matter too."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
from organisms import SharedSink, organism
from organisms import shared_sink as make_shared_sink

from sinkscope.models.target import Target
from sinkscope.sinks.first_token.find import find_sinks
from sinkscope.sinks.first_token.neurons import LayerView, columns, prove, view_layer


@pytest.fixture(autouse=True)
def _few_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sinkscope.sinks.first_token.attention_received.RATE_TEXTS", 8
    )  # the sink rate has tests of its own


@cache
def shared_sink(family: str) -> SharedSink:
    """No test changes it."""
    return make_shared_sink(family)


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("family", ["llama", "neox", "mixtral"])
def test_a_cause_takes_more_than_the_strongest_of_twenty_random_neurons(family: str, tmp_path: Path) -> None:
    """The bystander is a candidate and takes a tenth of the norm with it, and some random neurons take more."""
    shared = shared_sink(family)
    o = shared.organism
    text = tmp_path / "text.txt"
    text.write_text(" ".join(o.tokenizer.decode(row[1:]) for row in o.natural(8, 64)))
    result = find_sinks(o.model, tokenizer=o.tokenizer, max_repeats=8, top_k=6, text=text)
    by_site = {n.site: n for n in result.neurons}
    bystander, sink = by_site[shared.bystander], by_site[shared.sink]
    assert 0.1 < shared.bystander_drop < shared.helper_drop < shared.sink_drop
    for neuron, drop in ((bystander, shared.bystander_drop), (sink, shared.sink_drop)):
        assert neuron.ablation_drop == pytest.approx(drop, abs=0.02)
        assert neuron.control_drop == pytest.approx(shared.helper_drop, abs=0.02)
    assert [n.site for n in result.causal] == [shared.sink]
    assert result.set_drop == pytest.approx(shared.sink_drop, abs=0.02)
    assert result.set_control_drop == pytest.approx(shared.helper_drop, abs=0.02)


def test_controls_count_at_the_repeated_token_too() -> None:
    """Nearly all of the repeated token's norm is one helper's work, and random neurons are helpers as often as not."""
    shared = shared_sink("llama")
    target, ids = Target.of(shared.organism.model), shared.organism.natural()
    first = view_layer(target, shared.sink[0], ids[:, :1], torch.ones(len(ids), 1, dtype=torch.bool))
    helper = first.post[:, shared.helper[1:]] * columns(target, shared.sink[0], torch.tensor(shared.helper[1:]))
    repeated = LayerView(first.layer, 1.25 * helper, first.mlp, first.post)
    proof = prove(target, ids, first.layer, 2, _generator(), repeated)
    assert [n.control_drop for n in proof.neurons] == pytest.approx([0.8, 0.8], abs=0.01)
    assert not any(n.causal for n in proof.neurons)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_neutral_values_are_those_of_later_positions(family: str) -> None:
    """Half of the positions of these texts are first tokens, where sink neurons are on: they would move the median."""
    o = organism(family, 3)
    target, ids = Target.of(o.model), o.natural(5, 2)
    layer = o.truth.sink_layer
    assert layer is not None
    proof = prove(target, ids, layer, 6, _generator(), None)
    everywhere = view_layer(target, layer, ids, torch.ones_like(ids, dtype=torch.bool))
    post = everywhere.post.unflatten(0, (5, 2))
    moved = 0.0
    for n in proof.neurons:
        flat = n.neuron + (n.expert or 0) * target.d_mlp
        values = post[:, :, flat]
        if everywhere.routing is not None:
            weights = everywhere.routing.unflatten(0, (5, 2))[:, :, n.expert]
            values = torch.where(weights > 0, values / weights, torch.nan)
        later, both = values[:, 1].nanmedian(), values.nanmedian()
        assert n.neutral_post == pytest.approx(float(later.nan_to_num()))  # 0 for an expert that no token asks
        moved = max(moved, float((later - both).abs()))
    assert moved > 0.01


def test_a_cause_takes_a_tenth_of_the_norm() -> None:
    """Random neurons write nothing here, so the bystander takes more than they do, and yet too little."""
    shared = make_shared_sink("llama", aside=0.3, support=0.0)
    proof = prove(Target.of(shared.organism.model), shared.organism.natural(), shared.sink[0], 2, _generator(), None)
    sink, bystander = proof.neurons
    assert bystander.site == shared.bystander
    assert bystander.control_drop < 0.001 < bystander.ablation_drop == pytest.approx(shared.bystander_drop, abs=0.005)
    assert sink.causal and not bystander.causal


def test_the_control_is_the_strongest_of_enough_draws_and_never_a_candidate() -> None:
    shared = shared_sink("llama")
    target, ids = Target.of(shared.organism.model), shared.organism.natural()
    for seed in range(8):
        proof = prove(target, ids, shared.sink[0], 2, _generator(seed), None)
        assert proof.neurons[0].control_drop == pytest.approx(shared.helper_drop, abs=0.02)
    proof = prove(target, ids, shared.sink[0], target.d_mlp - 2, _generator(), None)  # two neurons are left to draw
    assert len(proof.controls) == 1 and proof.controls[0] not in {n.site for n in proof.neurons}


def test_drops_are_medians_over_texts() -> None:
    """One of five texts begins with a token that is no sink even where it stands first."""
    shared = shared_sink("llama")
    ids = shared.organism.natural(5)
    ids[0, 0] = shared.organism.tokens_of(-1)[0]
    proof = prove(Target.of(shared.organism.model), ids, shared.sink[0], 2, _generator(), None)
    assert proof.neurons[0].ablation_drop == pytest.approx(shared.sink_drop, abs=0.02)


def test_causes_of_another_stage_are_held_against_random_neurons_of_that_stage() -> None:
    """The layer after the sink layer stands in for the sink layer, so that the shared sink is an earlier stage."""
    shared = shared_sink("llama")
    target, layer = Target.of(shared.organism.model), shared.sink[0]
    proof = prove(target, shared.organism.natural(), layer + 1, 2, _generator(), None, [layer])
    earlier = {n.site: n for n in proof.neurons if n.layer == layer}
    assert earlier.keys() == {shared.sink, shared.bystander}
    assert [n.control_drop for n in earlier.values()] == pytest.approx([shared.helper_drop] * 2, abs=0.02)
    assert [n.site for n in proof.neurons if n.causal] == [shared.sink]
    assert proof.set_drop == pytest.approx(shared.sink_drop, abs=0.02)
