"""With nothing to evict, a model inside a session is the stock model."""

from __future__ import annotations

import pytest
import torch
from covering import slow
from kv_kit import FAMILIES, Drawn, close, decode, masks_of_run, prompts, run_policy
from kv_kit import shallow_of as model_of

from sinkscope.conformance.masked import plain_logits
from sinkscope.kv import AttentionRows, Full, Observe, StreamingLLM

QUICK = ["llama", "gpt2", "gemma2", "gpt_oss", "phi3"]
REST = [slow(family) for family in FAMILIES if family not in QUICK]


def ignore(_rows: AttentionRows):
    pass


@pytest.mark.parametrize("family", QUICK + REST)
def test_observers_change_nothing_and_rows_are_those_of_eager_attention(family):
    model = model_of(family)
    ids, mask = prompts([21, 18], 2)
    stock = decode(model, ids, mask, 21)
    seen = []
    with Observe(seen.append, layers=[0, 1]).on(model):
        close(decode(model, ids, mask, 21), stock)
    model.config._attn_implementation = "eager"
    pos = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        eager = model(input_ids=ids, attention_mask=mask, position_ids=pos, output_attentions=True).attentions
    assert {rows.layer for rows in seen} == {0, 1} and len(seen) == 6
    for rows in seen:
        start = rows.call.past + rows.first
        for row, pad in enumerate((0, 3)):
            for query in range(rows.probs.shape[2]):
                column = start + query
                if column < pad:
                    assert rows.query_pos[row, query] == -1
                    continue
                assert rows.query_pos[row, query] == column - pad
                got = torch.zeros(4, 23)
                at = rows.pos[row, 0]
                got[:, (at + pad)[at >= 0]] = rows.probs[row, :, query, at >= 0]
                torch.testing.assert_close(
                    got[:, : column + 1], eager[rows.layer][row, :, column, : column + 1], atol=2e-6, rtol=0
                )


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


def test_scores_scaled_by_layer():
    model = model_of("gpt2", scale_attn_by_inverse_layer_idx=True)
    ids, mask = prompts([10, 8], 3)
    got, kept = run_policy(Drawn(budget=5) | Observe(ignore), model, ids, mask, (10,))
    close(got, plain_logits(model, ids, mask, masks_of_run(model, kept, mask, 10))[:, 9:])


def test_embeddings_in_place_of_ids_and_no_mask():
    """No attention mask at all, and ids given as embeddings."""
    model = model_of("qwen3")
    ids, _ = prompts([14])
    with torch.no_grad():
        stock = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
        with (Full() | Observe(ignore)).on(model):
            close(model(inputs_embeds=model.get_input_embeddings()(ids)).logits, stock)
