"""The algebra of the down projections: what each neuron writes to the residual stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.models.modules.linear import input_width, is_transposed, plain_weight
from sinkscope.models.modules.parts import Parts
from sinkscope.models.norms import norms_of
from sinkscope.models.shards import local, shards_of

_TYPICAL = 1024  # neurons among which a typical one is looked for


def column_factor(target: Parts, layer: int, expert: int | None = None) -> float:
    """Return the factor between a neuron's column and what the layer adds to the residual stream (or a norm reads)."""
    factor = target.adapter.down_factor
    if expert is not None:
        factor = target.adapter.expert_factor
    elif target.is_mixture(layer):
        factor = target.adapter.shared_factor
    return factor * target.adapter.write_factor


@torch.no_grad()
def w_out(
    target: Parts, layer: int, neurons: Sequence[int], expert: int | None = None
) -> Float[Tensor, "neuron d_model"]:
    """Return columns of the down projection, float32: what each neuron writes when its `hook_post` is 1.

    In a mixture, None means the shared expert. Routing weight and sigmoid gate are not included, constant factors
    up to the residual stream (or up to a norm after the MLP) are.
    """
    factor = column_factor(target, layer, expert)
    with target.loaded(layer):
        if expert is not None:
            written = target.experts(layer).columns(expert, list(neurons))
        else:
            written = input_columns(target, target.sub(layer, "down"), neurons)
        return written.float() * factor


@torch.no_grad()
def input_columns(
    target: Parts, module: nn.Module, inputs: Sequence[int] | None = None
) -> Float[Tensor, "input output"]:
    """Return what a linear module gives when one of its inputs is 1, without the bias.

    Args:
        target: The model.
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
    given = module.forward(units)
    return given[:-1] - given[-1:]


def typical_neuron(target: Parts, layer: int) -> int | None:
    """Return a neuron whose column is neither zero nor large; None if all are zero."""
    norms = norms_of(w_out(target, layer, range(min(target.width(layer), _TYPICAL))))
    order = norms.argsort()[int((norms == 0).sum()) :]
    if len(order):
        return int(order[len(order) // 2])
    return None
