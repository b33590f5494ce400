"""`repeat --read distance`: against separate passes, and theorem 4.1's bound against numbers made by hand."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from attack_kit import setup_of
from hypothesis import given, settings
from hypothesis import strategies as st
from organisms import organism as new_organism
from organisms import tiny_model
from raw_kit import attention

from sinkscope.hooks.trace import trace
from sinkscope.models.grouped_heads import output_weights
from sinkscope.opening.live import target_of
from sinkscope.sinks.repetition.repeat import repeat
from sinkscope.sinks.repetition.result import Repeat
from sinkscope.sinks.repetition.sweep import beside_copies

organism = functools.cache(new_organism)  # only read here
IN_THEOREM = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "neox", "mixtral", "qwen3_moe")


def measured(model, tokenizer, count: int, **options) -> Repeat:
    return repeat(model, tokenizer=tokenizer, read="distance", max_repeats=count, **options)


@settings(max_examples=3)
@given(
    family=st.sampled_from(IN_THEOREM),
    seed=st.integers(0, 50),
    prefix=st.sampled_from(["some prefix:", "poem", "dust bites one another and you", "is is is"]),
)
def test_no_head_ever_exceeds_the_bound(family, seed, prefix):
    o = organism(family, seed)
    found = measured(o.model, o.tokenizer, 40, prefix=prefix, tokens=["cat", "dog"])
    distance, bound, closest, _ = found.values
    assert "theorem 4.1 holds" in found.notes[0] and (distance <= bound + 1e-6).all()
    assert 1e-7 < closest.max() <= 1  # nor is the bound so large by mistake that it could not fail


@pytest.mark.parametrize("family", ["gemma2", "neox"])
def test_bound_and_distance_by_hand(family):
    """Per head from the eager attention, the value projection and W_O; Lemma D.1's own sum over the prefix."""
    o, count = organism(family, 1), 60
    found = measured(o.model, o.tokenizer, count, prefix="poem book", tokens=["cat"])
    start = o.tokenizer("poem book")["input_ids"]
    ids = torch.tensor([start + [found.ids[0]] * count])
    target = target_of(o.model, o.tokenizer)
    rows, first = attention(o.model, ids)[0, 0], len(start)
    value = trace(o.model, ids, ["blocks.0.attn.hook_v"])["blocks.0.attn.hook_v"][0]
    group = target.n_heads // target.n_kv_heads
    written = value.repeat_interleave(group, 1).transpose(0, 1) @ output_weights(target, 0)  # head pos d_model
    rows = rows[:, first + found.at - 1]  # head n key
    lemma = rows[..., :first] @ (written[:, :first] - written[:, -1:])
    lowest = rows.where(rows > 0, torch.inf).amin(-1)  # of the keys that a query sees
    spread = rows.amax(-1) / lowest  # exp(delta)
    largest = written.norm(dim=-1).amax(-1, keepdim=True)
    bound = 2 * largest * first * spread / torch.tensor(found.at)
    closest = (lemma.norm(dim=-1) / bound).amax(0)
    assert found.values[0, 0] == pytest.approx(lemma.sum(0).norm(dim=-1).numpy(), rel=1e-3, abs=2e-5)
    assert found.values[1, 0] == pytest.approx(bound.sum(0).numpy(), rel=1e-3)
    assert found.values[2].max() == pytest.approx(float(closest.max()), rel=1e-2)
    assert (found.values[2, 0] <= 1.01 * closest.numpy() + 1e-4).all()  # 0 where a distance is lost in rounding


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_one_pass_is_n_passes(family):
    o = organism(family, 2)
    found = measured(o.model, o.tokenizer, 33, tokens=["cat", "dog"], prefix="poem book")
    sites = [f"blocks.{layer}.hook_attn_out" for layer in (0, o.model.config.num_hidden_layers - 1)]

    def last(ids):
        return trace(o.model, torch.tensor([ids]), sites, lambda out: out[:, -1].float())

    copies = torch.tensor([[1, 4, 5] + [word] * 33 for word in found.ids])
    texts = copies, *beside_copies(setup_of(o), copies, 3)
    like = np.zeros((3, 2))
    for token, word in enumerate(found.ids):
        alone = last([word])
        for kind, rows in enumerate(texts):
            away = last(rows[token].tolist())[sites[0]] - alone[sites[0]]
            like[kind, token] = 1 - float(away.norm() / alone[sites[0]].norm())
        for repeats in (1, 2, 9, 33):
            place = found.at.tolist().index(repeats)
            outputs = last([1, 4, 5] + [word] * repeats)
            for panel, site in zip((0, 3), sites, strict=True):
                expected = float((outputs[site] - alone[site]).norm())
                assert found.values[panel, token, place] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    (claim,) = found.claims
    assert [claim.value, *[one.value for one in claim.contrasts]] == pytest.approx(like.mean(1), abs=1e-3)


@pytest.mark.parametrize(("family", "config"), [("gpt2", {}), ("gpt_oss", {"sliding_window": 2048})])
def test_outside_the_theorem_there_is_no_bound(family, config):
    """With absolute positions or learned sinks the distance does not vanish."""
    found = measured(*tiny_model(family, **config), 400, prefix="some prefix:", tokens=["cat"])
    assert "does not apply" in found.notes[0] and np.isnan(found.values[1:3]).all()
    distance = found.values[0, 0]
    assert distance[-1] > 0.05 * distance.max()


def test_from_disk_the_numbers_are_the_same(tmp_path):
    o = organism("gemma2", 4)
    options = {"read": "distance", "max_repeats": 30, "tokens": ["cat"], "prefix": "poem"}
    streamed = repeat(str(o.save(tmp_path / "m")), dtype="float32", **options)
    live = repeat(o.model, tokenizer=o.tokenizer, **options)
    np.testing.assert_allclose(streamed.values, live.values, rtol=1e-3, atol=1e-4)
