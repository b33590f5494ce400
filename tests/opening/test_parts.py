"""What the names of a model propose: the rows of the table, factors, and refusals."""

from __future__ import annotations

import copy
from dataclasses import fields
from functools import partial

import pytest
import torch
from intervention_kit import KINDS
from organisms.decoders import decoder
from organisms.examine import scope_line
from organisms.tiny import tiny_model

from sinkscope.errors import UnsupportedError
from sinkscope.kv.keeper import cache_layers
from sinkscope.models import adapters
from sinkscope.models.adapters import Adapter
from sinkscope.models.neurons import columns
from sinkscope.opening.live import target_of
from sinkscope.opening.proof import prove


def forget(monkeypatch):
    """Nothing was opened before, and no row is registered."""
    for known in ("parts._KNOWN", "parts._OF_CLASSES"):
        monkeypatch.setattr(f"sinkscope.opening.{known}", {})
    monkeypatch.setattr(adapters, "ADAPTERS", {})


@pytest.mark.parametrize("model_type", ["gemma2", "phi3", "gpt_neox", "falcon"])
def test_what_a_row_does_not_say_is_found_by_passes(model_type, monkeypatch):
    """The row has the paths alone; factors, layouts and the form of attention come out as they are."""
    whole = target_of(tiny_model(model_type)[0]).adapter
    forget(monkeypatch)
    paths = {field.name: getattr(whole, field.name) for field in fields(Adapter)}
    monkeypatch.setattr(adapters, "ADAPTERS", {model_type: Adapter(**paths)})
    assert target_of(tiny_model(model_type)[0]).adapter == whole


@pytest.mark.parametrize(("model_type", "kind"), [("llama", "bridge"), ("gpt2", "bridge"), ("phi3", "nnsight")])
def test_a_model_that_its_user_wrapped(model_type, kind, monkeypatch):
    plain = target_of(tiny_model(model_type)[0]).adapter
    forget(monkeypatch)
    target = target_of(KINDS[kind](*tiny_model(model_type)))
    assert target.kind == kind and target.adapter == plain


def test_what_names_do_not_propose_is_refused_with_the_reason():
    with pytest.raises(UnsupportedError, match="no softmax attention was found in its layers"):
        target_of(decoder("mamba"))


def test_layers_of_several_kinds_have_parts_of_their_own():
    model = decoder("qwen3_next")
    target = target_of(model)
    assert target.attending == [1, 3]
    assert cache_layers(target) == [1, 3] and "cache policies and guards in 2 of 4 layers" in scope_line(target)
    assert target.sub(0, "attn") is model.model.layers[0].linear_attn
    assert target.sub(1, "attn") is model.model.layers[1].self_attn


def test_unknown_names_are_refused_with_an_adapter_row_that_works(monkeypatch):
    """An MLP under another name; with its row, the model is served."""
    forget(monkeypatch)
    model = tiny_model("llama")[0]
    for layer in model.model.layers:
        layer.thinker = layer.mlp
        layer.forward = partial(_with_thinker, layer)
        del layer.mlp
    with pytest.raises(
        UnsupportedError, match=r"no down, up, gate, but 'thinker.gate_proj'.*Adapter\('llama', down='...'"
    ) as caught:
        target_of(model)
    assert "\n" not in str(caught.value)
    parts = {name: f"thinker.{name}_proj" for name in ("down", "up", "gate")}
    adapters.register(Adapter("llama", mlp="thinker", **parts))
    assert prove(target_of(model)).problem is None


def _with_thinker(layer, hidden_states, **kwargs):
    hidden_states = hidden_states + layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **kwargs)[0]
    return hidden_states + layer.thinker(layer.post_attention_layernorm(hidden_states))


def test_a_row_names_the_places_that_a_part_may_have(monkeypatch):
    forget(monkeypatch)
    adapters.register(Adapter("llama", attn="linear_attn|self_attn"))
    assert prove(target_of(tiny_model("llama")[0])).problem is None


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
    for layer in model.model.layers[1:]:
        layer.mlp.down_proj = EightBits(layer.mlp.down_proj)
    model.is_quantized = True
    target = target_of(model)
    assert {paths["down"] for paths in target.paths} == {"mlp.down_proj"}
    assert target.adapter.unproved == () and prove(target).problem is None
    assert columns(target, 1, torch.tensor([3])).shape == (1, target.d_model)
