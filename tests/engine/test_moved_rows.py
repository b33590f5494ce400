"""Rows of a cache that change places or number, as what a block knows of them does."""

from __future__ import annotations

import pytest
import torch
from kv_kit import decode, model_of, prompts
from transformers import DynamicCache

import sinkscope as ss

IDS, MASK = prompts([9, 9], 4)
EDITS = [ss.LoopGuard(budget=64), ss.Ablate(layer=1, neurons=[3], value="mean"), ss.kv.Full()]


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: type(edit).__name__)
def test_rows_that_are_moved_twice(edit):
    """A guard forgets rows that move, and has nothing to forget when they move again."""
    model = model_of("llama", num_hidden_layers=2)
    model.requires_grad_(False)
    order = torch.tensor([1, 0])
    with edit.on(model):
        expected = decode(model, IDS[order], MASK[order], 9)
    cache = DynamicCache(config=model.config)
    with edit.on(model):
        first = decode(model, IDS[:, :11], MASK[:, :11], 9, cache)
        for _ in range(3):
            cache.reorder_cache(order)
        rest = model(IDS[order][:, 11:13], attention_mask=MASK[:, :13], past_key_values=cache).logits
    assert torch.allclose(first[order], expected[:, :3], atol=1e-4)
    assert torch.allclose(rest, expected[:, 3:5], atol=1e-4)
