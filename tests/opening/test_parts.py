"""Parts that names propose; wrapped models."""

from __future__ import annotations

import pytest
from intervention_kit import KINDS
from organisms.decoders import decoder, decoder_config
from organisms.tiny import tiny_model
from refusals import refused
from transformers import AutoModelForCausalLM

from sinkscope.kv.keeper import cache_layers
from sinkscope.opening import parts
from sinkscope.opening.load import target_of
from sinkscope.opening.places import NAMES


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Nothing was opened before."""
    monkeypatch.setattr(parts, "_KNOWN", {})


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


def test_a_factor_that_each_layer_has_of_its_own_is_not_taken_for_one_of_all():
    config = decoder_config("gemma4_text")
    config.hidden_size_per_layer_input = 0
    model = AutoModelForCausalLM.from_config(config).eval()
    for number, layer in enumerate(model.model.layers):
        layer.layer_scalar.fill_(1 + number)
    assert not target_of(model).adapter.adds


def test_parts_of_unknown_names_are_refused_until_the_names_are_added(monkeypatch):
    model = tiny_model("llama")[0]
    with monkeypatch.context() as unnamed:
        unnamed.setitem(NAMES, "mlp", [])
        with refused("no MLP was found .* add these to sinkscope.opening.places.NAMES"):
            target_of(model)
    assert target_of(model).with_neurons == [0, 1, 2]
