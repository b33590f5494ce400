"""The algebra of the down projections: what each neuron writes to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.linear import plain_weight
from sinkscope.models.norms import norms_of
from sinkscope.models.sizes import Sizes


def column_factor(target: Sizes, layer: int, expert: int | None = None) -> float:
    """Constant between the column of a neuron and what the layer adds to the residual stream (or a norm reads)."""
    factor = target.adapter.down_factor
    if expert is not None:
        factor = target.adapter.expert_factor
    elif target.is_mixture(layer):
        factor = target.adapter.shared_factor
    return factor * target.adapter.write_factor


@torch.no_grad()
def w_out(target: Sizes, layer: int, neurons: list[int], expert: int | None = None) -> Float[Tensor, "neuron d_model"]:
    """Columns of the down projection: what each neuron writes when its `hook_post` is 1.

    In a mixture, None means the shared expert. Routing weight and sigmoid gate are not included, constant factors
    up to the residual stream (or up to a norm behind the MLP) are.
    """
    with target.loaded(layer):
        if expert is not None:
            written = target.experts(layer).columns(expert, neurons)
        else:
            written = input_columns(target, target.mlp_part(layer, "down"), target.width(layer), neurons)
        factor = column_factor(target, layer, expert)
        if factor == 1:
            return written
        return written * factor


@torch.no_grad()
def input_columns(
    target: Sizes, module: nn.Module, width: int, inputs: Sequence[int] | None = None
) -> Float[Tensor, "input output"]:
    """What a linear module of so many inputs gives when one of them is 1, without the bias.

    Args:
        module: The module.
        width: Number of its inputs.
        inputs: Inputs; None is all.
    """
    chosen = list(range(width) if inputs is None else inputs)
    weight = plain_weight(module)
    if weight is not None:
        if target.adapter.transposed_down:  # such an architecture stores all of them so
            return weight[chosen]
        return weight[:, chosen].T
    # Quantised or adapted weights: ask the module itself, but without its hooks; the last row gives its bias.
    device = next((parameter.device for parameter in module.parameters()), target.device)
    units = torch.zeros(len(chosen) + 1, width, device=device, dtype=target.dtype)
    units[range(len(chosen)), chosen] = 1
    given = module.forward(units)
    return given[:-1] - given[-1:]


@torch.no_grad()
def w_out_norms(
    target: Sizes, layer: int, expert: int | None = None, gain: Float[Tensor, " d_model"] | None = None
) -> Float[Tensor, " d_mlp"]:
    """L2 norm of every column of the down projection; `gain` multiplies each dimension behind the MLP, if given."""
    with target.loaded(layer):
        weight = None
        if expert is None and gain is None:
            weight = plain_weight(target.mlp_part(layer, "down"))
        if weight is not None:
            return norms_of(weight, int(target.adapter.transposed_down)) * abs(column_factor(target, layer))
        parts = list[Tensor]()
        for neurons in torch.arange(target.width(layer, expert)).split(1024):
            written = w_out(target, layer, neurons.tolist(), expert)
            if gain is not None:
                written = written.float() * gain
            parts.append(norms_of(written, 1))
        return torch.cat(parts)
