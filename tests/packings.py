"""Packings: changes of a model's weights that leave its function as it is, and the new name of each part.

A packing takes a Llama, changes it in place, and returns `Names`. `GAUGES` change no shape, so that any of them can
follow another; `split` adds neurons.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Place = tuple[int, int]
"""Layer, and number of a neuron or a head."""


@dataclass(frozen=True)
class Names:
    """New names of neurons and heads; what is missing keeps its own."""

    neurons: Mapping[Place, Place] = field(default_factory=dict)
    heads: Mapping[Place, Place] = field(default_factory=dict)

    def neuron(self, layer: int, number: int) -> Place:
        return self.neurons.get((layer, number), (layer, number))

    def head(self, layer: int, number: int) -> Place:
        return self.heads.get((layer, number), (layer, number))


Packing = Callable[[Any, torch.Generator], Names]


def put(linear: nn.Linear, weight: Tensor) -> None:
    """Give a linear map new weights, of any shape."""
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.out_features, linear.in_features = weight.shape


def factors(count: int, generator: torch.Generator) -> Tensor:
    """Factors of either sign, from a tenth to ten."""
    size = 10 ** (2 * torch.rand(count, generator=generator) - 1)
    return size * (2 * torch.randint(2, (count,), generator=generator) - 1)


@torch.no_grad()
def packed(model: Any, packings: Sequence[Packing], seed: int = 0) -> tuple[Any, Names]:
    """A packed copy of a model, and the names of its parts."""
    new, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    neurons, heads = dict[Place, Place](), dict[Place, Place]()
    for packing in packings:
        names = packing(new, generator)
        neurons |= names.neurons
        heads |= names.heads
    return new, Names(neurons, heads)


def permuted_neurons(model: Any, generator: torch.Generator) -> Names:
    neurons: dict[Place, Place] = {}
    for number, layer in enumerate(model.model.layers):
        mlp = layer.mlp
        order = torch.randperm(len(mlp.gate_proj.weight), generator=generator)
        for linear in (mlp.gate_proj, mlp.up_proj):
            put(linear, linear.weight[order])
        put(mlp.down_proj, mlp.down_proj.weight[:, order])
        neurons |= {(number, old): (number, new) for new, old in enumerate(order.tolist())}
    return Names(neurons)


def scaled_neurons(model: Any, generator: torch.Generator) -> Names:
    """The linear factor times a number of either sign, and what is written divided by it."""
    for layer in model.model.layers:
        by = factors(len(layer.mlp.up_proj.weight), generator)
        put(layer.mlp.up_proj, layer.mlp.up_proj.weight * by[:, None])
        put(layer.mlp.down_proj, layer.mlp.down_proj.weight / by)
    return Names()


def sizes(model: Any) -> tuple[int, int, int]:
    """Heads, key and value heads, and the width of one."""
    return model.config.num_attention_heads, model.config.num_key_value_heads, model.config.head_dim


def permuted_heads(model: Any, generator: torch.Generator) -> Names:
    """Key and value heads, and the heads that share one."""
    heads, groups, width = sizes(model)
    each, names = heads // groups, dict[Place, Place]()
    for number, layer in enumerate(model.model.layers):
        attn = layer.self_attn
        of_groups = torch.randperm(groups, generator=generator)
        order = torch.cat([each * group + torch.randperm(each, generator=generator) for group in of_groups.tolist()])
        for linear, own in ((attn.q_proj, order), (attn.k_proj, of_groups), (attn.v_proj, of_groups)):
            put(linear, linear.weight.unflatten(0, (-1, width))[own].flatten(0, 1))
        put(attn.o_proj, attn.o_proj.weight.unflatten(1, (heads, width))[:, order].flatten(1))
        names |= {(number, old): (number, new) for new, old in enumerate(order.tolist())}
    return Names(heads=names)


def turned_values(model: Any, generator: torch.Generator) -> Names:
    """Another basis of the values of each head, and another scale."""
    heads, groups, width = sizes(model)
    for layer in model.model.layers:
        attn = layer.self_attn
        turns = torch.linalg.qr(torch.randn(groups, width, width, generator=generator)).Q
        scale = factors(groups, generator)[:, None, None]
        put(attn.v_proj, (turns @ attn.v_proj.weight.view(groups, width, -1) * scale).flatten(0, 1))
        back = (turns / scale).repeat_interleave(heads // groups, 0)
        out = attn.o_proj.weight.unflatten(1, (heads, width))
        put(attn.o_proj, torch.einsum("dhi,hji->dhj", out, back).flatten(1))
    return Names()


GAUGES: tuple[Packing, ...] = (permuted_neurons, scaled_neurons, permuted_heads, turned_values)


def split(layer: int, neuron: int, parts: Sequence[float]) -> Packing:
    """A neuron becomes several; the parts sum to 1, and the first keeps its place."""

    def packing(model: Any, _generator: torch.Generator) -> Names:
        for number, block in enumerate(model.model.layers):  # neurons that write nothing, at the end of each layer
            more = [neuron] * (len(parts) - 1)
            for linear in (block.mlp.gate_proj, block.mlp.up_proj):
                put(linear, torch.cat([linear.weight, linear.weight[more]]))
            down = block.mlp.down_proj.weight
            column = down[:, neuron, None]
            new = column * torch.tensor(parts[1:]) if number == layer else 0 * down[:, more]
            put(block.mlp.down_proj, torch.cat([down, new], 1))
            if number == layer:
                block.mlp.down_proj.weight[:, neuron] = column[:, 0] * parts[0]
        model.config.intermediate_size += len(parts) - 1
        return Names()

    return packing
