"""`repeat --read distance`: against separate passes, and theorem 4.1's bound against numbers made by hand."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from attack_kit import setup_of
from covering import slow
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import Organism, tiny_model
from organisms import organism as new_organism
from raw_kit import attention

from sinkscope.hooks.trace import trace
from sinkscope.models.grouped_heads import output_weights
from sinkscope.opening.live import target_of
from sinkscope.sinks.repetition.distance import DistanceReading
from sinkscope.sinks.repetition.repeat import Repeat, repeat
from sinkscope.sinks.repetition.sweep import beside_copies

organism = functools.cache(new_organism)  # only read here
IN_THEOREM = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "neox", "mixtral", "qwen3_moe")


def measured(model, tokenizer, count: int, **options) -> Repeat:
    return repeat(model, tokenizer=tokenizer, read="distance", max_repeats=count, **options)


def reading_of(o: Organism, count: int, **options) -> DistanceReading:
    return measured(o.model, o.tokenizer, count, **options).reading


@settings(max_examples=3)
@given(
    family=st.sampled_from(IN_THEOREM),
    seed=st.integers(0, 50),
    prefix=st.sampled_from(["some prefix:", "poem", "dust bites one another and you", "is is is"]),
)
def test_no_head_ever_exceeds_the_bound(family, seed, prefix):
    found = reading_of(organism(family, seed), 40, prefix=prefix, tokens=["cat", "dog"])
    assert found.outside is None and found.holds and found.closest.max() <= 1
    assert (found.distance[0] <= found.bound + 1e-6).all()
    assert found.closest.max() > 1e-7  # nor is the bound so large by mistake that it could not fail


@pytest.mark.parametrize("family", ["gemma2", "neox"])
def test_bound_and_distance_by_hand(family):
    """Per head from the eager attention, the value projection and W_O; Lemma D.1's own sum over the prefix."""
    o, count = organism(family, 1), 60
    result = measured(o.model, o.tokenizer, count, prefix="poem book", tokens=["cat"])
    found = result.reading
    sweep = found.sweep
    start = o.tokenizer("poem book")["input_ids"]
    ids = torch.tensor([start + [sweep.ids[0]] * count])
    target = target_of(o.model, o.tokenizer)
    rows, first = attention(o.model, ids)[0, 0], len(start)
    value = trace(o.model, ids, ["blocks.0.attn.hook_v"])["blocks.0.attn.hook_v"][0]
    group = target.n_heads // target.n_kv_heads
    written = value.repeat_interleave(group, 1).transpose(0, 1) @ output_weights(target, 0)  # head pos d_model
    rows = rows[:, first + sweep.counts - 1]  # head n key
    lemma = rows[..., :first] @ (written[:, :first] - written[:, -1:])
    lowest = rows.where(rows > 0, torch.inf).amin(-1)  # of the keys that a query sees
    spread = rows.amax(-1) / lowest  # exp(delta)
    largest = written.norm(dim=-1).amax(-1, keepdim=True)
    bound = 2 * largest * first * spread / torch.tensor(sweep.counts)
    closest = (lemma.norm(dim=-1) / bound).amax(-1)
    assert found.distance[0, 0] == pytest.approx(lemma.sum(0).norm(dim=-1).numpy(), rel=1e-3, abs=2e-5)
    assert found.bound[0] == pytest.approx(bound.sum(0).numpy(), rel=1e-3)
    assert found.closest.max() == pytest.approx(float(closest.max()), rel=1e-2)
    assert (found.closest[0] <= 1.01 * closest.numpy() + 1e-4).all()  # 0 where a distance is lost in rounding


@pytest.mark.parametrize("family", ["llama", "gpt2", slow("gpt_oss")])
def test_one_pass_is_n_passes(family):
    o = organism(family, 2)
    result = measured(o.model, o.tokenizer, 33, tokens=["cat", "dog"], prefix="poem book")
    found = result.reading
    sweep = found.sweep
    layers = (0, o.model.config.num_hidden_layers - 1)
    sites = [f"blocks.{layer}.hook_attn_out" for layer in layers]

    def last(ids):
        return trace(o.model, torch.tensor([ids]), sites, lambda out: out[:, -1].float())

    setup = setup_of(o)
    beside = beside_copies(setup, torch.tensor([[1, 4, 5] + [word] * 33 for word in sweep.ids]), 3)
    like = np.zeros((3, 2))
    for token, word in enumerate(sweep.ids):
        alone = last([word])
        for kind, rows in enumerate(beside):
            away = last(rows[token].tolist())[sites[0]] - alone[sites[0]]
            like[kind, token] = 1 - float(away.norm() / alone[sites[0]].norm())
        for repeats in (1, 2, 9, 33):
            place = sweep.counts.tolist().index(repeats)
            outputs = last([1, 4, 5] + [word] * repeats)
            for layer, site in zip(layers, sites, strict=True):
                assert found.alone[layer, token] == pytest.approx(float(alone[site].norm()), rel=1e-3, abs=1e-4)
                expected = float((outputs[site] - alone[site]).norm())
                assert found.distance[layer, token, place] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    (claim,) = result.claims
    assert [claim.value, *[one.value for one in claim.contrasts]] == pytest.approx(like.mean(1), abs=1e-3)


@pytest.mark.parametrize(
    ("family", "reason", "config"),
    [
        ("gpt2", "absolute positions", {}),
        ("opt", "absolute positions", {}),
        ("gpt_oss", "learned sink", {"sliding_window": 2048}),
    ],
)
def test_outside_the_theorem_the_distance_does_not_vanish_and_there_is_no_bound(family, reason, config):
    found = measured(*tiny_model(family, **config), 400, tokens=["cat"]).reading
    assert reason in found.outside
    assert np.isnan(found.bound).all() and np.isnan(found.closest).all()
    assert found.distance[0, 0, -1] > 0.05 * found.distance[0, 0].max()


def test_outside_the_window_the_distance_is_zero():
    model, tokenizer = tiny_model("mistral")  # a window of 16
    result = measured(model, tokenizer, 40, tokens=["cat"])
    found = result.reading
    sweep = found.sweep
    assert found.outside is not None and "window of 16" in found.outside and np.isnan(found.bound).all()
    assert ((found.distance[0, 0] < 1e-5 * found.alone[0, 0]) == (sweep.counts >= 16)).all()


def test_from_disk_only_the_first_layer_is_read(tmp_path):
    o = organism("gemma2", 4)
    folder = o.save(tmp_path / "m")
    first = repeat(str(folder), read="distance", max_repeats=30, tokens=["cat"], dtype="float32").reading
    live = reading_of(o, 30, tokens=["cat"])
    assert first.holds and len(first.distance) == 1
    np.testing.assert_allclose(first.distance[0], live.distance[0], rtol=1e-3, atol=1e-4)
