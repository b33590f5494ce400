"""Models without a language head: what needs the logits of tokens says so, and the rest is served."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf

import sinkscope as ss
from sinkscope import kv

SIZES = {"vocab_size": 90, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
IDS = torch.tensor([[5, 9, 7, 30, 41, 8, 12]])
KINDS = [tf.GPT2Model, tf.GPT2ForSequenceClassification, tf.GPT2ForTokenClassification]


def model_of(kind: type) -> Any:
    torch.manual_seed(4)
    return kind(tf.GPT2Config(**SIZES, num_labels=7)).eval()


def layers_of(model: Any) -> Any:
    return getattr(model, "transformer", model).h


@pytest.mark.parametrize("kind", KINDS)
def test_states_attention_and_edits_are_served(kind):
    model, kept = model_of(kind), []
    handle = layers_of(model)[1].register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        plain = model(IDS)[0]
    handle.remove()
    read = ss.trace(model, IDS, ["blocks.1.hook_resid_post", "blocks.2.attn.hook_pattern"])
    state = kept[0][0] if isinstance(kept[0], tuple) else kept[0]
    assert torch.allclose(read["blocks.1.hook_resid_post"], state, atol=1e-6)
    rows = read["blocks.2.attn.hook_pattern"]
    assert torch.allclose(rows.sum(-1), torch.ones_like(rows[..., 0]), atol=1e-5)

    def cleared(module: Any, args: Any) -> Any:
        return (args[0] * torch.tensor([float(neuron not in (3, 4)) for neuron in range(128)]),)

    handle = layers_of(model)[1].mlp.c_proj.register_forward_pre_hook(cleared)
    with torch.no_grad():
        right = model(IDS)[0]
    handle.remove()
    with torch.no_grad(), (ss.Ablate(layer=1, neurons=[3, 4]) | kv.Full()).on(model):
        edited = model(IDS)[0]
    assert torch.allclose(edited, right, atol=1e-6)
    assert not torch.equal(right, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_tokens_are_refused(kind):
    model, says = model_of(kind), f"a {kind.__name__} has no language head"
    with pytest.raises(ss.SinkscopeError, match=says):
        ss.trace(model, IDS, "logits", "norm")
    with pytest.raises(ss.SinkscopeError, match=says):
        ss.generate(model, IDS.tolist())


@pytest.mark.parametrize("edit", [kv.Full(), ss.Ablate(layer=1, neurons=[3]), kv.H2O(8)])
def test_the_first_layers_do_not_draft(edit):
    model = model_of(tf.GPT2LMHeadModel)
    before = model.config.to_json_string()
    with pytest.raises(ss.SinkscopeError, match="assistant_early_exit=2"), edit.on(model):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, assistant_early_exit=2)
    assert model.config.to_json_string() == before
