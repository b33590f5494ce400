"""The scripts about massive activations, the weights and checkpoints, against planted circuits."""

from __future__ import annotations

import pytest
import torch
from einops import einsum
from organisms import FAMILIES, organism, tiny_model

from experiments import massive
from experiments.screen import input_rows, reaches, screen
from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.models.wrapped import target_of

DENSE = ["llama", "gemma2", "gpt2"]


def written_norm(target: Target, layer: int, neuron: int, stream: torch.Tensor) -> torch.Tensor:
    """Norm that the neuron writes for residual streams, by the model's own modules, without activation and bias."""
    adapter, block = target.adapter, target.layers[layer]
    read = stream / stream.norm(dim=-1, keepdim=True) * target.d_model**0.5
    if adapter.mid != adapter.mlp:
        names = (adapter.mid, "post_attention_layernorm", "input_layernorm")
        norm = next(block.get_submodule(name) for name in names if name and hasattr(block, name))
        read = norm(stream) - norm(torch.zeros(1, target.d_model))
    rows = [part[neuron].float() for part in input_rows(target, layer, None)]
    values = torch.stack([einsum(read, row, "start d_model, d_model -> start").abs() for row in rows])
    column = target.w_out(layer, [neuron])[0].float()
    if adapter.post_mlp_norm is not None:
        behind = block.get_submodule(adapter.post_mlp_norm)
        column = column * behind(torch.ones(1, target.d_model))[0]
    return values.prod(0) * column.norm()


@pytest.mark.parametrize("kind", DENSE)
def test_reach_is_the_most_that_any_input_makes_the_neuron_write(kind):
    """Gradient ascent over residual streams, through the model's own norm and projections, reaches it from below."""
    torch.manual_seed(0)
    target = target_of(tiny_model(kind)[0])
    for name, weight in target.hf.named_parameters():
        if ("norm" in name or "ln_" in name) and name.endswith("weight"):
            weight.data = torch.rand_like(weight) + 0.5  # gains that matter
    (part,) = reaches(target, 1)
    bound = float(part.norm[3])
    stream = torch.randn(32, target.d_model, requires_grad=True)
    optimizer = torch.optim.Adam([stream], lr=0.1)
    for _ in range(120):
        optimizer.zero_grad()
        (-written_norm(target, 1, 3, stream).sum()).backward()
        optimizer.step()
    most = float(written_norm(target, 1, 3, stream).max().detach())
    assert 0.99 * bound <= most <= 1.001 * bound


@pytest.mark.parametrize("family", FAMILIES)
def test_planted_neurons_are_the_first_candidates(family):
    o = organism(family, 0)
    candidates = screen(target_of(o.model, o.tokenizer))["candidates"]
    planted = {"L{}.N{}".format(*site) if len(site) == 2 else "L{}.E{}.N{}".format(*site) for site in o.truth.neurons}
    assert planted <= {row["neuron"] for row in candidates[: len(planted)]}


def test_a_planted_sink_is_massive_and_its_values_are_drained():
    o = organism("llama", 2)
    with_bos, without = massive.massive(Setup.open(o.model, tokenizer=o.tokenizer))["conditions"]
    layer = o.truth.sink_layer
    assert with_bos["bos"] and not without["bos"] and layer is not None
    made, before = with_bos["layers"][layer], with_bos["layers"][layer - 1]
    assert tuple(made["dims"]) == o.truth.residual_dims and before["dims"] == []
    assert made["share"] == 1 / 64 and made["top"][0] > 5 * before["top"][0]
    ratios = with_bos["value_ratio"]
    assert max(ratios[layer + 1 :]) < 0.2 < min(ratios[: layer + 1])
    assert with_bos["tokens"] == {"<s>": 4} and with_bos["secondary"] == []
