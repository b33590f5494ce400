"""Attention received, and the windows it is read under, against plain hooks."""

from __future__ import annotations

import torch
from intervention_kit import effects
from organisms import tiny_model
from organisms.decoders import decoder
from raw_kit import attention, norms
from torch.testing import assert_close

from sinkscope.models.text import beginning, put_before, text_rows, typical_text
from sinkscope.opening.live import target_of
from sinkscope.results.parts import Component
from sinkscope.sinks.find.attention_received import attention_received


def rows(tokenizer, count: int = 4, length: int = 48):
    return text_rows(tokenizer, typical_text(), count, length, tokenizer.bos_token_id)


@torch.no_grad()
def test_attention_that_underflows_hides_no_position():
    """Scores so sharp that the late queries give the first positions exactly nothing: they see them all the same."""
    model, tokenizer = tiny_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight *= 300
    ids = rows(tokenizer)
    received = attention_received(target_of(model, tokenizer), ids)
    own = attention(model, ids)
    assert bool((own[:, :, :, -1, 0] == 0).all(2).any())  # as if a window hid position 0, to all heads of a layer
    seen = torch.ones(48, 48).tril().sum(0)
    mean = (own.sum(3) / seen).transpose(1, 2)
    assert_close(received.received, mean[..., : received.received.shape[-1]], rtol=1e-4, atol=1e-5)
    assert_close(received.norms, norms(model, ids)[:3], rtol=1e-4, atol=1e-4)


def test_a_window_is_read_from_the_mask(monkeypatch):
    monkeypatch.setattr("sinkscope.sinks.find.attention_received.NARROWEST", 16)
    model, tokenizer = tiny_model("mistral")
    ids = rows(tokenizer)
    received = attention_received(target_of(model, tokenizer), ids)
    own = attention(model, ids)
    distance = torch.arange(48)[:, None] - torch.arange(48)
    sees = (distance >= 0) & (distance < 16)
    mean = own.sum(3) / sees.sum(0)
    assert_close(received.received, mean.transpose(1, 2)[..., : received.received.shape[-1]], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_attention_adds_is_replaced_and_not_the_stream_that_bloom_adds_to_it():
    model = decoder("bloom")
    ids = torch.randint(5, 96, (2, 12))
    edited = effects(target_of(model, None), ids, [(Component("attention", 1),)], at=0, source=7)

    def swap(_module, args, output):
        stream = args[1]
        own = output[0] - stream
        whole = output[0].clone()
        whole[:, 0] = stream[:, 0] + own[:, 7]
        return (whole, *output[1:])

    handle = model.transformer.h[1].self_attention.register_forward_hook(swap)
    expected = norms(model, ids)[:, :, 0].T
    handle.remove()
    assert_close(edited.norms[1], expected[:, : edited.norms.shape[-1]], rtol=1e-4, atol=1e-4)
    assert float((edited.norms[1] - edited.norms[0]).abs().max()) > 0.01


def test_texts_begin_as_the_tokenizer_puts_them():
    from tokenizers.processors import TemplateProcessing

    _, tokenizer = tiny_model("llama")
    bos = tokenizer.bos_token_id
    assert (put_before(tokenizer), beginning(tokenizer, bos), beginning(tokenizer, None)) == ([bos], [bos], [])
    special = [("<s>", bos), ("</s>", tokenizer.eos_token_id)]
    for pieces, expected in (("<s> </s> $A", [bos, special[1][1]]), ("</s> $A", [bos, special[1][1]]), ("$A", [bos])):
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=pieces, special_tokens=special)
        found = text_rows(tokenizer, typical_text(), 3, 16, bos)
        assert found.shape == (3, 16) and found[:, : len(expected)].tolist() == [expected] * 3
        words = tokenizer(typical_text()[:4000], add_special_tokens=False)["input_ids"]
        assert found[:, len(expected) :].flatten().tolist() == words[: 3 * (16 - len(expected))]
