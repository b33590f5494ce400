"""Layers in which the MLP is laid out in another way than in Llama: every number against weights edited by hand."""

from __future__ import annotations

import pytest
import torch
from covering import every_nth
from organisms.decoders import decoder
from pytest import approx
from torch import Tensor
from torch.testing import assert_close

from sinkscope.hooks.edit.edits import Ablate
from sinkscope.models.hooks import on_hidden
from sinkscope.models.neurons import columns, neurons_point, neutral_post, number_of, view_layer
from sinkscope.models.target import Target
from sinkscope.opening.load import target_of
from sinkscope.results.notation import Neuron
from sinkscope.sinks.spikes.survey import read_survey

IDS = torch.arange(20, 44).view(2, 12)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe", "granitemoeshared"])
def test_what_all_neurons_write_is_what_the_mlp_gives(model_type):
    """Routed ones first, shared ones after them; each with the weight that the model gives to its expert."""
    target = target_of(decoder(model_type))
    routed, own, seen = Neuron(1, 2, 5), IDS > 0, []
    with target.hooks(neurons_point(target, [routed]).hook(seen.append)):
        view = view_layer(target, 1, IDS, own)
    chosen = view.routing[:, 2] > 0
    assert neutral_post(target, view, own.flatten(), number_of(target, routed)) == approx(seen[0][chosen].median())
    every = columns(target, 1, torch.arange(view.post.shape[1]))
    assert_close(view.post @ every, read_survey(target, IDS).mlp[1].flatten(0, 1), atol=2e-6, rtol=1e-4)


def after(target: Target, layer: int) -> Tensor:
    """The residual stream after a layer."""
    kept = []
    with target.hooks(on_hidden(target.layers[layer], "post", kept.append)):
        target.forward(IDS)
    return kept[0]


@pytest.mark.parametrize("model_type", every_nth(["axk1", "gemma4_text", "beam"], 2, 0))
@torch.no_grad()
def test_what_an_mlp_adds_is_not_there_without_it(model_type):
    """The survey against a pass in which every weight that the MLP writes with is zero."""
    target = target_of(decoder(model_type))
    survey = read_survey(target, IDS)
    for layer in range(target.n_layers):
        other = target_of(decoder(model_type))
        intact = after(other, layer)
        for name, parameter in other.layers[layer].named_parameters():
            if "mlp" in name and "down" in name:
                parameter.zero_()
        added = (intact - after(other, layer))[:, 0].mean(0)
        assert_close(survey.mlp[layer, :, 0].mean(0), added, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("model_type", ["deepseek_v2", "gemma4_text", "llama4_text"])
@torch.no_grad()
def test_a_head_is_its_columns_of_the_output_projection(model_type):
    """Widths differ from `head_dim` in latent attention, and between the layers of Gemma 4."""
    model = decoder(model_type)
    for layer in (0, 3):
        with Ablate(heads=[(layer, 2)]).on(model):
            ablated = model(IDS).logits
        other = decoder(model_type)
        weight = target_of(other).layers[layer].get_submodule("self_attn.o_proj").weight
        size = weight.shape[1] // 4
        weight[:, 2 * size : 3 * size] = 0
        assert_close(ablated, other(IDS).logits, rtol=1e-4, atol=1e-4)
