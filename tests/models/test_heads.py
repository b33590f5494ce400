"""Models without a language head: what needs the logits of tokens says so, and the rest is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from organisms.tokens import word_tokenizer
from refusals import refused

import sinkscope as ss
from sinkscope import kv

SIZES = {"vocab_size": 90, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 7, 30, 41, 8, 12]])


def model_of(kind: type) -> Any:
    torch.manual_seed(4)
    return kind(tf.GPT2Config(**SIZES, num_labels=7)).eval()


@pytest.mark.parametrize("kind", [tf.GPT2Model, tf.GPT2ForSequenceClassification, tf.GPT2ForTokenClassification])
@torch.no_grad()
def test_states_attention_and_edits_are_served_and_logits_refused(kind):
    model = model_of(kind)
    states = model(IDS, output_hidden_states=True).hidden_states
    read = ss.trace(model, IDS, ["blocks.1.hook_resid_post", "blocks.2.attn.hook_pattern"])
    assert torch.allclose(read["blocks.1.hook_resid_post"], states[2], atol=1e-6)
    rows = read["blocks.2.attn.hook_pattern"].sum(-1)
    assert torch.allclose(rows, torch.ones_like(rows), atol=1e-5)
    with (ss.Ablate(layer=1, neurons=[3, 4]) | kv.Full()).on(model):
        edited = model(IDS)[0]
    by_hand = model_of(kind)
    getattr(by_hand, "transformer", by_hand).h[1].mlp.c_proj.weight[[3, 4]] = 0
    assert torch.allclose(edited, by_hand(IDS)[0], atol=1e-6) and not torch.equal(edited, model(IDS)[0])
    tokenizer = word_tokenizer(90)
    for use in (
        lambda: ss.trace(model, IDS, "logits", "norm"),
        lambda: ss.generate(model, IDS.tolist()),
        lambda: ss.why_loop(model, IDS[0].tolist(), tokenizer=tokenizer),
        lambda: ss.barcode(model, IDS[0].tolist(), tokenizer=tokenizer),
    ):
        with refused(f"a {kind.__name__} has no language head"):
            use()


def test_the_first_layers_do_not_draft():
    model = model_of(tf.GPT2LMHeadModel)
    with refused("assistant_early_exit=2"), kv.H2O(8).on(model):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, assistant_early_exit=2)
