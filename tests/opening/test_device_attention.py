"""A device whose SDPA is wrong at the last token of a row: what is measured is right all the same."""

from __future__ import annotations

import pytest
import torch
from checkpoints import checkpoint
from organisms.tiny import tiny_model
from torch.testing import assert_close

from sinkscope.errors import SinkscopeWarning
from sinkscope.opening.live import misreads_last_query, target_of
from sinkscope.opening.load import load, open_stream

IDS = torch.arange(65)[None] % 90


@pytest.fixture
def one_head(tmp_path):
    """A checkpoint whose query heads share one head of keys, its model, and what eager attention gives."""
    model, tokenizer = tiny_model("gemma3_text", num_key_value_heads=1)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        right = model.model(IDS).last_hidden_state
    model.set_attn_implementation("sdpa")
    return tmp_path, model, right


@pytest.fixture
def fault(monkeypatch):
    """SDPA does on a CPU what the memory-efficient one does on a GPU (pytorch/pytorch#191937).

    Where query heads share one head of keys, a mask is given, and a single query is left of blocks of 32, that query
    sees what the mask shows to the first one. With this rule a CPU gives all of Gemma's numbers that an H100 gave.
    """
    stock = torch.nn.functional.scaled_dot_product_attention

    def faulty(query, key, value, attn_mask=None, **rest):
        right = stock(query, key, value, attn_mask, **rest)
        if attn_mask is None or query.shape[2] % 32 != 1 or key.stride(1) or value.stride(1):
            return right
        return torch.cat([right[:, :, :-1], stock(query[:, :, -1:], key, value, attn_mask[:, :, :1], **rest)], 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", faulty)


@pytest.mark.parametrize("opened", [load, open_stream], ids=["whole", "stream"])
def test_what_is_opened_attends_eagerly_there(opened, one_head, fault):
    folder, model, right = one_head
    assert_close(target_of(opened(folder)).forward(IDS).last_hidden_state, right, atol=1e-4, rtol=1e-4)
    assert target_of(load(checkpoint("gemma3_text"))).config._attn_implementation == "sdpa"  # two heads of keys
    with torch.no_grad():
        wrong = model.model(IDS).last_hidden_state
    assert_close(wrong[:, :-1], right[:, :-1], atol=1e-4, rtol=1e-4)
    assert (wrong[:, -1] - right[:, -1]).abs().max() > 0.1, "else it would be right without any care"


@pytest.mark.parametrize("length", [64, 65])
def test_the_last_token_is_right_on_the_device_at_hand(one_head, length):
    """On a card, which may have the fault."""
    opened = target_of(load(one_head[0], dtype="float32"))
    is_faulty = misreads_last_query(opened.device)
    assert opened.config._attn_implementation == ("eager" if is_faulty else "sdpa")
    found = opened.forward(IDS[:, :length]).last_hidden_state[0, -1]
    assert_close(found.cpu(), one_head[2][0, length - 1], atol=1e-3, rtol=1e-3)


def test_a_live_model_is_measured_as_it_runs_and_said_to_be_wrong(one_head, fault):
    with pytest.warns(SinkscopeWarning, match=r"SDPA attention, which PyTorch gets wrong on cpu.*1 \+ 32 n tokens"):
        target = target_of(one_head[1])
    assert target.config._attn_implementation == "sdpa"
