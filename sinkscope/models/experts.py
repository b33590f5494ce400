"""The inside of a fused mixture of experts (transformers' `*Experts` modules), one expert at a time."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def bind(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden `[token d_model]`, chosen experts `[token k]`, routing weights `[token k]`) of a call."""
    index = ("top_k_index", "router_indices")
    weights = ("top_k_weights", "routing_weights")

    def get(position: int, names: tuple[str, ...]) -> Tensor:
        return args[position] if len(args) > position else next(kwargs[n] for n in names if n in kwargs)

    return get(0, ("hidden_states",)), get(1, index), get(2, weights)


@torch.no_grad()
def hidden_post(
    module: Any,
    hidden: Float[Tensor, "token d_model"],
    expert: int,
    interleaved: bool,
    neurons: list[int] | None = None,
) -> Float[Tensor, "token neuron"]:
    """`hook_post` of one expert, before the routing weight.

    Args:
        module: the fused experts.
        hidden: what the expert is given.
        expert: which one.
        interleaved: gate and up alternate in a weight stored input x output (gpt-oss).
        neurons: only these; None: all.
    """
    weight, bias = module.gate_up_proj[expert], getattr(module, "gate_up_proj_bias", None)
    width = weight.shape[1 if interleaved else 0] // 2
    pick = torch.arange(width, device=weight.device) if neurons is None else torch.tensor(neurons, device=weight.device)
    if interleaved:
        rows = torch.stack([2 * pick, 2 * pick + 1], 1).flatten()
        gate_up = hidden @ weight[:, rows]
    else:
        rows = torch.cat([pick, pick + width])
        gate_up = torch.nn.functional.linear(hidden, weight[rows])
    if bias is not None:
        gate_up = gate_up + bias[expert][rows]
    if interleaved:
        return module._apply_gate(gate_up)
    gate, up = gate_up.chunk(2, -1)
    return module.act_fn(gate) * up
