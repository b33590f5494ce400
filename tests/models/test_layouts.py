"""Layers in which the MLP is laid out in another way than in Llama: every number against weights edited by hand."""

from __future__ import annotations

import pytest
import torch
from covering import every_nth
from organisms.decoders import decoder
from torch import Tensor
from torch.testing import assert_close

from sinkscope.models.hooks import first_tensor
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.sinks.spikes.survey import read_survey

IDS = torch.arange(20, 44).view(2, 12)
# A shared expert beside the mixture; a norm in some layers; experts in three layouts; more than an addition.
TYPES = "granitemoeshared axk1 qwen2_moe glm4_moe olmo_hybrid llama4_text nemotron_h".split()
TYPES += "gemma4_text beam llama gemma2 mixtral".split()


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
