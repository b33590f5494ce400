"""What a layer with a window or chunks sees after tokens left the cache: what the model's own mask function shows."""

from __future__ import annotations

import pytest
import torch
from organisms.decoders import decoder
from organisms.examine import logits_without
from transformers import DynamicCache

import sinkscope as ss
from sinkscope import kv
from sinkscope.errors import UnsupportedError

PROMPT = 70  # longer than the windows and chunks, which are of 64 tokens
BUDGET = 30
POLICIES = (kv.StreamingLLM(BUDGET), kv.H2O(BUDGET), ss.Progressive(budget=BUDGET, after=1, every=1))
OPTIONS = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None}


def prompt(model_type: str, attention: str):
    """A model of a type, and a prompt."""
    model = decoder(model_type)
    model.set_attn_implementation(attention)
    ids = torch.randint(5, 380, (1, PROMPT), generator=torch.Generator().manual_seed(0))
    return model, ids, {"attention_mask": torch.ones_like(ids), **OPTIONS}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_no_query_attends_to_another_chunk(policy, attention):
    """Of Llama 4, whose layers get no window with their calls."""
    model, ids, options = prompt("llama4_text", attention)
    chunked = [number for number, kind in enumerate(model.config.layer_types) if kind == "chunked_attention"]
    beyond = list[float]()

    def note(rows):
        if rows.layer in chunked:
            query, key = rows.query_pos[:, None, :, None] // 64, rows.pos[:, :1, None] // 64
            beyond.append(float((rows.probs * (query != key)).sum(-1).max()))

    with (policy | kv.Observe(note)).on(model):
        model.generate(ids, **options)
    assert chunked and len(beyond) >= 5 * len(chunked) and max(beyond) < 1e-6


@pytest.mark.parametrize("model_type", ["llama4_text", "modernbert-decoder", "gemma3_text", "gpt_oss"])
def test_logits_after_an_eviction_and_in_a_second_turn(model_type):
    """Those of a plain pass in which no later query sees the tokens that left, token by token and in a further turn."""
    model, ids, _ = prompt(model_type, "eager")
    cache = DynamicCache(config=model.config)
    lengths = [PROMPT, 1, 1, 1, 6]  # the last one is a further turn, whose queries see what the latest token saw
    text = torch.randint(5, 380, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    text[:, :PROMPT] = ids
    hidden = torch.zeros(sum(lengths), sum(lengths), dtype=torch.bool)
    found = list[torch.Tensor]()
    begin = 0
    with torch.no_grad(), kv.StreamingLLM(BUDGET).on(model):
        for number, length in enumerate(lengths):
            end = begin + length
            for query in range(begin, end) if number else ():
                latest = min(query, PROMPT + 2)
                hidden[query, 4 : latest - (BUDGET - 4)] = True
            mask = torch.ones(1, end, dtype=torch.long)
            part = text[:, begin:end]
            found.append(model(part, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
            begin = end
    with torch.no_grad():
        expected = logits_without(model, text, hidden)
    off = (torch.cat(found, 1) - expected).abs().max() / expected.abs().max()
    assert off < 1e-4


def test_a_mask_that_a_model_makes_in_its_layers_is_observed_and_named_where_tokens_left():
    """Of Doge, which adds to each key a number that it reads from its value."""
    model, ids, options = prompt("doge", "eager")
    sums = list[float]()
    with kv.Observe(lambda rows: sums.append(float((rows.probs.sum(-1) - 1).abs().max()))).on(model):
        observed = model.generate(ids, **options)
    assert torch.equal(observed, model.generate(ids, **options)) and max(sums) < 1e-5
    with pytest.raises(UnsupportedError, match=r"DogeAttention makes a mask of its own"):
        with kv.StreamingLLM(BUDGET).on(model):
            model.generate(ids, **options)


@pytest.mark.parametrize("policy", [kv.StreamingLLM(BUDGET), kv.SnapKV(BUDGET), POLICIES[2]], ids=repr)
def test_eager_attention_that_adds_its_mask_unasked_gets_one(policy):
    model, ids, options = prompt("modernbert-decoder", "eager")
    with policy.on(model):
        eager = model.generate(ids, **options)
    model.set_attn_implementation("sdpa")
    with policy.on(model):
        assert torch.equal(eager, model.generate(ids, **options))


def test_eager_attention_of_a_subclass_is_that_of_its_base():
    """A subclass in another file has no eager attention beside it."""
    model, ids, options = prompt("llama", "eager")
    expected = model.generate(ids, **options)
    for layer in model.model.layers:
        layer.self_attn.__class__ = type("Attention", (type(layer.self_attn),), {"__module__": __name__})
    with ss.Knockout("first", layers=[0], queries=200).on(model):
        assert torch.equal(model.generate(ids, **options), expected)
