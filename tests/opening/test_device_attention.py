"""A device whose SDPA is wrong at the last token of a row: what is measured is right all the same."""

from __future__ import annotations

import pytest
import torch
from organisms.tiny import tiny_model
from torch.nn import functional
from torch.testing import assert_close

from sinkscope.errors import SinkscopeWarning
from sinkscope.opening.live import misreads_last_query, target_of
from sinkscope.opening.load import load, open_target

IDS = torch.arange(65)[None] % 90


@pytest.fixture
def one_head(tmp_path):
    """A checkpoint whose query heads share one head of keys, its model, and what eager attention gives."""
    model, tokenizer = tiny_model("gemma3_text", num_key_value_heads=1)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    right = model.model(IDS).last_hidden_state.detach()
    model.set_attn_implementation("sdpa")
    return tmp_path, model, right


@pytest.fixture
def fault(monkeypatch):
    """SDPA does on a CPU what the memory-efficient one does on a GPU (pytorch/pytorch#191937).

    Where query heads share one head of keys, a mask is given, and a single query is left of blocks of 32, that query
    sees what the mask shows to the first one. With this rule a CPU gives all of Gemma's numbers that an H100 gave.
    """
    stock = functional.scaled_dot_product_attention

    def faulty(query, key, value, attn_mask=None, **rest):
        right = stock(query, key, value, attn_mask, **rest)
        if attn_mask is None or query.shape[2] % 32 != 1 or key.stride(1) or value.stride(1):
            return right
        return torch.cat([right[:, :, :-1], stock(query[:, :, -1:], key, value, attn_mask[:, :, :1], **rest)], 2)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", faulty)


@pytest.mark.parametrize("opened", [load, open_target], ids=["whole", "stream"])
def test_what_is_opened_attends_eagerly_there(opened, one_head, fault):
    assert_close(target_of(opened(one_head[0])).forward(IDS).last_hidden_state, one_head[2], atol=1e-4, rtol=1e-4)


def test_the_last_token_is_right_on_the_device_at_hand(one_head):
    """On a card, which may have the fault."""
    opened = target_of(load(one_head[0], dtype="float32"))
    assert opened.config._attn_implementation == ("eager" if misreads_last_query(opened.device) else "sdpa")
    assert_close(opened.forward(IDS).last_hidden_state.cpu(), one_head[2], atol=1e-3, rtol=1e-3)


def test_a_live_model_is_said_to_be_wrong(one_head, fault):
    with pytest.warns(SinkscopeWarning, match=r"SDPA attention, which PyTorch gets wrong on cpu.*1 \+ 32 n tokens"):
        target_of(one_head[1])
