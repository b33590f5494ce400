"""The neurons of a layer: their values at chosen positions, what each writes to the residual stream, and their hooks.

Neurons of a mixture are numbered `expert * d_mlp + neuron`; those of a shared expert follow after all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from sinkscope.models.experts import Experts, Routed
from sinkscope.models.hooks import Args, Hook, Kwargs, first_tensor, hidden_of, on_hidden, on_input, with_hidden
from sinkscope.models.partial_pass import LayerInput
from sinkscope.models.target import Target
from sinkscope.models.weights import brought, input_columns


def norms_of(tensor: Float[Tensor, ...]) -> Float[Tensor, ...]:
    """Return L2 norms in float32; no smaller type is summed in itself."""
    return torch.linalg.vector_norm(tensor, dim=-1, dtype=torch.promote_types(tensor.dtype, torch.float32)).float()


def mlp_writers(target: Target, layer: int) -> list[nn.Module]:
    """Return the modules whose sum is what the MLP gives: one, or a mixture and the shared expert beside it."""
    writers, paths = [target.sub(layer, "mlp")], target.paths[layer]
    is_shared = layer in target.mixtures and "down" in paths
    if is_shared and not f"{paths['down']}.".startswith(f"{paths['mlp']}."):
        writers.append(target.sub(layer, "down"))
    return writers


def on_mlp(target: Target, layer: int, see: Callable[[Tensor], None]) -> list[Hook]:
    """Return hooks by which `see` gets what the MLP gives, before any norm after it."""
    writers = mlp_writers(target, layer)
    if len(writers) == 1:
        return [(writers[0], "post", on_hidden(see))]
    outputs: list[Tensor] = []

    def keep(output: Tensor) -> None:
        outputs.append(output)
        if len(outputs) == len(writers):
            total = outputs[0]
            for other in outputs[1:]:
                total = total + other.view_as(total)
            outputs.clear()
            see(total)

    return [(writer, "post", on_hidden(keep)) for writer in writers]


def column_factor(target: Target, layer: int, expert: int | None = None) -> float:
    """Return the factor between a neuron's column and what the layer adds to the residual stream (or a norm reads)."""
    factor = target.adapter.down_factor
    if expert is not None:
        factor = target.adapter.expert_factor
    elif layer in target.mixtures:
        factor = target.adapter.shared_factor
    return factor * target.adapter.write_factor


