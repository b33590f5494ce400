"""The neurons of one layer: what each writes at chosen positions, and what zeroing each takes away there.

The down projection is linear, so the effect of an ablation *at the same layer* needs no second forward pass: the
neurons' columns are subtracted from the MLP's output before any norm that stands between it and the residual stream.
The tests compare this with real ablated passes. Effects in later layers are measured in real passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.files.console import Progress, silent
from sinkscope.models.experts import activate, bind, gate_up
from sinkscope.models.target import Target, first_tensor, norm_of, on_input, on_output
from sinkscope.sinks.first_token.effects import Edit, effects
from sinkscope.sinks.first_token.found import DRAWS, Member, Neuron, Sites
from sinkscope.sinks.first_token.walk import until_half

CAUSAL = 0.1  # zeroing a causal neuron removes at least this share of the norm


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
    with target.hooks(*pairs):
        target.forward(ids, upto=layer)
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


@dataclass(frozen=True)
class Repetition:
    """Repeated tokens at the sink layer.

    Attributes:
        repeats: For each token, the first n whose norm reaches half of the first token's. None if never.
        view: The layer at the last repetition of each token that got there. None if no token did.
    """

    repeats: list[int | None]
    view: LayerView | None


@torch.no_grad()
def repeat_until_half(
    target: Target,
    layer: int,
    tokens: list[int],
    prefixes: list[int],
    max_repeats: int,
    progress: Progress = silent,
    without: Sequence[int] = (),
) -> Repetition:
    """Run a prefix and n repetitions of each token in one causal pass; n doubles until all tokens become sinks.

    Args:
        target: The model.
        layer: The sink layer, whose residual stream is read.
        tokens: The ids to repeat, one row each.
        prefixes: The first token of each row (BOS, or a token that stands in for it).
        max_repeats: Largest n.
        progress: Called after each doubling.
        without: Residual dimensions that norms leave out because they are massive on all tokens.
    """
    length = min(128, max_repeats)
    found: dict[int, int | None] = dict.fromkeys(range(len(tokens)))
    views: dict[int, LayerView] = {}
    while True:
        left = [i for i, n in found.items() if n is None]
        for i in left:  # one row at a time: a batch of long rows would only need more memory
            ids = torch.full((1, length + 1), tokens[i])
            ids[0, 0] = prefixes[i]
            where = torch.zeros_like(ids, dtype=torch.bool)
            where[0, -1] = True
            resids: list[Tensor] = []
            with target.hooks((target.layers[layer], "post", on_output(resids.append))):
                views[i] = view_layer(target, layer, ids, where)
            norms = norm_of(first_tensor(resids[0])[0], without)
            found[i] = until_half(norms[1:], norms[0])
        progress("repetitions", length, max_repeats)
        if length >= max_repeats or all(n is not None for n in found.values()):
            break
        length = min(2 * length, max_repeats)
    reached = [views[i] for i, n in found.items() if n is not None]
    parts = [torch.cat([getattr(v, name) for v in reached]) for name in ("resid", "mlp", "post") if reached]
    return Repetition(list(found.values()), LayerView(layer, *parts) if reached else None)


@dataclass(frozen=True)
class Proof:
    """The candidates, and the effect at the sink layer of zeroing all causal ones together.

    Attributes:
        neurons: Neurons of the sink layer, largest contribution first, followed by those of other stages.
        set_drop: Share of the norm that is lost when all causal neurons are zeroed. None if the sink layer has none.
        set_control_drop: Largest drop among random sets of the same number of neurons of the sink layer.
        controls: Sites of one of these random sets.
        dims: Massive activations of the first token at the sink layer, largest first.
    """

    neurons: tuple[Neuron, ...] = ()
    set_drop: float | None = None
    set_control_drop: float | None = None
    controls: Sites = ()
    dims: tuple[int, ...] = ()

    @property
    def causal(self) -> tuple[Neuron, ...]:
        """The neurons that ablation has verified as causes of the sink."""
        return tuple(n for n in self.neurons if n.causal)


@dataclass(frozen=True)
class _Candidates:
    """The neurons of a layer that write most at a position.

    Attributes:
        target: The model.
        first: The layer at this position.
        text: The layer on typical text.
        contribution: Norm of what each neuron of the layer writes at the position.
        top: Numbers of the candidates.
    """

    target: Target
    first: LayerView
    text: LayerView
    contribution: Float[Tensor, " neuron"]
    top: Int[Tensor, " k"]

    @classmethod
    def of(cls, target: Target, ids: Int[Tensor, "row pos"], layer: int, top_k: int, at: int = 0) -> _Candidates:
        where = torch.zeros(len(ids), at + 1, dtype=torch.bool)
        where[:, at] = True
        with target.loaded(layer):
            first = view_layer(target, layer, ids[:, : at + 1], where)
            contribution = contribution_norms(target, first).median(0).values
            rank = contribution
            if target.adapter.post_mlp_norm is not None:
                # The gain of the norm behind the MLP (Gemma 2, OLMo 2) can pass one residual dimension and suppress
                # others, and a neuron that writes mostly into suppressed dimensions makes no spike.
                rank = first.post.abs().median(0).values * column_norms(target, layer)
            top = rank.topk(min(top_k, int((contribution > 0).sum().clamp(min=1)))).indices
            return cls(target, first, neutral_view(target, layer, ids), contribution, top)

    def others(self, *, writing: bool) -> Int[Tensor, " n"]:
        """The neurons that are no candidates; with `writing`, only those that write anything at the position."""
        spare = self.contribution > 0 if writing else torch.ones_like(self.contribution, dtype=torch.bool)
        spare[self.top] = False
        return spare.nonzero().flatten().cpu()

    def sites(self, neurons: Sequence[int]) -> Sites:
        """Neurons of the layer as interventions take them."""
        return tuple(Member(self.text.layer, *split(self.target, self.text.layer, n)).site for n in neurons)

    def proven(self, drops: list[float], repeats: list[float] | None, chance: float) -> tuple[Neuron, ...]:
        """The candidates with the effect of zeroing each, and of the random neurons that had the largest effect."""
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
    """The neurons of a layer that write most at a position, and the effect of zeroing each.

    If an ablation is active, these are the neurons that write most under it.

    Args:
        target: The model.
        ids: Typical text.
        stage: The layer.
        top_k: How many neurons to return.
        generator: Draws the 20 random control neurons.
        at: The position.
        upto: The layer after which the norm is read, if it is later than `stage`.
    """
    found = _Candidates.of(target, ids, stage, min(top_k, target.d_mlp // 2), at)
    top, pool, layer = found.top.tolist(), found.others(writing=True), max(stage, upto)
    drawn = pool[torch.randperm(len(pool), generator=generator)[:DRAWS]].tolist()
    edits = [Edit(zero=(site,)) for site in found.sites([*top, *drawn])]
    drops = effects(target, ids[:1, : at + 1], edits, at=at, upto=layer).drops(layer).tolist()
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
    """Candidate neurons of the sink layer and of other stages, and the effect of zeroing them at the sink layer.

    Args:
        target: The model.
        ids: Typical text; position 0 holds the first token.
        layer: The sink layer.
        top_k: Number of candidates in the sink layer.
        generator: Source of the random draws.
        repeated: The layer's view at the last repetition of each token that reached half of the first token's norm.
        stages: Layers that build the spike; the sink layer may be among them.
        without: Residual dimensions that norms leave out because they are massive on all tokens.
    """
    proof = _prove_at(target, ids, layer, top_k, generator, repeated, without)
    others = [n for s in stages if s != layer for n in stage_neurons(target, ids, s, 2, generator, upto=layer)]
    proof = replace(proof, neurons=(*proof.neurons, *others))
    if any(n.causal and n.layer < layer for n in others):
        every = [Edit(zero=tuple(n.site for n in proof.causal))]
        drops = effects(target, ids[:, :1], every, upto=layer, without=without).drops(layer)
        proof = replace(proof, set_drop=float(drops))
    return proof


def _prove_at(
    target: Target,
    ids: Int[Tensor, "row pos"],
    layer: int,
    top_k: int,
    generator: torch.Generator,
    repeated: LayerView | None,
    without: Sequence[int],
) -> Proof:
    """Candidates of the sink layer, without a forward pass for each ablation."""
    found = _Candidates.of(target, ids, layer, top_k)
    first, top, places = found.first, found.top, [found.first] if repeated is None else [found.first, repeated]
    massive = spike_dims(first.resid.median(0).values, torch.cat([first.resid, found.text.resid]))
    dims = tuple(d for d in massive if d not in without)
    pool = found.others(writing=first.routing is not None)  # an expert that was not chosen gives no valid control

    def draw(size: int) -> Tensor:
        picks = [torch.randperm(len(pool), generator=generator)[:size] for _ in range(DRAWS)]
        return pool[torch.stack(picks)].to(top.device)

    def drops(sets: Tensor, *views: LayerView) -> list[Tensor]:
        cols = columns(target, layer, sets.flatten()).unflatten(0, tuple(sets.shape))
        lost = (1 - norm_without(target, v, sets, cols, without) / norm_of(v.resid, without) for v in views)
        return [share.median(1).values for share in lost]

    with target.loaded(layer):
        chance = max(float(lost.max()) for lost in drops(draw(1), *places))
        single, *again = (lost.tolist() for lost in drops(top[:, None], *places))
        neurons = found.proven(single, again[0] if again else None, chance)
        chosen = top[torch.tensor([n.causal for n in neurons], device=top.device)]
        if not len(chosen):
            return Proof(neurons, dims=dims)
        sets = draw(len(chosen))
        together, control = float(drops(chosen[None], first)[0]), float(drops(sets, first)[0].max())
        return Proof(neurons, together, control, found.sites(sets[0].tolist()), dims)
