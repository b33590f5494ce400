"""The inside of a fused mixture of experts (transformers' `*Experts` modules), one expert at a time."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor


def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden `[token d_model]`, chosen experts `[token k]`, routing weights `[token k]`) of a call.

    The names of the last two differ between families, their order does not.
    """
    hidden, chosen, weights = (*args, *kwargs.values())[:3]
    return hidden, chosen, weights


def gate_up(
    experts: Any, expert: int, hidden: Float[Tensor, "token d_model"], neurons: list[int] | None = None
) -> tuple[Float[Tensor, "token neuron"], Float[Tensor, "token neuron"]]:
    """Both input projections of an expert, of some neurons or of all, whichever way the fused weight is laid out."""
    (gate_weight, gate_bias), (up_weight, up_bias) = in_rows(experts, expert, neurons)
    linear = torch.nn.functional.linear
    return linear(hidden, gate_weight, gate_bias), linear(hidden, up_weight, up_bias)


def in_rows(
    experts: Any, expert: int, neurons: list[int] | None = None
) -> list[tuple[Float[Tensor, "neuron d_model"], Float[Tensor, " neuron"] | None]]:
    """Weights and biases (None where there are none) of gate and up of an expert, of some neurons or of all."""
    weight = experts.gate_up_proj[expert]
    if experts.is_transposed:
        weight = weight.T
    width = weight.shape[0] // 2
    if neurons is None:
        numbers = torch.arange(width)
    else:
        numbers = torch.tensor(neurons)
    halves: list[tuple[Tensor, Tensor | None]] = []
    for half in (0, 1):
        if experts.is_concatenated:
            rows = half * width + numbers
        else:
            rows = 2 * numbers + half
        rows = rows.to(weight.device)
        bias = None
        if experts.has_bias:
            bias = experts.gate_up_proj_bias[expert][rows]
        halves.append((weight[rows], bias))
    return halves


def activate(
    experts: Any, gate: Float[Tensor, "token neuron"], up: Float[Tensor, "token neuron"]
) -> Float[Tensor, "token neuron"]:
    """`hook_post` before the routing weight: the experts' own activation, which has clamps and offsets in some."""
    order = "(neuron half)"
    if experts.is_concatenated:
        order = "(half neuron)"
    return experts._apply_gate(rearrange([gate, up], f"half token neuron -> token {order}"))


def width(experts: Any) -> int:
    """Number of neurons of an expert."""
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])


def columns(experts: Any, expert: int, neurons: list[int]) -> Float[Tensor, "neuron d_model"]:
    """What neurons of an expert write when their `hook_post` is 1."""
    down = experts.down_proj[expert]
    if experts.is_transposed:
        return down[neurons]
    return down[:, neurons].T
