"""One layer at chosen positions: what its neurons write there, and the norm without some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.models.experts import activate, bind, gate_up
from sinkscope.models.target import Target, first_tensor, norm_of, on_input, on_output


@dataclass(frozen=True)
class LayerView:
    """A layer at `n` positions.

    Neurons of a mixture are numbered `expert * d_mlp + neuron`; those of a shared expert follow after all of these.

    Attributes:
        resid: Residual stream after the layer.
        mlp: Output of the down projection(s), before any norm behind it.
        post: `hook_post`; in a mixture, times the weight in `routing`.
        up: Output of the up projection, the linear factor. None in a mixture and if the MLP has no such factor.
        routing: Weight of every expert, 0 for those not chosen; the shared expert comes last, if there is one. None if
            the layer is not a mixture.
    """

    layer: int
    resid: Float[Tensor, "n d_model"]
    mlp: Float[Tensor, "n d_model"]
    post: Float[Tensor, "n neuron"]
    up: Float[Tensor, "n neuron"] | None = None
    routing: Float[Tensor, "n expert"] | None = None


@torch.no_grad()
def view_layer(target: Target, layer: int, ids: Int[Tensor, "row pos"], where: Tensor) -> LayerView:
    """The layer at the positions marked in `where` (`[row pos]`, bool), from a pass that ends at this layer."""
    a, got = target.adapter, dict[str, Tensor]()

    def pick(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1, tensor.shape[-1])[where.reshape(-1).to(tensor.device)].detach()

    def keep(module: Any, name: str, get: Callable[[Any], Tensor] = first_tensor, when: str = "post") -> None:
        see = (on_input if when == "pre" else on_output)(lambda seen: got.update({name: pick(get(seen))}))
        pairs.append((module, when, see))

    def experts(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        hidden, index, weights = map(pick, bind(args, kwargs))
        width, count = target.d_mlp, int(module.num_experts)
        post = torch.zeros(len(hidden), count, width, device=hidden.device)
        routing = torch.zeros(len(hidden), count + 1, device=hidden.device)  # one more: "no expert" under sharding
        got["routing"] = routing.scatter(1, index, weights.float())[:, :count]
        for expert in index.unique().tolist():
            rows, slots = (index == expert).nonzero(as_tuple=True)
            values = activate(module, *gate_up(module, expert, hidden[rows]))
            post[rows, expert] = values.float() * weights[rows, slots, None].float()
        got["post"] = post.flatten(1)

    pairs: list[tuple[Any, str, Any]] = []
    keep(target.sub(layer, a.mlp), "mlp")
    if target.is_mixture(layer):
        pairs.append((target.sub(layer, a.experts or ""), "post", experts))
        if target.has_shared(layer):
            keep(target.mlp_part(layer, "down"), "shared", when="pre")
            if a.shared_gate is not None:
                keep(target.sub(layer, a.shared_gate), "weight", torch.sigmoid)
    else:
        keep(target.sub(layer, a.down), "post", when="pre")
        if a.up is not None and (a.gate is not None or a.fused_gate_up):
            factors = 2 if a.fused_gate_up else 1  # the up factor comes last
            keep(target.sub(layer, a.up), "up", lambda out: out.chunk(factors, -1)[-1])
    keep(target.layers[layer], "resid")
    with target.hooks(*pairs, (target.layers[layer], "post", lambda *_: target.stop())):
        target.forward(ids)
    if "shared" in got:
        shared = got.pop("shared").float()
        weight = got.pop("weight", torch.ones_like(shared[:, :1])).float()
        got["post"] = torch.cat([got["post"], shared * weight], 1)
        got["routing"] = torch.cat([got["routing"], weight], 1)
    return LayerView(layer, **{name: tensor.float() for name, tensor in got.items()})


@torch.no_grad()
def contribution_norms(target: Target, view: LayerView) -> Float[Tensor, "n neuron"]:
    """Norm of `hook_post[j] * W_out[j]` for every neuron (Yona et al. 2025, section 4.2)."""
    layer, out = view.layer, torch.zeros_like(view.post)
    experts = [*range(target.n_experts(layer)), *([None] if target.has_mlp(layer, None) else [])]
    for expert in experts:
        start = flat_number(target, layer, expert, 0)
        part = slice(start, start + target.width(layer, expert))
        if bool(view.post[:, part].any()):  # read norms only of experts that write anything
            out[:, part] = view.post[:, part].abs() * target.w_out_norms(layer, expert).float()
    return out


def column_norms(target: Target, layer: int, expert: int | None = None) -> Float[Tensor, " neuron"]:
    """Norms of the columns of the down projection, including the gain of a norm behind the MLP if there is one."""
    path = target.adapter.post_mlp_norm
    if path is None:
        return target.w_out_norms(layer, expert)
    gain = gain_of(target, target.sub(layer, path))
    some = (
        target.w_out(layer, part.tolist(), expert) for part in torch.arange(target.width(layer, expert)).split(1024)
    )
    return torch.cat([(columns.float() * gain).norm(dim=-1) for columns in some])


def gain_of(target: Target, norm: Any) -> Float[Tensor, " d_model"]:
    """The factor a norm applies to each dimension, however it is stored: probed with a vector of mean 0, square 1."""
    signs = torch.ones(target.d_model, device=target.device, dtype=target.dtype)
    signs[1::2] = -1
    up, down = norm(signs[None])[0].float(), norm(-signs[None])[0].float()
    return (up - down) / 2 * signs.float()


@torch.no_grad()
def columns(target: Target, layer: int, neurons: Int[Tensor, " k"]) -> Float[Tensor, "k d_model"]:
    """Columns of the down projection for flat neuron numbers, float32."""
    ids = neurons.tolist()
    if not target.is_mixture(layer):
        return target.w_out(layer, ids).float()
    sites = [split(target, layer, n) for n in ids]
    return torch.cat([target.w_out(layer, [neuron], expert).float() for expert, neuron in sites])


@torch.no_grad()
def norm_without(
    target: Target,
    view: LayerView,
    neurons: Int[Tensor, "draw k"],
    cols: Float[Tensor, "draw k d_model"],
    without: Sequence[int] = (),
) -> Float[Tensor, "draw n"]:
    """Norm of the residual stream after the layer at every position, with each set of neurons zeroed.

    Residual dimensions in `without` are left out of the norm.
    """
    written = torch.einsum("ndk,dkm->dnm", view.post[:, neurons], cols)  # n draw k, draw k d_model
    path = target.adapter.post_mlp_norm
    if path is None:
        resid = view.resid - written
    else:
        norm, dtype = target.sub(view.layer, path), target.dtype
        resid = view.resid - norm(view.mlp.to(dtype)).float() + norm((view.mlp - written).to(dtype)).float()
    return norm_of(resid, without)


def spike_dims(first: Tensor, typical: Tensor) -> list[int]:
    """Massive activations of the first token: |a| > 100 and > 1000 x the median |hidden state| (Sun et al. 2024).

    Args:
        first: Residual stream of the first token, `[d_model]`.
        typical: Residual stream of all positions of the layer, `[n d_model]`.
    """
    size = first.abs()
    hit = (size > 100) & (size > 1000 * typical.abs().median())
    return sorted(hit.nonzero().flatten().tolist(), key=lambda d: -size[d].item())


def split(target: Target, layer: int, neuron: int) -> tuple[int | None, int]:
    """(expert, neuron) of a flat number. `expert` is None if the layer is not a mixture, and for a shared expert."""
    first = target.n_experts(layer) * target.d_mlp  # number of the first neuron of a shared expert
    if target.has_mlp(layer, None) and neuron >= first:
        return None, neuron - first
    return divmod(neuron, target.d_mlp)


def flat_number(target: Target, layer: int, expert: int | None, neuron: int) -> int:
    """The number of a neuron in a `LayerView`."""
    return (target.n_experts(layer) if expert is None else expert) * target.d_mlp + neuron


def neutral_view(target: Target, layer: int, ids: Int[Tensor, "row pos"]) -> LayerView:
    """The layer on typical text without first tokens, at as many positions as 64 MB of activations allow."""
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    experts = int(getattr(target.config, "num_local_experts", None) or getattr(target.config, "num_experts", None) or 1)
    rows = max(1, (1 << 24) // (target.d_mlp * experts * ids.shape[1]))
    return view_layer(target, layer, ids[:rows], where[:rows])


def neutral_values(target: Target, text: LayerView, flat: int) -> tuple[float, float | None]:
    """Median `hook_post` of a neuron on typical text, and of its up factor if there is one: what a patch writes."""
    expert, _ = split(target, text.layer, flat)
    post = text.post[:, flat]
    if text.routing is not None:  # the expert's own output where it was chosen; the last weight is the shared expert's
        expert = -1 if expert is None else expert
        asked = text.routing[:, expert] > 0
        post = post[asked] / text.routing[asked, expert] if bool(asked.any()) else torch.zeros(1)
    return float(post.median()), None if text.up is None else float(text.up[:, flat].median())
