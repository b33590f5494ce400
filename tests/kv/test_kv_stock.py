"""Beside each attention of transformers; and with nothing to evict, a model inside a session is the stock model."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch
from kv_kit import Drawn, attends_by, close, decode, prompts
from kv_kit import shallow_of as model_of
from transformers import DynamicCache

from sinkscope.kv import Full
from sinkscope.sparse.shapes import AShape

WAYS = {"drawn": ("gemma3_text", Drawn(budget=12)), "a-shape": ("mistral", AShape(first=2, local=5))}
model_of_family = cache(model_of)


@cache
def scores_under(name: str, attention: str, padded: bool) -> torch.Tensor:
    """What a model says under a policy or another edit, by one of the attentions of transformers."""
    family, way = WAYS[name]
    model, (ids, mask) = model_of_family(family), prompts([26, 19] if padded else [26])
    ask = {"attention_mask": mask, "max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
    with attends_by(model, attention), way.on(model):
        return torch.stack(model.generate(ids, do_sample=False, **ask).scores)


@pytest.mark.parametrize("attention", ["flash", "flex_attention"])
@pytest.mark.parametrize("name", WAYS)
def test_under_each_attention_of_transformers(name, attention):
    """Each takes a mask of its own form: of padding alone, a function of blocks."""
    padded = (name == "drawn") == (attention == "flash")  # each is met with and without
    close(scores_under(name, attention, padded), scores_under(name, "sdpa", padded), 1e-4)


@pytest.mark.parametrize("family", ["gpt2", "phi3", "mixtral", "gemma3_text", "gpt_oss"])
def test_with_nothing_to_evict_the_logits_are_equal_bit_for_bit(family):
    model, (ids, mask) = model_of_family(family), prompts([9], 3)
    run = partial(decode, model, ids, mask, 9)
    stock = run(DynamicCache(config=model.config))
    with Full().on(model):
        assert torch.equal(run(), stock)
