"""Parts that names propose, or a row of the user's own; wrapped models."""

from __future__ import annotations

from functools import partial

import pytest
from intervention_kit import KINDS
from organisms.decoders import decoder
from organisms.tiny import tiny_model
from refusals import refused

from sinkscope.kv.keeper import cache_layers
from sinkscope.models import adapters
from sinkscope.models.adapters import Adapter
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
    with refused("no softmax attention was found in its layers"):
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
    with refused(r"no down, up, gate, but 'thinker.gate_.*Adapter\('llama', down='...'"):
        target_of(model)
    parts = {name: f"thinker.{name}_proj" for name in ("down", "up", "gate")}
    adapters.register(Adapter("llama", mlp="thinker", attn="linear_attn|self_attn", **parts))
    prove(target_of(model))
