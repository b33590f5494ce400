"""The inside of a fused mixture of experts (transformers' `*Experts` modules), one expert at a time."""

from __future__ import annotations

from typing import Any

import torch
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
    gate, up = (torch.nn.functional.linear(hidden, *both) for both in in_rows(experts, expert, neurons))
    return gate, up


def in_rows(
    experts: Any, expert: int, neurons: list[int] | None = None
) -> list[tuple[Float[Tensor, "neuron d_model"], Float[Tensor, " neuron"] | None]]:
    """Weights and biases (None where there are none) of gate and up of an expert, of some neurons or of all."""
    weight = experts.gate_up_proj[expert]
    weight = weight.T if experts.is_transposed else weight
    width = weight.shape[0] // 2
    picked = torch.arange(width) if neurons is None else torch.tensor(neurons)
    halves = []
    for half in (0, 1):
        rows = half * width + picked if experts.is_concatenated else 2 * picked + half
        rows = rows.to(weight.device)
        halves.append((weight[rows], experts.gate_up_proj_bias[expert][rows] if experts.has_bias else None))
    return halves


def activate(
    experts: Any, gate: Float[Tensor, "token neuron"], up: Float[Tensor, "token neuron"]
) -> Float[Tensor, "token neuron"]:
    """`hook_post` before the routing weight: the experts' own activation, which has clamps and offsets in some."""
    joined = torch.cat([gate, up], -1) if experts.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    return experts._apply_gate(joined)


def columns(experts: Any, expert: int, neurons: list[int]) -> Float[Tensor, "neuron d_model"]:
    """What neurons of an expert write when their `hook_post` is 1."""
    down = experts.down_proj[expert]
    return down[neurons] if experts.is_transposed else down[:, neurons].T
