"""Layers and modules that are called one by one inside the `with`: what acts in them refuses them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from edit_kit import EDITS
from intervention_kit import bridge_of
from kv_kit import model_of
from organisms import tiny_model
from refusals import refused

import sinkscope as ss

IDS = torch.arange(5, 17)[None]
ACTING = {
    **EDITS,
    "add": ss.Add(torch.ones(32), "blocks.1.hook_resid_post"),
    "heads": ss.Ablate(heads=[(1, 0)]),
    "knockout": ss.Knockout("first"),
    "streaming": ss.kv.StreamingLLM(8),
}


@pytest.fixture
def model():
    return model_of("llama", num_hidden_layers=2).requires_grad_(False)


def walk(model: Any) -> torch.Tensor:
    """Logits as of a pass, layer by layer."""
    hidden = model.model.embed_tokens(IDS)
    angles = model.model.rotary_emb(hidden, torch.arange(IDS.shape[1])[None])
    for layer in model.model.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=angles)
    return model.lm_head(model.model.norm(hidden))


@pytest.mark.parametrize("name", ACTING)
def test_layers_that_are_called_one_by_one_are_refused(model, name):
    expected = walk(model)
    with ACTING[name].on(model):
        model(IDS)
        with refused(r"model\.layers\.\d\S* of LlamaForCausalLM is called by itself, outside of a call"):
            walk(model)
    assert torch.equal(walk(model), expected)


def test_a_decoder_whose_hooks_are_passed_by_is_refused(model):
    with EDITS["ablate"].on(model), refused("is called by itself"):
        model.model.forward(IDS)


def test_modules_in_which_nothing_acts_are_called_freely(model):
    with EDITS["ablate"].on(model):
        hidden = model.model(IDS).last_hidden_state
        hidden = model.model.layers[0].mlp(hidden)
        model.lm_head(hidden)


def test_blocks_of_a_bridge_that_are_called_one_by_one_are_refused():
    bridge = bridge_of(*tiny_model("llama"))
    with ss.Ablate(layer=1, neurons=[3]).on(bridge):
        bridge(IDS)
        with refused("is called by itself"):
            bridge.blocks[1].mlp(torch.zeros(1, 4, 32))
