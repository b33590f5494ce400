"""Linear modules, as they are stored, wrapped, adapted or quantised."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


def plain_weight(module: Any) -> Tensor | None:
    """The floating-point weight matrix of a linear module, also below a bridge's wrapper; None if quantised."""
    if hasattr(module, "base_layer"):  # an adapter adds to what this weight says
        return None
    inner = getattr(module, "original_component", None)
    weight = getattr(inner if isinstance(inner, nn.Module) else module, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point() or weight.ndim != 2:
        return None
    return weight.detach()


def input_width(projection: nn.Module, transposed: bool) -> int:
    """Number of inputs of a linear module; `transposed` says that weights are stored input x output."""
    linear: Any = getattr(projection, "base_layer", projection)  # inside an adapter
    weight = plain_weight(linear)
    if weight is None:  # quantised
        return int(linear.in_features)
    return int(weight.shape[0 if transposed else 1])
