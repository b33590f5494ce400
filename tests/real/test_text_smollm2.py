"""What caches keep, and where the guard acts, in SmolLM2, beside plain attention and plain loops."""

from __future__ import annotations

import kv_reference
import plain
import pytest
import torch
from texts import prose
from transformers import DynamicCache

import sinkscope as ss
from sinkscope.kv import H2O, TOVA, SnapKV, StreamingLLM

PROMPT, BUDGET = 160, 80


@pytest.fixture(scope="module")
def prompt(smollm2) -> torch.Tensor:
    return plain.ids_of(smollm2.tokenizer, prose(), PROMPT + 1, bos=True)


@pytest.fixture(scope="module")
def maps(smollm2, prompt) -> list[torch.Tensor]:
    """Attention over the prompt, as the intact model pays it: [head, query, key] of each layer."""
    return [probs[0] for probs in plain.attentions(smollm2.model, prompt[:, :PROMPT])]


POLICIES = {
    "streaming": StreamingLLM(budget=BUDGET),
    "h2o": H2O(budget=BUDGET),
    "tova": TOVA(budget=BUDGET),
    "snapkv": SnapKV(budget=BUDGET, window=32),
}


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_policy_keeps_the_positions_that_attention_says(smollm2, prompt, maps, name):
    """In all 90 kv heads; nearly equal scores may swap a position in a few, in TOVA in the three of a layer at once."""
    policy, choose = POLICIES[name], kv_reference.REFERENCES[name]
    model, n_kv = smollm2.model, smollm2.model.config.num_key_value_heads
    cache, same, heads = DynamicCache(), 0, 0
    with policy.on(model):
        model(prompt[:, :PROMPT], past_key_values=cache)
        model(prompt[:, PROMPT:], past_key_values=cache)
    everything = torch.ones(1, n_kv, PROMPT, dtype=torch.bool)
    for number, (layer, probs) in enumerate(zip(cache.layers, maps, strict=True)):
        grouped = probs.unflatten(0, (n_kv, -1))[None]
        real, no_keys = everything[:, 0], everything[..., None][..., :0]  # which none of these policies scores
        seen = kv_reference.Seen(grouped, no_keys, everything, real, [BUDGET], [PROMPT], number, len(maps))
        keep = choose(policy, seen)[0]
        for held, chosen in zip(layer.pos[0].tolist(), keep, strict=True):
            kept = [position for position in held if 0 <= position < PROMPT]
            right = chosen.nonzero().flatten().tolist()
            assert len(kept) == BUDGET and len({*kept} - {*right}) <= 1
            same += kept == right
            heads += 1
    assert heads == 90 and same >= 87


@torch.no_grad()
def test_a_guard_acts_exactly_where_the_stock_model_loops(smollm2):
    """The model goes on with the copies, until they cover the 64 tokens beyond two copies that the default asks for."""
    sentence = smollm2.tokenizer(" The committee met on Monday and agreed to meet again on the next Monday.").input_ids
    ids = torch.tensor([[1, *(3 * sentence)]])
    stock = smollm2.model.generate(ids, max_new_tokens=8 * len(sentence), do_sample=False, pad_token_id=0)
    looping = plain.covered_at_end(stock[0].tolist())
    assert looping >= 2 * len(sentence) + 64
    (guarded,) = ss.generate(smollm2.model, ids, guard=True, max_new_tokens=8 * len(sentence))
    assert guarded.events and plain.covered_at_end([*ids[0].tolist(), *guarded.tokens]) < looping
