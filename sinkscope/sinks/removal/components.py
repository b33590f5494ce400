"""The components of a model that can be removed: what writes into the residual stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

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
                return [target.output_projection(layer)]
            return [module]
        case "mixer":
            return [_mixer(target, layer)]
        case "mlp":
            return target.mlp_writers(layer)
        case _:
            return [target.embedding]


def heads_of(target: Target, layer: int) -> list[Head]:
    """The heads of a layer."""
    return [Head(layer, head) for head in range(target.n_heads)]
