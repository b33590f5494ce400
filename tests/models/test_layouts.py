"""Layers in which the MLP is laid out in another way than in Llama: every number against weights edited by hand."""

from __future__ import annotations

import pytest
import torch
from covering import every_nth
from organisms.decoders import decoder
from organisms.tiny import tiny_model
from torch import Tensor
from torch.testing import assert_close

from sinkscope.hooks.edit.edits import Ablate
from sinkscope.models.hooks import first_tensor
from sinkscope.models.neurons import columns, norms_of, view_layer
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.sinks.spikes.survey import read_survey

IDS = torch.arange(20, 44).view(2, 12)


@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe"])
def test_what_all_neurons_write_is_what_the_mlp_gives(model_type):
    """Routed ones first, shared ones after them; each with the weight that the model gives to its expert."""
    target = target_of(tiny_model(model_type)[0])
    view = view_layer(target, 1, IDS, torch.ones_like(IDS, dtype=torch.bool))
    every = columns(target, 1, torch.arange(view.post.shape[1]))
    assert view.post.shape[1] == 4 * target.width(1, 0) + target.width(1)
    assert_close(view.post @ every, view.mlp, atol=2e-6, rtol=1e-4)


def test_norms_are_summed_in_float32():
    assert float(norms_of(torch.full((4,), 5e4, dtype=torch.float16))) == pytest.approx(1e5, rel=1e-3)


@torch.no_grad()
def after(target: Target, layer: int, ids: Tensor = IDS) -> Tensor:
    """The residual stream after a layer."""
    kept = []
    with target.hooks((target.layers[layer], "post", lambda _m, _a, _k, output: kept.append(first_tensor(output)))):
        target.forward(ids)
    return kept[0]


@pytest.mark.parametrize("model_type", every_nth(["granitemoeshared", "axk1", "gemma4_text", "beam"], 2, 1))
@torch.no_grad()
def test_what_an_mlp_adds_is_not_there_without_it(model_type):
    """The survey against a pass in which every weight that the MLP writes with is zero."""
    target = target_of(decoder(model_type))
    survey = read_survey(target, IDS)
    for layer in range(target.n_layers):
        other = target_of(decoder(model_type))
        intact = after(other, layer)
        for name, parameter in other.layers[layer].named_parameters():
            is_mlp = any(part in name for part in ("mlp", "block_sparse_moe"))
            if (is_mlp and "down" in name) or "output_linear" in name:
                parameter.zero_()
        added = (intact - after(other, layer))[:, 0].mean(0)
        assert_close(survey.mlp[layer, :, 0].mean(0), added, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("model_type", "width"), [("deepseek_v2", 16), ("gemma4_text", None), ("llama4_text", 16)])
@torch.no_grad()
def test_a_head_is_its_columns_of_the_output_projection(model_type, width):
    """Widths differ from `head_dim` in latent attention, and between the layers of Gemma 4."""
    model = decoder(model_type)
    for layer in (0, 3):
        with Ablate(heads=[(layer, 2)]).on(model):
            ablated = model(IDS).logits
        other = decoder(model_type)
        weight = target_of(other).layers[layer].get_submodule("self_attn.o_proj").weight
        size = width or weight.shape[1] // 4
        weight[:, 2 * size : 3 * size] = 0
        assert_close(ablated, other(IDS).logits, rtol=1e-4, atol=1e-4)
