"""What the commands on sinks say of SmolLM2, beside plain hooks on the same token ids."""

from __future__ import annotations

import json

import plain
import pytest
import results
import torch

from sinkscope.hooks.edit import SinkPatch
from sinkscope.measure import Setup
from sinkscope.sinks.attack import attempts
from sinkscope.sinks.attack.attack import attack
from sinkscope.sinks.circuit.circuit import circuit
from sinkscope.sinks.circuit.separate import separate
from sinkscope.sinks.find.find import find_sinks
from sinkscope.sinks.held_out import held_out
from sinkscope.sinks.patch.evaluate import patch_eval
from sinkscope.sinks.patch.make import patch_make
from sinkscope.sinks.precision.precision import precision
from sinkscope.sinks.repetition.repeat import repeat

SPIKE = ((11, 1229), (11, 1487))
"""The neurons that write the spike: 72 % and 28 % of it."""

pytestmark = pytest.mark.few_texts


@pytest.fixture(scope="module")
def setup(smollm2) -> Setup:
    return Setup.open(smollm2.model)


@pytest.fixture(scope="module")
def found(setup):
    return find_sinks.on(setup, max_repeats=32)


def test_find_sinks_reads_norms_and_contributions(setup, found):
    norms = plain.norms(setup.target.hf, setup.ids)[:, :, 0].median(1).values
    assert results.norms_at_first(found) == pytest.approx(norms.tolist(), rel=1e-4)
    assert results.spike_layer(found) == 11
    written = plain.contributions(setup.target.hf, setup.ids, 11)
    ours = results.contributions(found)
    assert {*SPIKE} == {site for site in ours if ours[site] > 0.1 * norms[11]}
    for (layer, neuron), norm in ours.items():
        if layer == 11:
            assert norm == pytest.approx(written[neuron].item(), rel=1e-3), neuron


def test_find_sinks_ablates_as_plain_hooks_do(setup, found):
    ids = setup.ids[:1]
    intact = plain.norms(setup.target.hf, ids)[11, 0, 0]
    for site in SPIKE:
        with plain.zeroed(setup.target.hf, [site]):
            left = plain.norms(setup.target.hf, ids)[11, 0, 0] / intact
        assert results.left_without(found)[site] == pytest.approx(left.item(), rel=1e-3)


def test_find_sinks_counts_the_heads_that_attend_to_the_first_token(setup, found):
    heads, layers_read = results.attends_to_first(found)
    received = torch.stack([plain.attention_received(setup.target.hf, row[None]) for row in setup.ids])
    counts = [(text[:layers_read] > 0.3).sum().item() for text in received]
    assert 0.9 * min(counts) <= heads <= 1.1 * max(counts)  # most texts decide, each head for itself


def test_the_patch_holds_the_neurons_at_their_values_and_costs_what_plain_hooks_say(setup):
    """Perplexity without the first prediction, on the pieces that the command reads."""
    values = dict.fromkeys(SPIKE, 0.05)
    made = patch_eval.on(setup, patch=SinkPatch(sites=SPIKE, calibrated=values), pieces=2, length=64)
    ids = held_out(setup, 2, 64)
    model = setup.target.hf
    intact = plain.nll(model, ids)[:, 1:].mean().exp()
    with plain.held(model, values):
        patched = plain.nll(model, ids)[:, 1:].mean().exp()
    assert [one.perplexity for one in made.read[:2]] == pytest.approx([intact.item(), patched.item()], rel=2e-5)
    assert abs(made.read[1].change) < 0.01  # ordinary text keeps its perplexity


def test_the_patch_keeps_copies_from_becoming_sinks(setup):
    """400 copies of "company": the norm falls from half of the first token's to a typical one, and the first stays."""
    model, tokenizer = setup.target.hf, setup.tokenizer
    (word,) = tokenizer(" company", add_special_tokens=False).input_ids
    ids = torch.tensor([[setup.bos] + 400 * [word]])
    intact = plain.norms(model, ids)[11, 0]
    with SinkPatch(sites=SPIKE, calibrated=dict.fromkeys(SPIKE, 0.05)).on(model):
        patched = plain.norms(model, ids)[11, 0]
    assert intact[-1] > 0.5 * intact[0] > 10 * patched[-1]
    assert patched[0] == intact[0]
    assert torch.equal(plain.norms(model, ids)[11, 0], intact)  # nothing is left on the model


