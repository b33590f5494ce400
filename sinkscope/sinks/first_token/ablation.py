"""Neurons of a layer: what each writes at chosen positions, and what zeroing it takes away, against random draws.

The down projection is linear, so what ablation does *at the same layer* needs no second forward pass: the neurons'
columns are taken from the MLP's output before whatever norm stands between it and the residual stream. The tests
hold this against real ablated passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.interventions.edits import NeuronSite
from sinkscope.models.experts import activate, bind, gate_up
from sinkscope.models.target import Target, first_tensor, on_input, on_output
from sinkscope.notation import neuron_name
from sinkscope.sinks.first_token.effects import Edit, effects, norm_of

DRAWS = 20  # random sets of as many neurons that every ablation is held against
CAUSAL = 0.1  # a causal neuron takes at least this share of the norm with it


@dataclass(frozen=True)
class Member:
    """A neuron; expert is None where the layer is no mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Member:
        """The neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        return cls(site[0], site[1] if len(site) == 3 else None, site[-1])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        return NeuronSite(self.layer, self.neuron, self.expert).numbers

    def __str__(self) -> str:
        return neuron_name(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class LayerView:
    """A layer at `n` positions.

    Neurons of a mixture are numbered `expert * d_mlp + neuron`; those of a shared expert come behind all of these.

    Attributes:
        resid: residual stream after the layer.
        mlp: output of the down projection(s), before any norm behind it.
        post: `hook_post`; in a mixture times the weight in `routing`.
        up: output of the up projection, the linear factor; None where there is no such factor, and in a mixture.
        routing: weight of every expert, 0 for those not chosen, and last that of a shared one, if there is one; None
            where the layer is no mixture.
    """

    layer: int
    resid: Float[Tensor, "n d_model"]
    mlp: Float[Tensor, "n d_model"]
    post: Float[Tensor, "n neuron"]
    up: Float[Tensor, "n neuron"] | None = None
    routing: Float[Tensor, "n expert"] | None = None


@torch.no_grad()
def view_layer(target: Target, layer: int, ids: Int[Tensor, "row pos"], where: Tensor) -> LayerView:
    """The layer at the positions marked in `where` (`[row pos]`, bool), from a pass that ends there."""
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
        if bool(view.post[:, part].any()):  # norms are read of those experts only that write anything
            out[:, part] = view.post[:, part].abs() * target.w_out_norms(layer, expert).float()
    return out


@torch.no_grad()
def reach(target: Target, view: LayerView) -> Float[Tensor, " neuron"]:
    """What candidates are ranked by: contribution norms, the median over the positions.

    Where a norm stands behind the MLP (Gemma 2, OLMo 2) its gain counts: it can let one residual dimension through
    and hold others back, and a neuron that writes much into the latter makes no spike.
    """
    if target.adapter.post_mlp_norm is None:
        return contribution_norms(target, view).median(0).values
    return view.post.abs().median(0).values * column_norms(target, view.layer)


def column_norms(target: Target, layer: int, expert: int | None = None) -> Float[Tensor, " neuron"]:
    """Norms of the columns of the down projection, with the gain of the norm behind the MLP where there is one."""
    path = target.adapter.post_mlp_norm
    if path is None:
        return target.w_out_norms(layer, expert)
    gain = gain_of(target, target.sub(layer, path))
    some = (
        target.w_out(layer, part.tolist(), expert) for part in torch.arange(target.width(layer, expert)).split(1024)
    )
    return torch.cat([(columns.float() * gain).norm(dim=-1) for columns in some])


def gain_of(target: Target, norm: Any) -> Float[Tensor, " d_model"]:
    """What a norm multiplies each dimension by, however it stores that: asked of a vector with mean 0 and square 1."""
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
    """Norm of the residual stream after the layer, at every position, with each set of neurons zeroed.

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
        first: residual stream of the first token, `[d_model]`.
        typical: residual stream of all positions of the layer, `[n d_model]`.
    """
    size = first.abs()
    hit = (size > 100) & (size > 1000 * typical.abs().median())
    return sorted(hit.nonzero().flatten().tolist(), key=lambda d: -size[d].item())


def split(target: Target, layer: int, neuron: int) -> tuple[int | None, int]:
    """(expert, neuron) of a flat number; expert is None where the layer is no mixture, and for a shared expert."""
    first = target.n_experts(layer) * target.d_mlp  # of those that have no expert's number
    if target.has_mlp(layer, None) and neuron >= first:
        return None, neuron - first
    return divmod(neuron, target.d_mlp)


def flat_number(target: Target, layer: int, expert: int | None, neuron: int) -> int:
    """The number of a neuron in a `LayerView`."""
    return (target.n_experts(layer) if expert is None else expert) * target.d_mlp + neuron


@dataclass(frozen=True)
class Neuron(Member):
    """One candidate; drops are shares of the norm at the sink layer that vanish when it is zeroed.

    Attributes:
        contribution_norm: norm of what the neuron writes at the first token, `hook_post[j] * W_out[j]`.
        share: contribution norm over the norm of the MLP's output at the first token.
        ablation_drop: share of the first token's norm that is lost when the neuron is zeroed.
        repeat_drop: the same at the last of the repeated tokens; None if no token got there.
        control_drop: largest loss with a random neuron of the layer zeroed instead, of 20 draws.
        causal: the ablation drop exceeds the control drop and is at least 0.1.
        neutral_post: median `hook_post` on typical text: what SinkPatch writes instead.
        neutral_up: median output of the up projection there; None where there is no such factor.
    """

    contribution_norm: float
    share: float
    ablation_drop: float
    repeat_drop: float | None
    control_drop: float
    causal: bool
    neutral_post: float
    neutral_up: float | None


@dataclass(frozen=True)
class Proof:
    """The candidates and what zeroing the causal ones together does at the sink layer.

    Attributes:
        neurons: those of the sink layer, largest contribution first, then those of other stages.
        set_drop: share of the norm that goes with all causal ones; None: there are none at the sink layer.
        set_control_drop: largest drop among random sets of as many neurons of the sink layer.
        controls: sites of one of these sets.
        dims: massive activations of the first token there, largest first.
    """

    neurons: tuple[Neuron, ...]
    set_drop: float | None
    set_control_drop: float | None
    controls: tuple[tuple[int, ...], ...]
    dims: tuple[int, ...] = ()

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons proven to make the sink."""
        return tuple(n for n in self.neurons if n.causal)


