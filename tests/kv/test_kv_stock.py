"""With nothing to evict, a model inside a session is the stock model."""

from __future__ import annotations

import torch
from kv_kit import close, prompts
from kv_kit import shallow_of as model_of

from sinkscope.kv import AttentionRows, Full, Observe, StreamingLLM


def ignore(_rows: AttentionRows):
    pass


def test_without_a_cache_there_is_nothing_to_evict():
    model = model_of("gemma2")
    ids, mask = prompts([20, 17])
    with torch.no_grad():
        stock = model(input_ids=ids, attention_mask=mask, use_cache=False)
        with (StreamingLLM(budget=6) | Observe(ignore)).on(model) as run:
            got = model(input_ids=ids, attention_mask=mask, use_cache=False)
        with Observe(ignore).on(model):
            tokens = model.generate(ids, attention_mask=mask, use_cache=False, max_new_tokens=4)
    close(got.logits, stock.logits)
    assert got.past_key_values is None and run.usage == []
    assert torch.equal(tokens, model.generate(ids, attention_mask=mask, use_cache=False, max_new_tokens=4))


def test_embeddings_in_place_of_ids_and_no_mask():
    """No attention mask at all, and ids given as embeddings."""
    model = model_of("qwen3")
    ids, _ = prompts([14])
    with torch.no_grad():
        stock = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        with (Full() | Observe(ignore)).on(model):
            close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, stock)
