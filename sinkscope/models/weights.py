"""The weights of modules: as they are stored, wrapped, adapted, quantised, or kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError, first_line
from sinkscope.models.modes import OWN_HOOKS, evaluating, has_hooks, hooks_of
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


def are_alike(given: Tensor, expected: Tensor, share: float) -> bool:
    """Return whether numbers differ by at most a share of the largest; NaN differs."""
    size = torch.maximum(given.abs().max(), expected.abs().max())
    return bool((given - expected).abs().max() <= share * size)


_CHECKED: WeakKeyDictionary[nn.Module, tuple[Any, bool]] = WeakKeyDictionary()
"""Whether modules compute with their weights, and as what they were when that was tried."""
_TRIED = 3  # random inputs by which it is tried
_LARGE, _LINEAR = 30.0, 0.05  # inputs by which a module is tried that is asked, and the relative error it may have
_EXACT, _IN_HALF = 1e-3, 16  # largest relative distance in float32; times the rounding of numbers in half precision


def computes_with(module: Any, weight: Tensor) -> bool:
    """Return whether a linear module gives what its weight says, as its user has made it; it is tried once.

    It does not if somebody replaced its `forward`, or put a hook on it that changes what it gets or gives.

    Args:
        module: The module.
        weight: Its weight.
    """
    if "forward" in vars(module) or has_hooks(module):  # which may do another thing at any time
        return _gives_product(module, weight)
    state = (id(weight), weight._version, type(module), type(module).forward)
    known = _CHECKED.get(module)
    if known is None or known[0] != state:
        _CHECKED[module] = state, _gives_product(module, weight)
    return _CHECKED[module][1]


@torch.no_grad()
def _gives_product(module: Any, weight: Tensor) -> bool:
    matrix = weight if is_transposed(module) else weight.T
    inputs = torch.zeros(1, _TRIED + 1, len(matrix), dtype=weight.dtype)
    inputs[:, 1:] = torch.randn(1, _TRIED, len(matrix), generator=torch.Generator().manual_seed(0))
    inputs = inputs.to(weight.device)
    given = _asked(module, inputs)[0].float()
    expected = inputs[0].float() @ matrix.float()
    change = given[1:] - given[:1]  # without the bias
    most = max(_EXACT, _IN_HALF * torch.finfo(weight.dtype).eps)
    size = torch.maximum(expected.abs().max(), given.abs().max())
    return bool((change - expected[1:]).abs().max() <= most * size)


def _asked(module: nn.Module, inputs: Float[Tensor, "1 row input"]) -> Float[Tensor, "1 row output"]:
    """What a module makes of what its `forward` gets, with the hooks of its user on what it gives.

    Raises:
        UnsupportedError: It fails.
    """
    try:
        with evaluating(module):
            output: Any = module.forward(inputs)
            for number, hook in hooks_of(module, "_forward_hooks").items():
                if number not in OWN_HOOKS:
                    more: Any = ({},) if number in hooks_of(module, "_forward_hooks_with_kwargs") else ()
                    changed = hook(module, (inputs,), *more, output)
                    output = output if changed is None else changed
        return output
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise UnsupportedError(
            f"a {type(module).__name__} of the model does more than its weight says, and fails where it is asked what "
            f"it gives ({first_line(error)}): remove what replaced its forward, or the hooks on it"
        ) from None


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
    weight = getattr(module, "weight", None)
    if weight is not None and hasattr(weight, "device_mesh"):
        shards = shards_of(weight)
        return shards.columns(shards.gather(local(weight), weight.shape[0], 0), chosen, width).T
    weight = plain_weight(module)
    if weight is not None and computes_with(module, getattr(module, "weight", weight)):
        return weight[chosen] if is_transposed(module) else weight[:, chosen].T
    # Quantised, adapted or replaced: ask the module itself; the last rows give its bias, and whether it is linear.
    device = next((parameter.device for parameter in module.parameters()), target.device)
    units = torch.zeros(1, len(chosen) + 2, width, device=device, dtype=target.dtype)
    units[0, range(len(chosen)), chosen] = 1
    large = _LARGE * torch.randn(len(chosen), generator=torch.Generator().manual_seed(0))
    units[0, -2, chosen] = large.to(units)
    outputs = _asked(module, units)[0]
    columns = outputs[:-2] - outputs[-1:]
    total, expected = (outputs[-2] - outputs[-1]).float(), units[0, -2, chosen].float() @ columns.float()
    if not are_alike(total, expected, _LINEAR):
        raise UnsupportedError(
            f"a {type(module).__name__} of the model is not linear in its inputs, so that its neurons write nothing of "
            "their own: somebody has replaced its forward, or has put a hook on it; measure the model without that"
        )
    return columns