@dataclass(frozen=True)
class _Candidates:
    """The neurons of a layer that write most at the first token."""

    target: Target
    first: LayerView
    text: LayerView
    contribution: Float[Tensor, " neuron"]
    top: Int[Tensor, " k"]

    @classmethod
    def of(cls, target: Target, ids: Int[Tensor, "row pos"], layer: int, top_k: int, at: int = 0) -> _Candidates:
        where = torch.zeros(len(ids), at + 1, dtype=torch.bool)
        where[:, at] = True
        first = view_layer(target, layer, ids[:, : at + 1], where)
        contribution = contribution_norms(target, first).median(0).values
        top = reach(target, first).topk(min(top_k, int((contribution > 0).sum().clamp(min=1)))).indices
        return cls(target, first, neutral_view(target, layer, ids), contribution, top)

    def proven(self, drops: list[float], repeats: list[float] | None, chance: float) -> tuple[Neuron, ...]:
        written = self.first.mlp.norm(dim=-1).median()
        rows = zip(self.top.tolist(), drops, repeats or [None] * len(drops), strict=True)
        return tuple(
            Neuron(
                self.text.layer,
                *split(self.target, self.text.layer, n),
                float(self.contribution[n]),
                float(self.contribution[n] / written),
                drop,
                repeat,
                chance,
                drop > chance and drop >= CAUSAL,
                *neutral_values(self.target, self.text, n),
            )
            for n, drop, repeat in rows
        )


