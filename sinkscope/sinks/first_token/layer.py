"""One layer at chosen positions: what each neuron writes, and the residual stream without some of them.

The down projection is linear, so what ablation does *at the same layer* needs no second forward pass: the neurons'
columns are taken from the MLP's output before whatever norm stands between it and the residual stream. The tests
hold this against real ablated passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.models.experts import activate, bind, gate_up
from sinkscope.models.target import Target, first_tensor


@dataclass(frozen=True)
class LayerView:
    """A layer at `n` positions. Neurons of a mixture are numbered `expert * d_mlp + neuron`.

    Attributes:
        resid: residual stream after the layer.
        mlp: output of the down projection(s), before any norm behind it.
        post: `hook_post`; in a mixture times the routing weight, 0 for experts that were not chosen.
        up: output of the up projection, the linear factor; None where there is no such factor, and in a mixture.
        routing: weight of every expert, 0 for those not chosen; None where the layer is no mixture.
    """

    layer: int
    resid: Float[Tensor, "n d_model"]
    mlp: Float[Tensor, "n d_model"]
    post: Float[Tensor, "n neuron"]
    up: Float[Tensor, "n neuron"] | None = None
    routing: Float[Tensor, "n expert"] | None = None

    def rows(self, chosen: Bool[Tensor, " n"]) -> LayerView:
        """Some of the positions."""
        pick = chosen.to(self.post.device)
        up = None if self.up is None else self.up[pick]
        routing = None if self.routing is None else self.routing[pick]
        return LayerView(self.layer, self.resid[pick], self.mlp[pick], self.post[pick], up, routing)


class Watch:
    """Hooks that collect a LayerView of one layer while it runs, at positions `[row, pos]` marked in `where`."""

    def __init__(self, target: Target, layer: int, where: Bool[Tensor, "batch pos"]) -> None:
        self.target, self.layer, self.where = target, layer, where
        self._got: dict[str, Tensor] = {}

    def hooks(self) -> list[tuple[Any, str, Any]]:
        """For `Target.hooks`."""
        t, a, i = self.target, self.target.adapter, self.layer
        mlp = t.sub(i, a.mlp)
        pairs: list[tuple[Any, str, Any]] = [
            (mlp, "post", self._keeper("mlp", lambda args, kwargs, out: first_tensor(out))),
            (t.layers[i], "post", self._keeper("resid", lambda args, kwargs, out: first_tensor(out))),
        ]
        if t.is_mixture(i):
            assert a.experts is not None
            pairs.append((t.sub(i, a.experts), "post", self._experts))
        else:
            pairs.append((t.sub(i, a.down), "post", self._keeper("post", lambda args, kwargs, out: args[0])))
            if a.up is not None and (a.gate is not None or a.fused_gate_up):
                half = (lambda out: out.chunk(2, -1)[1]) if a.fused_gate_up else (lambda out: out)
                pairs.append((t.sub(i, a.up), "post", self._keeper("up", lambda args, kwargs, out: half(out))))
        return pairs

    def view(self) -> LayerView:
        """What was seen in the last pass."""
        return LayerView(self.layer, **{k: v.float() for k, v in self._got.items()})

    def _pick(self, tensor: Tensor) -> Tensor:
        flat = tensor.reshape(-1, tensor.shape[-1])
        return flat[self.where.reshape(-1).to(flat.device)].detach()

    def _keeper(self, name: str, get: Any) -> Any:
        def hook(_module: object, args: Any, kwargs: Any, out: Any) -> None:
            self._got[name] = self._pick(get(args, kwargs, out))

        return hook

    def _experts(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _out: Any) -> None:
        hidden, index, weights = bind(args, kwargs)
        hidden, index, weights = self._pick(hidden), self._pick(index), self._pick(weights)
        width, experts = self.target.d_mlp, int(module.num_experts)
        post = torch.zeros(len(hidden), experts, width, device=hidden.device)
        routing = torch.zeros(len(hidden), experts + 1, device=hidden.device)  # one more: "no expert" under sharding
        self._got["routing"] = routing.scatter(1, index, weights.float())[:, :experts]
        for expert in index.unique().tolist():
            rows, slots = (index == expert).nonzero(as_tuple=True)
            values = activate(module, *gate_up(module, expert, hidden[rows]))
            post[rows, expert] = values.float() * weights[rows, slots, None].float()
        self._got["post"] = post.flatten(1)


@torch.no_grad()
def contribution_norms(target: Target, view: LayerView) -> Float[Tensor, "n neuron"]:
    """Norm of `hook_post[j] * W_out[j]` for every neuron (Yona et al. 2025, section 4.2)."""
    if not target.is_mixture(view.layer):
        return view.post.abs() * target.w_out_norms(view.layer).float()
    width = target.d_mlp
    out = torch.zeros_like(view.post)
    for expert in view.post.unflatten(1, (-1, width)).any(-1).any(0).nonzero().flatten().tolist():
        part = slice(expert * width, (expert + 1) * width)
        out[:, part] = view.post[:, part].abs() * target.w_out_norms(view.layer, expert).float()
    return out


@torch.no_grad()
def reach(target: Target, view: LayerView) -> Float[Tensor, " neuron"]:
    """What candidates are ranked by: contribution norms at the first of the positions or the median over them.

    Where a norm stands behind the MLP (Gemma 2, OLMo 2) its gain counts: it can let one residual dimension through
    and hold others back, and a neuron that writes much into the latter makes no spike.
    """
    path = target.adapter.post_mlp_norm
    if path is None:
        return contribution_norms(target, view).median(0).values
    ones = torch.ones(1, target.d_model, device=view.post.device, dtype=target.dtype)
    gain = target.sub(view.layer, path)(ones)[0].float()
    width = target.d_mlp
    parts = [
        (columns(target, view.layer, torch.arange(i, min(i + 1024, width))) * gain).norm(dim=-1)
        for i in range(0, width, 1024)
    ]
    return view.post.abs().median(0).values * torch.cat(parts)


@torch.no_grad()
def columns(target: Target, layer: int, neurons: Int[Tensor, " k"]) -> Float[Tensor, "k d_model"]:
    """Columns of the down projection for flat neuron numbers, float32."""
    ids = neurons.tolist()
    if not target.is_mixture(layer):
        return target.w_out(layer, ids).float()
    width = target.d_mlp
    return torch.cat([target.w_out(layer, [n % width], n // width).float() for n in ids])


@torch.no_grad()
def norm_without(
    target: Target, view: LayerView, neurons: Int[Tensor, "draw k"], cols: Float[Tensor, "draw k d_model"]
) -> Float[Tensor, "draw n"]:
    """Norm of the residual stream after the layer, at every position, with each set of neurons zeroed."""
    written = torch.einsum("ndk,dkm->dnm", view.post[:, neurons], cols)  # n draw k, draw k d_model
    path = target.adapter.post_mlp_norm
    if path is None:
        return (view.resid - written).norm(dim=-1)
    norm = target.sub(view.layer, path)
    dtype = target.dtype
    intact = norm(view.mlp.to(dtype)).float()
    return (view.resid - intact + norm((view.mlp - written).to(dtype)).float()).norm(dim=-1)


def split(target: Target, layer: int, neuron: int) -> tuple[int | None, int]:
    """(expert, neuron) of a flat number; expert is None where the layer is no mixture."""
    return divmod(neuron, target.d_mlp) if target.is_mixture(layer) else (None, neuron)
