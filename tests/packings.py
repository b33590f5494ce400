"""Packings: changes of a Llama's weights that leave its function as it is."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def put(linear: nn.Linear, weight: Tensor) -> None:
    """Give a linear map new weights, of any shape."""
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.out_features, linear.in_features = weight.shape


@torch.no_grad()
def gauged(model: Any, seed: int = 0) -> tuple[Any, dict[str, str]]:
    """A copy with neurons and heads in another order and on other scales, and the new names of those that moved."""
    new, generator, names = copy.deepcopy(model), torch.Generator().manual_seed(seed), dict[str, str]()
    heads, groups, width = model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim
    for number, layer in enumerate(new.model.layers):
        mlp, attn = layer.mlp, layer.self_attn
        order = torch.randperm(len(mlp.gate_proj.weight), generator=generator)
        scale = 10 ** (2 * torch.rand(len(order), generator=generator) - 1)
        scale *= 2 * torch.randint(2, (len(order),), generator=generator) - 1
        put(mlp.gate_proj, mlp.gate_proj.weight[order])
        put(mlp.up_proj, mlp.up_proj.weight[order] * scale[:, None])
        put(mlp.down_proj, mlp.down_proj.weight[:, order] / scale)
        names |= {f"L{number}.N{old}": f"L{number}.N{now}" for now, old in enumerate(order.tolist())}
        of_heads = torch.arange(heads).view(groups, -1).flip(1).flatten()  # within the heads of a group
        put(attn.q_proj, attn.q_proj.weight.unflatten(0, (heads, width))[of_heads].flatten(0, 1))
        put(attn.o_proj, attn.o_proj.weight.unflatten(1, (heads, width))[:, of_heads].flatten(1))
        names |= {f"L{number}.H{old}": f"L{number}.H{now}" for now, old in enumerate(of_heads.tolist())}
    return new, names


@torch.no_grad()
def split(model: Any, layer: int, neuron: int, parts: Sequence[float]) -> Any:
    """A copy in which a neuron is several; the parts sum to 1, and the first keeps its place."""
    new, more = copy.deepcopy(model), [neuron] * (len(parts) - 1)
    for number, block in enumerate(new.model.layers):  # neurons that write nothing, at the end of other layers
        for linear in (block.mlp.gate_proj, block.mlp.up_proj):
            put(linear, torch.cat([linear.weight, linear.weight[more]]))
        down = block.mlp.down_proj.weight
        shares = torch.tensor(parts) if number == layer else torch.eye(len(parts))[0]
        put(block.mlp.down_proj, torch.cat([down, down[:, more] * shares[1:]], 1))
        block.mlp.down_proj.weight[:, neuron] *= shares[0]
    new.config.intermediate_size += len(more)
    return new