@torch.no_grad()
def w_out(
    target: Target, layer: int, neurons: Sequence[int], expert: int | None = None
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


@dataclass(frozen=True)
class LayerView:
    """A layer at `n` positions.

    Attributes:
        layer: Number of the layer.
        mlp: Output of the MLP, before any norm after it; times the factor that the layer puts on it.
        post: `hook_post`; in a mixture, times the weight in `routing`.
        routing: Weight of every expert, 0 for those not chosen; the shared expert comes last, if there is one. None if
            the layer is not a mixture.
    """

    layer: int
    mlp: Float[Tensor, "n d_model"]
    post: Float[Tensor, "n neuron"]
    routing: Float[Tensor, "n expert"] | None = None

    def at(self, some: Bool[Tensor, " n"]) -> LayerView:
        """Return the layer at some of these positions."""
        routing = None if self.routing is None else self.routing[some.to(self.routing.device)]
        chosen = some.to(self.post.device)
        return LayerView(self.layer, self.mlp[chosen], self.post[chosen], routing)


@torch.no_grad()
def view_layer(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    where: Bool[Tensor, "row pos"],
    start: LayerInput | None = None,
) -> LayerView:
    """Return the layer at the positions marked in `where`, from a pass that ends at this layer.

    Args:
        target: The model.
        layer: The layer.
        ids: The texts.
        where: The positions.
        start: What entered a layer up to this one when these texts were read; the pass begins there.
    """
    target.check_neurons(layer)
    chosen = where.flatten()
    parts: dict[str, Tensor] = {}

    def keep(part: str, value: Tensor) -> None:
        tensor = value.detach().flatten(0, -2)
        parts[part] = tensor[chosen.to(tensor.device)].float()

    def experts_done(module: nn.Module, args: Args, kwargs: Kwargs, _output: Any) -> None:
        experts = target.experts(layer)
        routed = experts.routed(args, kwargs)
        keep("routing", routed.weight)
        with brought(module):
            parts["of experts"] = _expert_activations(experts, routed, chosen)

    on_part = partial(target.part_hooks, layer)
    hooks = on_mlp(target, layer, partial(keep, "mlp"))
    hooks += on_part("down", "pre", on_input(partial(keep, "post")))
    hooks += on_part("shared_gate", "post", on_hidden(partial(keep, "gate")))
    if layer in target.mixtures:
        hooks += on_part("experts", "post", experts_done)
    with target.hooks(*hooks):
        target.forward(ids, last_layer=layer, start=start)
    mlp, routing = parts["mlp"] * target.adapter.write_factor, parts.get("routing")
    if routing is None:
        return LayerView(layer, mlp, parts["post"])
    post = parts["of experts"]
    if "post" in parts:
        shared = parts["post"]
        weight = torch.ones_like(shared[:, :1])
        if "gate" in parts:
            weight = parts["gate"].sigmoid()
        post = torch.cat([post, shared * weight], 1)
        routing = torch.cat([routing, weight], 1)
    return LayerView(layer, mlp, post, routing)


def _expert_activations(experts: Experts, routed: Routed, chosen: Tensor) -> Tensor:
    """The neurons of all experts for the chosen tokens, times the routing weight; 0 where an expert was not chosen."""
    chosen = chosen.to(routed.weight.device)
    routing = routed.weight[chosen].float()
    post = torch.zeros(*routing.shape, experts.width, device=routing.device)
    for expert in range(experts.count):
        rows = routing[:, expert].nonzero().flatten()
        if len(rows):
            entering = routed.entering(expert)[chosen][rows]
            values = experts.activate(*experts.factors(expert, entering))
            post[rows, expert] = values.float() * routing[rows, expert, None]
    return post.flatten(1)


def flat_number(target: Target, layer: int, expert: int | None, neuron: int) -> int:
    """Return the number of a neuron in a `LayerView`."""
    if expert is None:
        expert = target.n_experts(layer)
    return expert * target.d_mlp + neuron


def expert_and_neuron(target: Target, layer: int, number: int) -> tuple[int | None, int]:
    """Return the inverse of `flat_number`.

    The expert is None if the layer is not a mixture, and for a shared expert.
    """
    expert = min(number // target.d_mlp, target.n_experts(layer))
    neuron = number - expert * target.d_mlp
    if expert == target.n_experts(layer):
        return None, neuron
    return expert, neuron


def gain_of(target: Target, norm: Any) -> Float[Tensor, " d_model"]:
    """Return the factor of a norm for each dimension, however it is stored: probed by a vector of mean 0, square 1."""
    signs = torch.ones(target.d_model, device=target.device, dtype=target.dtype)
    signs[1::2] = -1
    positive = norm(signs[None])[0].float()
    negative = norm(-signs[None])[0].float()
    return (positive - negative) / 2 * signs.float()


def columns(target: Target, layer: int, neurons: Int[Tensor, " k"]) -> Float[Tensor, "k d_model"]:
    """Return columns of the down projection for numbers of a `LayerView`, float32."""
    count = target.n_experts(layer)
    experts = (neurons // target.d_mlp).clamp(max=count)
    written = torch.zeros(len(neurons), target.d_model, device=neurons.device)
    with target.loaded(layer):
        for expert in experts.unique().tolist():
            own = experts == expert
            numbers = (neurons[own] - expert * target.d_mlp).tolist()
            written[own] = w_out(target, layer, numbers, None if expert == count else expert).to(neurons.device)
    return written


def neutral_post(target: Target, text: LayerView, number: int) -> float:
    """Return the median `hook_post` of a neuron on typical text; of a routed expert, over the tokens that chose it."""
    post = text.post[:, number]
    if text.routing is None:
        return float(post.median())
    expert, _ = expert_and_neuron(target, text.layer, number)
    weight = text.routing[:, -1 if expert is None else expert]  # the last weight is the shared expert's
    chosen = weight > 0
    if not bool(chosen.any()):
        return 0.0
    return float((post[chosen] / weight[chosen]).median())


Added = Callable[[Float[Tensor, "row pos d_model"]], Float[Tensor, "row pos d_model"]]
"""Gives how much of the residual stream after a layer is not there if the MLP gives zero."""


def keep_call(target: Target, layer: int, calls: list[Added]) -> Hook:
    """Return a hook that keeps the call of a layer, which does not simply add what its MLP gives."""

    def keep(_module: Any, args: Args, kwargs: Kwargs) -> None:
        hidden = hidden_of(args, kwargs).clone()  # some layers add to it in place
        args, kwargs = with_hidden(args, kwargs, hidden)

        @torch.no_grad()
        def added(resid: Tensor) -> Tensor:
            silenced = mlp_writers(target, layer)[0], "post", on_hidden(torch.zeros_like)
            with target.loaded(layer), target.hooks(silenced):
                return resid - first_tensor(target.layers[layer].forward(*args, **kwargs))

        calls.append(added)

    return target.layers[layer], "pre", keep
