"""The weights of modules: as they are stored, wrapped, adapted, quantised, or kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.hooks import apart, evaluating, has_hooks
from sinkscope.models.shards import local, shards_of


@contextmanager
def brought(module: nn.Module, *, recurse: bool = True) -> Iterator[None]:
    """Context manager in which weights that accelerate keeps on disk or on the CPU are in the module, or below it."""
    with ExitStack() as stack:
        for part in module.modules() if recurse else (module,):
            if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(part))
        yield


def is_plain(weight: Any) -> TypeGuard[Tensor]:
    """Return whether a weight is a floating-point tensor, and no subclass that acts as one (quantised by torchao)."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def _inner(module: Any) -> Any:
    """The linear module inside a bridge's wrapper, and inside an adapter."""
    inner = getattr(module, "original_component", module)
    return getattr(inner, "base_layer", inner)


def is_transposed(module: Any) -> bool:
    """Return whether a linear module stores its weight input x output, as Conv1D does, also below wrappers."""
    return type(_inner(module)).__name__ == "Conv1D"


def input_width(projection: nn.Module) -> int:
    """Return the number of inputs of a linear module."""
    linear = _inner(projection)
    weight = getattr(linear, "weight", None)
    if not is_plain(weight) or weight.ndim != 2:  # quantised
        return int(linear.in_features)
    return int(weight.shape[0 if is_transposed(linear) else 1])


_LARGE, _LINEAR = 30.0, 0.05  # inputs by which a module is tried that is asked, and the relative error it may have


def _asked(module: nn.Module, inputs: Tensor) -> Tensor:
    """What a module gives, with the hooks of its user and without those of sinkscope.

    Raises:
        UnsupportedError: It fails.
    """
    try:
        with evaluating(module), apart():
            return module(inputs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedError(
            f"a {type(module).__name__} of the model does more than its weight says, and fails where it is asked what "
            f"it gives ({first_line(error)}): remove what replaced its forward, or the hooks on it"
        ) from None


def _computes_with_weight(module: Any) -> bool:
    """Whether a linear module is one of PyTorch or transformers, as they made it, so that its weight says all."""
    is_own = type(module) is nn.Linear or type(module).__module__ == "transformers.pytorch_utils"
    return is_own and is_plain(module.weight) and "forward" not in vars(module) and not has_hooks(module)


@torch.no_grad()
def input_columns(target: Any, module: nn.Module, inputs: Sequence[int] | None = None) -> Float[Tensor, "input output"]:
    """Return what a linear module gives when one of its inputs is 1, without the bias.

    Args:
        target: The model, whose device and dtype a module gets that has to be asked.
        module: The module.
        inputs: Inputs; None is all.

    Raises:
        UnsupportedError: The module is not linear, because somebody has replaced what it computes.
    """
    width = input_width(module)
    chosen = list(range(width) if inputs is None else inputs)
    weight: Any = getattr(module, "weight", None)
    if weight is not None and hasattr(weight, "device_mesh"):
        shards = shards_of(weight)
        whole = shards.gather(local(weight), weight.shape[0], 0)
        return shards.gather(whole, width)[:, chosen].T
    if weight is not None and _computes_with_weight(module):
        if is_transposed(module):
            return weight[chosen]
        return weight[:, chosen].T
    # Quantised, adapted or replaced: ask the module itself; the last rows give its bias, and whether it is linear.
    count = len(chosen)
    device = next((parameter.device for parameter in module.parameters()), target.device)
    units = torch.zeros(1, count + 2, width, device=device, dtype=target.dtype)
    units[0, range(count), chosen] = 1
    large = _LARGE * torch.randn(count, generator=torch.Generator().manual_seed(0))
    units[0, -2, chosen] = large.to(units)
    outputs = _asked(module, units)[0]
    outputs = outputs[:-1] - outputs[-1:]
    columns, given = outputs[:-1], outputs[-1].float()
    expected = units[0, -2, chosen].float() @ columns.float()
    if not (given - expected).abs().max() <= _LINEAR * torch.maximum(given.abs().max(), expected.abs().max()):
        raise UnsupportedError(
            f"a {type(module).__name__} of the model is not linear in its inputs, so that its neurons write nothing of "
            "their own: somebody has replaced its forward, or has put a hook on it; measure the model without that"
        )
    return columns
