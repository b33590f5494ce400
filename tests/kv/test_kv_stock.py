"""With nothing to evict, a model inside a session is the stock model."""

from __future__ import annotations

import torch
from kv_kit import close, prompts
from kv_kit import shallow_of as model_of
from raw_kit import attention

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


def test_prompts_may_be_embeddings_without_a_mask():
    """No attention mask at all, and ids given as embeddings."""
    model = model_of("qwen3")
    ids, _ = prompts([14])
    with torch.no_grad():
        stock = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        with (Full() | Observe(ignore)).on(model):
            close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, stock)


def test_attention_of_a_long_prompt_comes_in_chunks():
    """Each query once, in the order of the text, as many at a time as the number of keys allows."""
    model = model_of("llama", max_position_embeddings=2000, num_hidden_layers=1)
    ids, mask = prompts([2000])
    heads = model.config.num_attention_heads
    parts: list[tuple[int, int, torch.Tensor]] = []

    def keep(rows: AttentionRows):
        parts.append((rows.first, rows.probs.shape[2], rows.probs.sum(2)))

    with torch.no_grad(), Observe(keep, layers=[0]).on(model):
        model(input_ids=ids, attention_mask=mask)
    sizes = [size for _, size, _ in parts]
    assert [first for first, _, _ in parts] == [sum(sizes[:n]) for n in range(len(parts))] and sum(sizes) == 2000
    assert max(sizes) * heads * 2000 <= 2**21
    close(sum(received for _, _, received in parts), attention(model, ids)[0].sum(2))
