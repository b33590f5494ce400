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
def read(smollm2) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A prompt and a token, and attention over the prompt as the intact model pays it: [head, query, key]."""
    ids = plain.ids_of(smollm2.tokenizer, prose(), PROMPT + 1, bos=True)
    return ids, [probs[0] for probs in plain.attentions(smollm2.model, ids[:, :PROMPT])]


POLICIES = {
    "streaming": StreamingLLM(budget=BUDGET),
    "h2o": H2O(budget=BUDGET),
    "tova": TOVA(budget=BUDGET),
    "snapkv": SnapKV(budget=BUDGET, window=32),
}


@pytest.mark.parametrize("name", POLICIES)
@torch.no_grad()
def test_a_policy_keeps_the_positions_that_attention_says(smollm2, read, name):
    """In all 90 kv heads; nearly equal scores may swap a position in a few, in TOVA in the three of a layer at once."""
    ids, maps = read
    cache, same, n_kv = DynamicCache(), 0, smollm2.model.config.num_key_value_heads
    with POLICIES[name].on(smollm2.model):
        for part in ids.split([PROMPT, 1], 1):
            smollm2.model(part, past_key_values=cache)
    held = torch.ones(1, n_kv, PROMPT, dtype=torch.bool)
    for number, probs in enumerate(maps):
        keys = held[..., None][..., :0]  # which none of these policies scores
        grouped = probs.unflatten(0, (n_kv, -1))[None]
        seen = kv_reference.Seen(grouped, keys, held, held[:, 0], [BUDGET], [PROMPT], number, len(maps))
        right = kv_reference.REFERENCES[name](POLICIES[name], seen)[0]
        for pos, chosen in zip(cache.layers[number].pos[0].tolist(), right, strict=True):
            kept, expected = {*pos} & {*range(PROMPT)}, {*chosen.nonzero().flatten().tolist()}
            assert len(kept) == BUDGET and len(kept - expected) <= 1
            same += kept == expected
    assert len(maps) * n_kv == 90 and same >= 87


@torch.no_grad()
def test_a_guard_acts_exactly_where_the_stock_model_loops(smollm2):
    """The model goes on with the copies, until they cover the 64 tokens beyond two copies that the default asks for."""
    sentence = smollm2.tokenizer(" The committee met on Monday and agreed to meet again on the next Monday.").input_ids
    ids, new = torch.tensor([[1, *(3 * sentence)]]), 8 * len(sentence)
    stock = smollm2.model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
    looping = plain.covered_at_end(stock[0].tolist())
    assert looping >= 2 * len(sentence) + 64
    (guarded,) = ss.generate(smollm2.model, ids, guard=True, max_new_tokens=new)
    assert guarded.events and plain.covered_at_end([*ids[0].tolist(), *guarded.tokens]) < looping
