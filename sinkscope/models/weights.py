"""The weights of modules: as they are stored, wrapped, adapted, quantised, kept elsewhere, or those of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from sinkscope.errors import UnsupportedError
from sinkscope.models.hooks import Args, Kwargs, apart, evaluating, has_hooks, hooked
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
    """Return the number of inputs of a linear module; a Conv1D has them in the first dimension of its weight."""
    linear = _inner(projection)
    return int(getattr(linear, "in_features", None) or linear.weight.shape[0 if is_transposed(linear) else 1])


def _says_all(module: Any) -> bool:
    """Whether a linear module is one of PyTorch or transformers, as they made it, so that its weight says all."""
    is_own = type(module) is nn.Linear or type(module).__module__ == "transformers.pytorch_utils"
    return is_own and is_plain(module.weight) and "forward" not in vars(module) and not has_hooks(module)


@torch.no_grad()
def input_columns(target: Any, module: Any, inputs: Sequence[int] | None = None) -> Float[Tensor, "input output"]:
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
    if hasattr(weight, "device_mesh"):
        shards = shards_of(weight)
        whole = shards.gather(local(weight), weight.shape[0], 0)
        return shards.gather(whole, width)[:, chosen].T
    if not _says_all(module):
        return _asked(target, module, width, chosen)
    return weight[chosen] if is_transposed(module) else weight[:, chosen].T


_LARGE, _LINEAR = 30.0, 0.05  # inputs by which a module is tried that is asked, and the relative error it may have


def _asked(target: Any, module: nn.Module, width: int, chosen: list[int]) -> Tensor:
    """What a quantised, adapted or replaced module gives, behind the hooks of its user, for units of these inputs.

    The last two rows show whether it is linear, and its bias.
    """
    count = len(chosen)
    device = next((parameter.device for parameter in module.parameters()), target.device)
    units = torch.zeros(1, count + 2, width, device=device, dtype=target.dtype)
    units[0, range(count), chosen] = 1
    large = _LARGE * torch.randn(count, generator=torch.Generator().manual_seed(0))
    units[0, -2, chosen] = large.to(units)
    behind = module, "pre", lambda _module, _args, kwargs: ((units,), kwargs)
    with evaluating(module), apart(), hooked(behind):
        outputs = module(units)[0]
    columns, given = (outputs[:-1] - outputs[-1:]).split([count, 1])
    expected = units[0, -2, chosen].float() @ columns.float()
    if not (given - expected).abs().max() <= _LINEAR * torch.maximum(given.abs().max(), expected.abs().max()):
        raise UnsupportedError(
            f"a {type(module).__name__} of the model is not linear in its inputs, so that it is not known what they "
            "write: somebody has replaced its forward, or has put a hook on it; measure the model without that"
        )
    return columns


# -- a fused mixture of experts, one expert at a time, whichever way transformers lays out its weights -----------------

HiddenStates = Float[Tensor, "token d_model"]
Neurons = Float[Tensor, "token neuron"]


@dataclass(frozen=True)
class Routed:
    """What experts get in one call.

    Attributes:
        hidden: What enters the chosen experts.
        weight: What multiplies the output of each expert; 0 where it is not chosen.
        scale: What multiplies `hidden` before an expert reads it. None: nothing.
    """

    hidden: HiddenStates
    weight: Float[Tensor, "token expert"]
    scale: Float[Tensor, "token expert"] | None = None

    def entering(self, expert: int) -> HiddenStates:
        """Return what one expert reads."""
        if self.scale is None:
            return self.hidden
        return self.hidden * self.scale[:, expert, None]


class Experts:
    """The experts of a mixture, with weights `down_proj` and `gate_up_proj`, or `up_proj` without a gate.

    Where the mixture itself holds them beside its router (Llama 4), they read hidden states times the router's score,
    and a shared expert adds to what they write.

    Args:
        module: The module in which the experts are one call.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self._is_scaled = hasattr(module, "router") and hasattr(module, "shared_expert")
        self.weights = getattr(module, "experts", module) if self._is_scaled else module
        self._is_transposed: bool = getattr(module, "is_transposed", self._is_scaled)

    @property
    def _down(self) -> Any:  # [expert _ _]
        return self.weights.down_proj

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self._down)

    @property
    def width(self) -> int:
        """Number of neurons of an expert."""
        return int(self._down.shape[1 if self._is_transposed else 2])

    def routed(self, args: Args, kwargs: Kwargs) -> Routed:
        """Return what the arguments of a call mean: hidden states, chosen experts and their weights, by any names."""
        given = (*args, *kwargs.values())
        hidden = given[0].reshape(-1, given[0].shape[-1])
        if self._is_scaled:  # the router is asked again
            scores = self.module.router(hidden)[0]
            return Routed(hidden, (scores > 0).to(scores), scores)
        _, chosen, weights = given[:3]
        by_expert = weights.new_zeros(len(weights), self.count).scatter_add_(1, chosen.long(), weights)
        return Routed(hidden, by_expert)

    def post(self, expert: int, hidden: HiddenStates) -> Neurons:
        """Return `hook_post` before the routing weight, by the experts' own activation, which may clamp and shift.

        Args:
            expert: Number of the expert.
            hidden: What it reads.
        """
        weights, bias = self.weights, getattr(self.module, "gate_up_proj_bias", None)
        if not hasattr(weights, "gate_up_proj"):
            return weights.act_fn(linear(hidden, weights.up_proj[expert]))
        weight = weights.gate_up_proj[expert]
        both = linear(hidden, weight.T if self._is_transposed else weight, None if bias is None else bias[expert])
        if hasattr(self.module, "_apply_gate"):
            return self.module._apply_gate(both)
        gate, up = both.chunk(2, -1)
        return weights.act_fn(gate) * up

    def columns(self, expert: int, neurons: Any = slice(None)) -> Float[Tensor, "neuron d_model"]:
        """Return what neurons of an expert, some or all, write when their `hook_post` is 1."""
        down = self._down[expert]
        return (down if self._is_transposed else down.T)[neurons]

    def output(self, routed: Routed) -> HiddenStates:
        """Return what the module must give according to this layout."""
        total = torch.zeros_like(routed.hidden)
        bias = getattr(self.module, "down_proj_bias", None)
        for expert in routed.weight.any(0).nonzero().flatten().tolist():
            written = self.post(expert, routed.entering(expert)) @ self.columns(expert)
            if bias is not None:
                written = written + bias[expert]
            total += routed.weight[:, expert, None] * written
        return total + self.module.shared_expert(routed.hidden) if self._is_scaled else total


def experts_of(module: Any) -> Experts | None:
    """Return the experts that a module holds; None if it holds none, or in no known layout, or not as plain tensors."""
    experts = Experts(module)
    down = getattr(experts.weights, "down_proj", None)
    is_known = hasattr(experts.weights, "gate_up_proj") or hasattr(experts.weights, "up_proj")
    return experts if is_known and is_plain(down) and down.ndim == 3 else None
