"""Beside each attention of transformers a policy or another edit says the same."""

from __future__ import annotations

import pytest
import torch
from kv_kit import close, prompts
from kv_kit import shallow_of as model_of
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

from sinkscope.engine.attention import set_attention
from sinkscope.kv import H2O
from sinkscope.sparse.shapes import AShape


def as_flash(module, query, key, value, mask, scaling=None, sliding_window=None, **_):
    """Attention that is told of padding alone, by a mask `[batch key]` or none, and of a window by a number."""
    at = torch.arange(key.shape[2] - query.shape[2], key.shape[2])[:, None]
    keys = torch.arange(key.shape[2])
    sees = (keys <= at) & (keys > at - (sliding_window or len(keys)))
    if mask is not None:
        sees = sees & mask[:, None, None].bool()
    sees = sees | ~sees.any(-1, keepdim=True)  # queries at padding
    output = scaled_dot_product_attention(query, key, value, attn_mask=sees, scale=scaling, enable_gqa=True)
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("flash", as_flash)  # with the masks of FlashAttention, which needs a GPU
AttentionMaskInterface.register("flash", flash_attention_mask)


@pytest.mark.parametrize("attention", ["flash", "flex_attention"])
@pytest.mark.parametrize(
    ("family", "edit", "padded"),
    [("gemma3_text", H2O(budget=12), True), ("mistral", AShape(first=2, local=5), False)],
)
def test_under_each_attention_of_transformers(family, edit, padded, attention):
    """Each takes a mask of its own form: of padding alone, a function of blocks."""
    model, (ids, mask) = model_of(family), prompts([26, 19] if padded else [26])
    ask = {"attention_mask": mask, "max_new_tokens": 4, "output_scores": True, "return_dict_in_generate": True}
    found = []
    for name in (attention, "sdpa"):
        set_attention(model.config, name)
        with edit.on(model):
            found.append(torch.stack(model.generate(ids, do_sample=False, **ask).scores))
    close(found[0], found[1], 1e-4)