@torch.no_grad()
def stage_neurons(
    target: Target,
    ids: Int[Tensor, "row pos"],
    stage: int,
    top_k: int,
    generator: torch.Generator,
    *,
    at: int = 0,
    upto: int = 0,
) -> tuple[Neuron, ...]:
    """The neurons of a layer that write most at a position, and what zeroing each takes away.

    Under an ablation, these are the neurons that write most then.

    Args:
        target: the model.
        ids: typical text.
        stage: the layer.
        top_k: how many.
        generator: of the 20 random neurons that they are held against.
        at: the position.
        upto: the layer after which the norm is read, where it lies behind `stage`.
    """
    with target.loaded(stage):
        found = _Candidates.of(target, ids, stage, min(top_k, target.d_mlp // 2), at)
    top = found.top.tolist()
    pool = torch.tensor([n for n in found.contribution.nonzero().flatten().tolist() if n not in top])
    others = pool[torch.randperm(len(pool), generator=generator)[:DRAWS]].tolist()
    edits = [Edit(zero=(Member(stage, *split(target, stage, n)).site,)) for n in (*top, *others)]
    layer = max(stage, upto)
    seen = effects(target, ids[:1, : at + 1], edits, at=at, upto=layer)
    drops = (1 - seen.norms[..., layer] / seen.intact_norms[..., layer]).median(1).values.tolist()
    return found.proven(drops[: len(top)], None, max(drops[len(top) :], default=0.0))


@torch.no_grad()
def prove(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None = None,
    stages: Sequence[int] = (),
    without: Sequence[int] = (),
) -> Proof:
    """Candidates of the sink layer and of other stages, and what zeroing them does at the sink layer.

    Args:
        target: the model.
        ids: typical text, position 0 the first token.
        layer: the sink layer.
        top_k: number of candidates there.
        generator: of the random draws.
        repeated: the layer at the last repetition of tokens that reached half of the first token's norm.
        stages: layers that build the spike, the sink layer among them or not.
        without: residual dimensions that norms leave out, because they are massive on all tokens.
    """
    proof = _prove_at(target, ids, layer, top_k, generator, repeated, without)
    others = [n for s in stages if s != layer for n in stage_neurons(target, ids, s, 2, generator, upto=layer)]
    whole = replace(proof, neurons=(*proof.neurons, *others))
    if not any(n.causal and n.layer < layer for n in others):
        return whole
    seen = effects(target, ids[:, :1], [Edit(zero=tuple(n.site for n in whole.causal))], upto=layer, without=without)
    drop = float((1 - seen.norms[0, :, layer] / seen.intact_norms[:, layer]).median())
    return replace(whole, set_drop=drop)


def _prove_at(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None,
    without: Sequence[int],
) -> Proof:
    """Candidates of the sink layer, without further forward passes."""
    with target.loaded(layer):
        found = _Candidates.of(target, ids, layer, top_k)
        first, top = found.first, found.top
        massive = spike_dims(first.resid.median(0).values, torch.cat([first.resid, found.text.resid]))
        dims = tuple(d for d in massive if d not in without)
        spare = torch.ones_like(found.contribution, dtype=torch.bool)
        spare[top] = False
        if first.routing is not None:  # a neuron of an expert that was not chosen would be no control
            spare &= found.contribution > 0
        pool = spare.nonzero().flatten().cpu()

        def draw(size: int) -> Tensor:
            picks = [torch.randperm(len(pool), generator=generator)[:size] for _ in range(DRAWS)]
            return pool[torch.stack(picks)].to(top.device)

        def drops(sets: Tensor, view: LayerView) -> Tensor:
            cols = columns(target, layer, sets.flatten()).unflatten(0, tuple(sets.shape))
            return (1 - norm_without(target, view, sets, cols, without) / norm_of(view.resid, without)).median(1).values

        singles, control = top[:, None], draw(1)
        places = [first] if repeated is None else [first, repeated]
        lost = [drops(singles, place).tolist() for place in places]
        chance = max(float(drops(control, place).max()) for place in places)
        neurons = found.proven(lost[0], lost[1] if repeated is not None else None, chance)
        chosen = torch.tensor([int(n) for i, n in enumerate(top) if neurons[i].causal], device=top.device)
        if not len(chosen):
            return Proof(neurons, None, None, (), dims)
        sets = draw(len(chosen))
        sites = tuple(Member(layer, *split(target, layer, int(n))).site for n in sets[0])
        return Proof(neurons, float(drops(chosen[None], first)), float(drops(sets, first).max()), sites, dims)


def neutral_view(target: Target, layer: int, ids: Int[Tensor, "row pos"]) -> LayerView:
    """The layer on typical text, first tokens left out; as many positions as 64 MB of activations allow."""
    where = torch.ones_like(ids, dtype=torch.bool)
    where[:, 0] = False
    experts = int(getattr(target.config, "num_local_experts", None) or getattr(target.config, "num_experts", None) or 1)
    rows = max(1, (1 << 24) // (target.d_mlp * experts * ids.shape[1]))
    return view_layer(target, layer, ids[:rows], where[:rows])


def neutral_values(target: Target, text: LayerView, flat: int) -> tuple[float, float | None]:
    """Median `hook_post` of a neuron on typical text, and of its up factor where there is one: what a patch writes."""
    expert, _ = split(target, text.layer, flat)
    post = text.post[:, flat]
    if text.routing is not None:  # what the expert itself gives, where it was asked; the last weight is a shared one's
        expert = -1 if expert is None else expert
        asked = text.routing[:, expert] > 0
        post = post[asked] / text.routing[asked, expert] if bool(asked.any()) else torch.zeros(1)
    return float(post.median()), None if text.up is None else float(text.up[:, flat].median())
