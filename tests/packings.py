"""Packings: changes of a model's weights that leave its function as it is, and the new name of each part.

A packing takes a Hugging Face model whose layers have `mlp.gate_proj`, `up_proj`, `down_proj` and `self_attn.q_proj` to
`o_proj`, changes it in place, and returns `Names`. `GAUGES` change no shape, so that any of them can follow another;
`composed` draws some of them. The others add neurons.
"""

from __future__ import annotations

import copy
import random
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

    def then(self, other: Names) -> Names:
        """The names after another packing."""
        return Names(_joined(self.neurons, other.neurons), _joined(self.heads, other.heads))

    def neuron(self, layer: int, number: int) -> Place:
        return self.neurons.get((layer, number), (layer, number))

    def head(self, layer: int, number: int) -> Place:
        return self.heads.get((layer, number), (layer, number))


def _joined(first: Mapping[Any, Any], then: Mapping[Any, Any]) -> dict[Any, Any]:
    joined = dict(then)
    for old, new in first.items():
        joined[old] = then.get(new, new)
    return joined


Packing = Callable[[Any, torch.Generator], Names]
GAUGES: dict[str, Packing] = {}


def gauge(packing: Packing) -> Packing:
    GAUGES[packing.__name__] = packing
    return packing


def layers_of(model: Any) -> Any:
    return model.model.layers


def put(linear: nn.Linear, weight: Tensor, bias: Tensor | None = None) -> None:
    """Give a linear map new weights, of any shape."""
    linear.weight = nn.Parameter(weight.to(linear.weight.dtype).contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=False)
    linear.out_features, linear.in_features = weight.shape


def factors(count: int, generator: torch.Generator) -> Tensor:
    """Factors of either sign, from a tenth to ten."""
    size = 10 ** (2 * torch.rand(count, generator=generator) - 1)
    return size * (2 * torch.randint(2, (count,), generator=generator) - 1)


def packed(model: Any, packings: Sequence[Packing], seed: int = 0) -> tuple[Any, Names]:
    """A packed copy of a model, and the names of its parts."""
    new, names = copy.deepcopy(model), Names()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for packing in packings:
            names = names.then(packing(new, generator))
    return new, names


def composed(model: Any, seed: int) -> tuple[Any, Names]:
    """A copy of a model under three gauges in a drawn order, and the names of its parts."""
    chosen = random.Random(f"gauges {seed}").sample(sorted(GAUGES), 3)
    return packed(model, [GAUGES[name] for name in chosen], seed)


# --- gauges of neurons ---


@gauge
def permuted_neurons(model: Any, generator: torch.Generator) -> Names:
    neurons: dict[Place, Place] = {}
    for number, layer in enumerate(layers_of(model)):
        mlp = layer.mlp
        order = torch.randperm(len(mlp.gate_proj.weight), generator=generator)
        for linear in (mlp.gate_proj, mlp.up_proj):
            put(linear, linear.weight[order], None if linear.bias is None else linear.bias[order])
        put(mlp.down_proj, mlp.down_proj.weight[:, order])
        for new, old in enumerate(order.tolist()):
            neurons[number, old] = (number, new)
    return Names(neurons)


@gauge
def scaled_neurons(model: Any, generator: torch.Generator) -> Names:
    """The linear factor times a number of either sign, and what is written divided by it."""
    for layer in layers_of(model):
        mlp = layer.mlp
        by = factors(len(mlp.up_proj.weight), generator)
        bias = None if mlp.up_proj.bias is None else mlp.up_proj.bias * by
        put(mlp.up_proj, mlp.up_proj.weight * by[:, None], bias)
        put(mlp.down_proj, mlp.down_proj.weight / by)
    return Names()


# --- gauges of heads ---


def sizes(model: Any) -> tuple[int, int, int]:
    """Heads, key and value heads, and the width of one."""
    config = model.config
    width = layers_of(model)[0].self_attn.q_proj.weight.shape[0] // config.num_attention_heads
    return config.num_attention_heads, config.num_key_value_heads, width


def _rows(linear: nn.Linear, order: Tensor, width: int) -> None:
    bias = None if linear.bias is None else linear.bias.unflatten(0, (-1, width))[order].flatten()
    put(linear, linear.weight.unflatten(0, (-1, width))[order].flatten(0, 1), bias)


