"""Parts that names propose, or a row of the user's own; wrapped and partly quantised models."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from intervention_kit import KINDS
from organisms.decoders import decoder
from organisms.tiny import tiny_model

from sinkscope.errors import UnsupportedError
from sinkscope.kv.keeper import cache_layers
from sinkscope.models import adapters
from sinkscope.models.adapters import Adapter
from sinkscope.models.neurons import columns
from sinkscope.opening.live import target_of
from sinkscope.opening.proof import prove


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Nothing was opened before, and no row is registered."""
    for known in ("parts._KNOWN", "parts._OF_CLASSES"):
        monkeypatch.setattr(f"sinkscope.opening.{known}", {})
    monkeypatch.setattr(adapters, "ADAPTERS", {})


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "bridge"), ("gpt2", "bridge"), ("phi3", "nnsight")])
def test_a_model_that_its_user_wrapped(model_type, kind):
    target = target_of(KINDS[kind](*tiny_model(model_type)))
    assert target.kind == kind and target.adapter == target_of(tiny_model(model_type)[0]).adapter


def test_layers_of_several_kinds_have_parts_of_their_own():
    with pytest.raises(UnsupportedError, match="no softmax attention was found in its layers"):
        target_of(decoder("mamba"))
    model = decoder("qwen3_next")
    target = target_of(model)
    assert target.attending == cache_layers(target) == [1, 3]
    assert target.sub(0, "attn") is model.model.layers[0].linear_attn
    assert target.sub(1, "attn") is model.model.layers[1].self_attn


def with_thinker(layer, hidden_states, **kwargs):
    hidden_states = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    return hidden_states + layer.thinker(layer.post_attention_layernorm(hidden_states))


def test_unknown_names_are_refused_with_an_adapter_row_that_works():
    """An MLP under another name; with its row, in which a part may have several places, the model is served."""
    model = tiny_model("llama")[0]
    for layer in model.model.layers:
        layer.thinker = layer.mlp
        layer.forward = partial(with_thinker, layer)
        del layer.mlp
    with pytest.raises(UnsupportedError, match=r"no down, up, gate, but 'thinker.gate_.*Adapter\('llama', down='...'"):
        target_of(model)
    parts = {name: f"thinker.{name}_proj" for name in ("down", "up", "gate")}
    adapters.register(Adapter("llama", mlp="thinker", attn="linear_attn|self_attn", **parts))
    prove(target_of(model))


class EightBits(torch.nn.Module):
    """A linear module of which integers and a scale are kept, as libraries that quantise put in its place."""

    def __init__(self, linear: torch.nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.scale = torch.nn.Parameter(linear.weight.detach().abs().amax(1, keepdim=True) / 127)
        self.weight = torch.nn.Parameter((linear.weight.detach() / self.scale).round().to(torch.int8), False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.weight * self.scale)


def test_partly_quantised_models_are_proved():
    """Its layers are of more kinds than those of the small model that is called in its place."""
    model = copy.deepcopy(tiny_model("llama")[0])
    written = columns(target_of(model), 1, torch.tensor([3]))
    for layer in model.model.layers[1:]:
        layer.mlp.down_proj = EightBits(layer.mlp.down_proj)
    target = target_of(model)
    assert target.adapter.unproved == () and prove(target) == {}
    assert torch.allclose(columns(target, 1, torch.tensor([3])), written, atol=0.02)
