"""The components of a model that can be removed: what writes into the residual stream, and the bias of keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from inspect import signature
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.trace.sites import resolve
from sinkscope.models.shards import local, shards_of
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron, Part, Parts

Neurons = tuple[Neuron, ...]
Heads = Sequence[tuple[int, int]]
"""Heads as pairs of layer and head."""


def one_by_one(parts: Iterable[Part]) -> list[Parts]:
    """Edits that remove one part each."""
    return [(part,) for part in parts]


def writers(target: Target, count: int) -> list[Component]:
    """Everything that writes into the residual stream: embeddings, and the attention and MLP of the first layers."""
    components = [Component("token embedding")]
    if target.adapter.absolute_positions:
        components.append(Component("position embedding"))
    for layer in range(count):
        components += [*mixing(target, layer), Component("mlp", layer)]
    return components


def mixing(target: Target, layer: int) -> list[Component]:
    """The attention of a layer, or its mixer; none if the layer has neither."""
    if target.has_attention(layer):
        return [Component("attention", layer)]
    if _mixer(target, layer) is not None:
        return [Component("mixer", layer)]
    return []


def _mixer(target: Target, layer: int) -> Any:
    """The module of a layer that is neither a norm nor a part of its MLP; None if there is none."""
    paths = [target.path(layer, part) for part in ("mlp", "down", "experts")]
    of_mlp = {path.split(".")[0] for path in paths if path}
    for name, module in target.layers[layer].named_children():
        if name not in of_mlp and any(parameter.dim() > 1 for parameter in module.parameters()):
            return module
    return None


def writing_modules(target: Target, component: Component) -> list[Any]:
    """The modules whose outputs are what a component adds to the residual stream."""
    layer = component.layer or 0
    match component.kind:
        case "attention":
            module = target.sub(layer, "attn")
            original = getattr(module, "original_component", module)  # also below a bridge's wrapper
            if "residual" in signature(original.forward).parameters:  # BLOOM adds the residual stream inside
                return [target.sub(layer, "o")]
            return [module]
        case "mixer":
            return [_mixer(target, layer)]
        case "mlp":
            return target.mlp_writers(layer)
        case _:
            return [target.embedding]


def key_projection(target: Target, layer: int) -> Any:
    """The module that gives the keys of a layer, alone or with queries and values; None if there are no keys."""
    if not target.has_part(layer, "k", "fused_qkv"):
        return None
    return target.sub(layer, "k", "fused_qkv")


def key_bias(target: Target, layer: int) -> Float[Tensor, " d"] | None:
    """What is added to the output of `key_projection` as bias of the keys; None if there is none or it is not known."""
    module = key_projection(target, layer)
    bias = getattr(getattr(module, "original_component", module), "bias", None)  # also below a bridge's wrapper
    is_split = target.kind == "bridge" or not target.adapter.attention_interface  # fused projections, or keys hidden
    if bias is None or (target.adapter.k is None and is_split):
        return None
    with suppress(UnsupportedError):  # the layout of the projection is not known
        (site,) = resolve(target, [f"blocks.{layer}.attn.hook_k"])
        whole = shards_of(bias).gather(local(bias).detach(), len(bias), 0)
        of_keys = torch.zeros_like(whole)
        site.cut(of_keys).copy_(site.cut(whole))
        return of_keys
    return None


def has_key_bias(target: Target) -> bool:
    """Whether some layer's keys have a bias that can be removed."""
    return any(key_bias(target, layer) is not None for layer in range(target.n_layers))


def heads_of(target: Target, layer: int) -> list[Head]:
    """The heads of a layer."""
    return [Head(layer, head) for head in range(target.n_heads)]