def test_repeat_reads_the_norm_of_every_copy(setup):
    read = repeat.on(setup, tokens=["company", "cat"], max_repeats=96)
    for token, curve in zip(read.ids, read.values[0], strict=True):
        ids = torch.tensor([[setup.bos] + 96 * [token]])
        norms = plain.norms(setup.target.hf, ids)[11, 0]
        assert curve.tolist() == pytest.approx((norms[read.at] / norms[0]).tolist(), rel=1e-3)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_attack_counts_the_positions_whose_norm_is_half_of_the_first_tokens(setup, monkeypatch):
    tried: list[tuple[torch.Tensor, float]] = []
    counting = attempts.Attack.tried

    def noted(self, context, source, length, ids):
        made = counting(self, context, source, length, ids)
        tried.append((ids, made[0].positions))
        return made

    monkeypatch.setattr(attempts.Attack, "tried", noted)
    attack.on(setup, lengths=(8,), sequences=4)
    assert tried
    first = plain.norms(setup.target.hf, setup.ids)[11, :, 0].median()
    for ids, share in tried:
        norms = plain.norms(setup.target.hf, ids)[11, :, 1:]
        assert share == pytest.approx((norms >= 0.5 * first).float().mean().item(), abs=1e-6)


def rounded(values: torch.Tensor, bits: int, dims: tuple[int, ...]) -> torch.Tensor:
    scale = values.abs().amax(dims, keepdim=True).clamp(min=1e-30) / (2 ** (bits - 1) - 1)
    return (values / scale).round() * scale


@pytest.mark.slow
def test_precision_measures_the_divergence_that_rounding_keys_and_values_makes(setup):
    made = precision.on(setup, schemes=["kv4"], pieces=2, length=32)
    model, ids = setup.target.hf, held_out(setup, 2, 32)
    exact = plain.log_probs(model, ids)
    handles = []
    for block in plain.layers(model):
        for module in (block.self_attn.k_proj, block.self_attn.v_proj):

            def edit(_module, _args, output):
                heads = output.unflatten(-1, (model.config.num_key_value_heads, -1))
                return rounded(heads, 4, (-1,)).flatten(-2)

            handles.append(module.register_forward_hook(edit))
    other = plain.log_probs(model, ids)
    for handle in handles:
        handle.remove()
    assert made.costs["kv4"] == pytest.approx(plain.divergence(exact, other)[:, 1:].mean().item(), rel=1e-3)


@pytest.mark.slow
def test_no_head_of_layer_0_marks_the_first_token_alone(setup):
    """With every head of layer 0 at its mean the neuron still fires, so no set of them is its mark."""
    from sinkscope.sinks.marking_heads import heads

    model, ids = setup.target.hf, setup.ids
    intact = plain.activations(model, ids, 11)[:, 0, 1229].mean()
    with plain.heads_replaced(model, 0, range(9), plain.heads_mean(model, ids, 0)):
        left = plain.activations(model, ids, 11)[:, 0, 1229].mean() / intact
    assert left > 0.3
    made = heads.on(setup, count=8)
    assert "L0" not in made.conclusion() or "undecided" in made.conclusion()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_circuit_names_the_neurons_that_plain_hooks_find(setup):
    made = circuit.on(setup, max_repeats=64)
    assert made.spikes[0].ratio == pytest.approx(183, rel=0.15)
    assert {site for claim in made.claims for site in map(str, claim.subject)} >= {"L11.N1229", "L11.N1487"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_patch_make_makes_a_patch_of_the_two_neurons(setup, tmp_path):
    made = patch_make.on(setup, max_repeats=128, pieces=4, length=64, out=tmp_path / "patch.json")
    assert set(map(str, made.sites)) <= {"L11.N1229", "L11.N1487", "L2.N90", "L2.N430"}
    if made.verdict == "made":
        assert {*json.loads((tmp_path / "patch.json").read_text())["sites"]} == set(map(str, made.sites))


@pytest.mark.slow
def test_separate_finds_what_the_plain_streams_separate(setup):
    """First tokens lie apart from later ones after the attention of layer 0, in the streams that plain hooks read."""
    made = separate.on(setup, pieces=8, count=64)
    assert made.probes[0].auroc > 0.9 > 0.7 > made.probes[0].shuffled
