"""The weights of modules: as they are stored, wrapped, adapted, quantised, kept elsewhere, or those of experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.arithmetic import affine, product
from sinkscope.models.hooks import Args, Kwargs, apart, evaluating, has_hooks, hooked


@contextmanager
def brought(module: nn.Module) -> Iterator[None]:
    """Context manager in which weights that accelerate keeps on disk or on the CPU are in the module, or below it."""
    from accelerate.utils import align_module_device

    with ExitStack() as stack:
        for part in module.modules():
            stack.enter_context(align_module_device(part))
        yield


def is_plain(weight: Any) -> TypeGuard[Tensor]:
    """Return whether a weight is a floating-point tensor, and no subclass that acts as one (quantised by torchao)."""
    return type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point()


def input_width(projection: Any) -> int:
    """Return the number of inputs of a linear module; of a Conv1D, `nx` is."""
    width = getattr(projection, "in_features", None) or getattr(projection, "nx", None)
    return int(width or projection.weight.shape[1])


@torch.no_grad()
def input_columns(target: Any, module: Any, inputs: Sequence[int]) -> Float[Tensor, "input output"]:
    """Return what a linear module gives when one of some inputs is 1, without the bias.

    The weight of a module of PyTorch or transformers, as they made it, says all.

    Args:
        target: The model, whose device and dtype a module gets that has to be asked.
        module: The module.
        inputs: The inputs.

    Raises:
        UnsupportedError: The module is not linear, because somebody has replaced what it computes.
    """
    weight: Any = getattr(module, "weight", None)
    is_own = type(module) is nn.Linear or type(module).__module__ == "transformers.pytorch_utils"
    if hasattr(weight, "full_tensor"):
        weight = weight.full_tensor()
    elif not is_own or not is_plain(weight) or "forward" in vars(module) or has_hooks(module):
        return _asked(target, module, inputs)
    return (weight if hasattr(module, "nx") else weight.T)[inputs]


_LARGE, _LINEAR = 30.0, 0.05  # inputs by which a module is tried that is asked, and the relative error it may have


def _asked(target: Any, module: nn.Module, inputs: Sequence[int]) -> Tensor:
    """What a quantised, adapted or replaced module gives, behind the hooks of its user, for units of these inputs.

    The last two rows show whether it is linear, and its bias.
    """
    count = len(inputs)
    units = torch.zeros(1, count + 2, input_width(module), device=target.device, dtype=target.dtype)
    units[0, range(count), inputs] = 1
    units[0, -2, inputs] = -_LARGE
    hook = module, "pre", lambda _module, _args, kwargs: ((units,), kwargs)
    with evaluating(module), apart(), hooked(hook):
        outputs = module(units)[0].float()
    columns, offset = (outputs[:-1] - outputs[-1]).split([count, 1])
    off = offset + _LARGE * columns.sum(0)
    if not off.abs().max() <= _LINEAR * offset.abs().max():
        raise UnsupportedError(
            f"a {type(module).__name__} of the model is not linear in its inputs, so that it is not known what they "
            "write: somebody has replaced its forward, or has put a hook on it; measure the model without that"
        )
    return columns


# -- a fused mixture of experts, one expert at a time, whichever way transformers lays out its weights -----------------


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
    def down(self) -> Float[Tensor, "expert neuron d_model"]:
        """What each neuron of each expert writes when its `hook_post` is 1."""
        down = self.weights.down_proj
        return down if self._is_transposed else down.mT

    def routed(
        self, args: Args, kwargs: Kwargs, tokens: Any = slice(None)
    ) -> tuple[Float[Tensor, "expert token d_model"], Float[Tensor, "token expert"]]:
        """Return what the arguments of a call, by any names, mean: what each expert reads, and its weight.

        The weight is 0 where an expert is not chosen.

        Args:
            args: The arguments.
            kwargs: Those by name.
            tokens: The tokens of which it is returned, by their indices or a mask on the CPU.
        """
        tensors = (*args, *kwargs.values())
        hidden = tensors[0].reshape(-1, tensors[0].shape[-1])[tokens]
        if self._is_scaled:  # the router is asked again
            scores = self.module.router(hidden)[0]
            return hidden * scores.T[..., None], (scores > 0).to(scores)
        chosen, weights = tensors[1][tokens], tensors[2][tokens]
        count = len(self.down)
        return hidden.expand(count, -1, -1), weights.new_zeros(len(hidden), count).scatter_add_(
            1, chosen.long(), weights
        )

    def post(self, expert: int, hidden: Float[Tensor, "token d_model"]) -> Float[Tensor, "token neuron"]:
        """Return `hook_post` before the routing weight, by the experts' own activation, which may clamp and shift.

        Args:
            expert: Number of the expert.
            hidden: What it reads.
        """
        weights, bias = self.weights, getattr(self.module, "gate_up_proj_bias", None)
        if not hasattr(weights, "gate_up_proj"):
            return weights.act_fn(affine(hidden, weights.up_proj[expert]))
        weight = weights.gate_up_proj[expert]
        both = affine(hidden, weight.T if self._is_transposed else weight, None if bias is None else bias[expert])
        if hasattr(self.module, "_apply_gate"):
            return self.module._apply_gate(both)
        gate, up = both.chunk(2, -1)
        return weights.act_fn(gate) * up

    def values(
        self, entering: Float[Tensor, "expert token d_model"], weight: Float[Tensor, "token expert"]
    ) -> Float[Tensor, "token expert neuron"]:
        """Return the neurons of all experts, times the routing weight; 0 where an expert was not chosen."""
        values = torch.zeros(*weight.shape, self.down.shape[1], device=weight.device)
        for expert in range(weight.shape[1]):
            rows = weight[:, expert].nonzero().flatten()
            if len(rows):
                post = self.post(expert, entering[expert, rows])
                values[rows, expert] = post.float() * weight[rows, expert, None].float()
        return values

    def output(self, args: Args, kwargs: Kwargs) -> Float[Tensor, "... d_model"]:
        """Return what a call must give according to this layout."""
        routed = self.routed(args, kwargs)
        bias = getattr(self.module, "down_proj_bias", None)
        total = product(self.values(*routed).to(self.down).transpose(0, 1), self.down).sum(0)
        if bias is not None:
            total = total + product(routed[1].to(bias), bias)
        if self._is_scaled:
            total = total + self.module.shared_expert((*args, *kwargs.values())[0])
        return total


def experts_of(module: Any) -> Experts | None:
    """Return the experts that a module holds; None if it holds none, or in no known layout, or not as plain tensors."""
    experts = Experts(module)
    down = getattr(experts.weights, "down_proj", None)
    is_known = hasattr(experts.weights, "gate_up_proj") or hasattr(experts.weights, "up_proj")
    return experts if is_known and is_plain(down) and down.ndim == 3 else None
