"""The components of a model that write into the residual stream, and where what they write passes."""

from __future__ import annotations

from inspect import signature
from typing import Any

from sinkscope.hooks.edit.hook_points import HookPoint, heads_point
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head
from sinkscope.sinks.spikes.spike import Part


def mixer_of(target: Target, layer: int) -> Any:
    """Return the module of a layer that is neither a norm nor a part of its MLP; None if there is none."""
    paths = [target.path(layer, part) for part in ("mlp", "down", "experts")]
    of_mlp = {path.split(".")[0] for path in paths if path}
    for name, module in target.layers[layer].named_children():
        if name not in of_mlp and any(parameter.dim() > 1 for parameter in module.parameters()):
            return module
    return None


def components(target: Target, last_layer: int) -> list[Component]:
    """Return what writes into the residual stream up to a layer: the embedding, then attention (or mixers) and MLPs."""
    parts = [Component("token embedding")]
    for layer in range(last_layer + 1):
        if target.has_attention(layer):
            parts.append(Component("attention", layer))
        elif mixer_of(target, layer) is not None:
            parts.append(Component("mixer", layer))
        if target.has_neurons(layer):
            parts.append(Component("mlp", layer))
    return parts


def hook_points_of(target: Target, part: Part) -> list[HookPoint]:
    """Return where what a component or a head writes passes; all of these together are what it writes."""
    layer = part.layer or 0
    if isinstance(part, Head):
        return [heads_point(target, layer, target.head_columns(layer, part.head))]
    assert isinstance(part, Component)
    if part.layer is None:  # with the embedding of positions, and scaled, as the first layer gets it
        return [HookPoint(target.layers[0], "pre")]
    return [HookPoint(module, "post") for module in writing_modules(target, part, part.layer)]


def writing_modules(target: Target, component: Component, layer: int) -> list[Any]:
    """Return the modules whose outputs are what a component adds to the residual stream, after a norm behind it."""
    match component.kind:
        case "attention" if target.has_part(layer, "attn_out"):
            return [target.sub(layer, "attn_out")]
        case "attention":
            module = target.sub(layer, "attn")
            original = getattr(module, "original_component", module)  # also below a bridge's wrapper
            if "residual" in signature(original.forward).parameters:  # BLOOM adds the residual stream inside
                return [target.sub(layer, "o")]
            return [module]
        case "mixer":
            return [mixer_of(target, layer)]
        case "mlp" if target.has_part(layer, "post_mlp_norm"):
            return [target.sub(layer, "post_mlp_norm")]
        case _:
            return target.mlp_writers(layer)