@gauge
def permuted_heads(model: Any, generator: torch.Generator) -> Names:
    """Key and value heads, and the heads that share one."""
    heads, groups, width = sizes(model)
    each, names = heads // groups, dict[Place, Place]()
    for number, layer in enumerate(layers_of(model)):
        attn = layer.self_attn
        of_groups = torch.randperm(groups, generator=generator)
        order = torch.cat([each * group + torch.randperm(each, generator=generator) for group in of_groups.tolist()])
        _rows(attn.q_proj, order, width)
        for linear in (attn.k_proj, attn.v_proj):
            _rows(linear, of_groups, width)
        out = attn.o_proj.weight.unflatten(1, (heads, width))[:, order].flatten(1)
        put(attn.o_proj, out)
        for new, old in enumerate(order.tolist()):
            names[number, old] = (number, new)
    return Names(heads=names)


@gauge
def turned_values(model: Any, generator: torch.Generator) -> Names:
    """Another basis of the values of each head, and another scale."""
    heads, groups, width = sizes(model)
    for layer in layers_of(model):
        attn = layer.self_attn
        turns = torch.linalg.qr(torch.randn(groups, width, width, generator=generator)).Q
        scale = factors(groups, generator)[:, None, None]
        bias = None
        if attn.v_proj.bias is not None:
            bias = (turns @ attn.v_proj.bias.view(groups, width, 1) * scale).flatten()
        put(attn.v_proj, (turns @ attn.v_proj.weight.view(groups, width, -1) * scale).flatten(0, 1), bias)
        back = (turns / scale).repeat_interleave(heads // groups, 0)
        out = attn.o_proj.weight.unflatten(1, (heads, width))
        put(attn.o_proj, torch.einsum("dhi,hji->dhj", out, back).flatten(1))
    return Names()


# --- more neurons ---


def widened(model: Any, more: int) -> int:
    """Put neurons that write nothing at the end of each layer, and return the number of the first."""
    first = len(layers_of(model)[0].mlp.gate_proj.weight)
    for layer in layers_of(model):
        mlp = layer.mlp
        for linear in (mlp.gate_proj, mlp.up_proj):
            rows = linear.weight.new_zeros(more, linear.weight.shape[1])
            bias = None if linear.bias is None else torch.cat([linear.bias, linear.bias.new_zeros(more)])
            put(linear, torch.cat([linear.weight, rows]), bias)
        put(
            mlp.down_proj,
            torch.cat([mlp.down_proj.weight, mlp.down_proj.weight.new_zeros(model_width(model), more)], 1),
        )
    model.config.intermediate_size = first + more
    return first


def model_width(model: Any) -> int:
    return model.get_input_embeddings().weight.shape[1]


def copied(mlp: Any, neuron: int, place: int, times: float, source: Any = None) -> None:
    """Put `times` a neuron (of another layer, if one is given) at a place of this layer."""
    of = mlp if source is None else source
    for name in ("gate_proj", "up_proj"):
        getattr(mlp, name).weight[place] = getattr(of, name).weight[neuron]
    mlp.down_proj.weight[:, place] = of.down_proj.weight[:, neuron] * times


def split(layer: int, neuron: int, parts: Sequence[float]) -> Packing:
    """A neuron becomes several; the parts sum to 1, and the first keeps its place."""

    def packing(model: Any, _generator: torch.Generator) -> Names:
        first, mlp = widened(model, len(parts) - 1), layers_of(model)[layer].mlp
        for number, part in enumerate(parts[1:]):
            copied(mlp, neuron, first + number, part)
        mlp.down_proj.weight[:, neuron] *= parts[0]
        return Names()

    return packing


def cancelling(layer: int, source: Place, times: Sequence[float], along: Place | None = None) -> Packing:
    """New neurons of a layer fire as `source` does and write `times` what `along` writes; the times sum to 0."""

    def packing(model: Any, _generator: torch.Generator) -> Names:
        layers, (place, neuron) = layers_of(model), source
        first, (of, one) = widened(model, len(times)), along or source
        for number, factor in enumerate(times):
            copied(layers[layer].mlp, neuron, first + number, factor, layers[place].mlp)
            layers[layer].mlp.down_proj.weight[:, first + number] = layers[of].mlp.down_proj.weight[:, one] * factor
        return Names()

    return packing


def split_noisily(layer: int, neuron: int, size: float = 1.0) -> Packing:
    """A neuron becomes two of the same gate, whose linear factors differ from it by the same random vector."""

    def packing(model: Any, generator: torch.Generator) -> Names:
        first, mlp = widened(model, 1), layers_of(model)[layer].mlp
        copied(mlp, neuron, first, 1.0)
        up = mlp.up_proj.weight[neuron]
        noise = torch.randn(up.shape, generator=generator)
        noise *= size * up.norm() / noise.norm()
        mlp.up_proj.weight[first] = -noise
        mlp.up_proj.weight[neuron] = up + noise
        return Names()

    return packing
