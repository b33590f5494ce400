"""Models without a language head: what needs the logits of tokens says so, and the rest is served."""

from __future__ import annotations

import pytest
import torch
import transformers as tf
from organisms.tokens import word_tokenizer
from refusals import refused

import sinkscope as ss
from sinkscope import kv

CONFIG = tf.GPT2Config(vocab_size=90, n_embd=32, n_layer=3, n_head=4, n_positions=64, pad_token_id=0, num_labels=7)
IDS = torch.tensor([[5, 9, 7, 30, 41, 8, 12]])
KNOWN = {"tokenizer": word_tokenizer(90)}


@pytest.mark.parametrize("kind", [tf.GPT2Model, tf.GPT2ForSequenceClassification])
@torch.no_grad()
def test_states_attention_and_edits_are_served_and_logits_refused(kind):
    model = kind(CONFIG).eval()
    plain = model(IDS, output_hidden_states=True)
    read = ss.trace(model, IDS, ["blocks.1.hook_resid_post", "blocks.2.attn.hook_pattern"])
    assert torch.allclose(read["blocks.1.hook_resid_post"], plain.hidden_states[2], atol=1e-6)
    assert torch.allclose(read["blocks.2.attn.hook_pattern"].sum(-1), torch.ones(1, 4, 7), atol=1e-5)
    with (ss.Ablate(layer=1, neurons=[3, 4]) | kv.Full()).on(model):
        edited = model(IDS)[0]
    getattr(model, "transformer", model).h[1].mlp.c_proj.weight[[3, 4]] = 0
    assert torch.allclose(edited, model(IDS)[0], atol=1e-6) and not torch.equal(edited, plain[0])
    for use in (
        lambda: ss.trace(model, IDS, "logits"),
        lambda: ss.generate(model, IDS.tolist(), max_new_tokens=4, **KNOWN),
    ):
        with refused(f"is a {kind.__name__} without a language head"):
            use()


def test_the_first_layers_do_not_draft():
    model = tf.GPT2LMHeadModel(CONFIG)
    with refused("assistant_early_exit"), kv.H2O(8).on(model):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, assistant_early_exit=2)
