"""The weights of modules: as they are stored, wrapped, adapted, quantised, or kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.shards import local, shards_of


@contextmanager
def brought(module: nn.Module) -> Iterator[None]:
    """Context manager in which weights that accelerate keeps on disk or on the CPU are in the module."""
    with ExitStack() as stack:
        for part in module.modules():
            if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(part))
        yield


def is_plain(weight: Any) -> TypeGuard[Tensor]:
    """Return whether a weight is a floating-point tensor, and no subclass that acts as one (quantised by torchao)."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def plain_weight(module: Any) -> Tensor | None:
    """Return the floating-point weight matrix of a linear module, also below a bridge's wrapper; None if quantised."""
    if hasattr(module, "base_layer"):  # an adapter adds to what this weight says
        return None
    inner = getattr(module, "original_component", None)
    weight = getattr(inner if isinstance(inner, nn.Module) else module, "weight", None)
    if not is_plain(weight) or weight.ndim != 2:
        return None
    return weight.detach()


def is_transposed(module: Any) -> bool:
    """Return whether a linear module stores its weight input x output, as Conv1D does, also below wrappers."""
    inner = getattr(module, "original_component", module)
    return type(getattr(inner, "base_layer", inner)).__name__ == "Conv1D"


def input_width(projection: nn.Module) -> int:
    """Return the number of inputs of a linear module."""
    linear: Any = getattr(projection, "base_layer", projection)  # inside an adapter
    weight = plain_weight(linear)
    if weight is None:  # quantised
        return int(linear.in_features)
    return int(weight.shape[0 if is_transposed(linear) else 1])


@torch.no_grad()
def input_columns(target: Any, module: nn.Module, inputs: Sequence[int] | None = None) -> Float[Tensor, "input output"]:
    """Return what a linear module gives when one of its inputs is 1, without the bias.

    Args:
        target: The model, whose device and dtype a module gets that has to be asked.
        module: The module.
        inputs: Inputs; None is all.
    """
    width = input_width(module)
    chosen = list(range(width) if inputs is None else inputs)
    weight = getattr(module, "weight", None)
    if weight is not None and hasattr(weight, "device_mesh"):
        shards = shards_of(weight)
        return shards.columns(shards.gather(local(weight), weight.shape[0], 0), chosen, width).T
    weight = plain_weight(module)
    if weight is not None:
        return weight[chosen] if is_transposed(module) else weight[:, chosen].T
    # Quantised or adapted weights: ask the module itself, but without its hooks; the last row gives its bias.
    device = next((parameter.device for parameter in module.parameters()), target.device)
    units = torch.zeros(len(chosen) + 1, width, device=device, dtype=target.dtype)
    units[range(len(chosen)), chosen] = 1
    outputs = module.forward(units)
    return outputs[:-1] - outputs[-1:]
