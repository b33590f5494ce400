"""What the layers show: norms across layers, one layer at chosen positions, and norms at repetitions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.experts import activate, bind, gate_up
from sinkscope.models.target import Target, first_tensor, norm_of, on_input, on_output
from sinkscope.trace.run import trace

STAGE_SHARE = 0.01  # a stage adds at least this share of the first token's largest norm (definition of a stage)
STAGE_OUTLIER = 5.0  # ... and its MLP writes this many times its median on typical text, either in total or along the
# spike (an early stage can be small compared with everything that an MLP writes, but not along that direction)
FALL_SHARE = 0.05  # a step-down layer removes at least this share of the spike's largest length
SINK_RATIO = 3.0  # a spike: the first token's norm is this many times the typical one
# Medians are used instead of high quantiles: some later positions are sinks, too (delimiters; without BOS the first
# tokens, as long as they belong to one cluster), and must not hide the first one.
_SAMPLE = 64  # positions of typical text whose activations are kept for that comparison
_SHARED = 30.0  # a dimension is massive on all tokens if it is this many times the median dimension


@dataclass
class Walk:
    """The result of one pass over the layers. Lists have one entry per layer read; norms are L2.

    A dimension that is massive on all tokens alike (Owen et al. 2025) hides the spike of one token. If such dimensions
    make up more than half of a typical residual stream and no spike is visible with them included, `spike`, `usual` and
    `norms` leave them out; `first` and `typical` always use the whole residual stream.
    """

    n_layers: int
    first: list[float] = field(default_factory=list)  # residual stream after the layer, first token (median of rows)
    typical: list[tuple[float, float, float]] = field(default_factory=list)  # 5 %, median, 95 % of later positions
    whole: list[Tensor] = field(default_factory=list)  # norm of every position, [row pos]
    partial: list[Tensor] = field(default_factory=list)  # the same without dimensions massive on all tokens
    mlp_norms: list[Tensor] = field(default_factory=list)  # what the MLP adds at every position, [row pos]
    mlp_first: list[float] = field(default_factory=list)  # what the MLP adds, first token
    mlp_typical: list[float] = field(default_factory=list)  # ... median of later positions
    raw_first: list[float] = field(default_factory=list)  # output of the MLP itself, first token (notebook's rule)
    residual: list[Tensor] = field(default_factory=list)  # residual stream, first token (mean of rows), [d_model]
    written: list[Tensor] = field(default_factory=list)  # what the MLP adds, first token (mean of rows), [d_model]
    sample: list[Tensor] = field(default_factory=list)  # ... at some later positions, [position d_model]
    massive: list[int] = field(default_factory=list)  # dimensions massive on all tokens, in the order found

    @property
    def shared(self) -> list[int]:
        """Dimensions massive on all tokens, if no spike is visible with them included."""
        seen = any(norm > SINK_RATIO * typical[1] for norm, typical in zip(self.first, self.typical, strict=True))
        return [] if seen else self.massive

    @property
    def norms(self) -> list[Float[Tensor, "row pos"]]:
        """Norm of every position, without `shared`."""
        return self.partial if self.shared else self.whole

    @property
    def spike(self) -> list[float]:
        """Median norm of the first token over rows, without `shared`."""
        return [norms[:, 0].median().item() for norms in self.norms] if self.shared else self.first

    @property
    def usual(self) -> list[float]:
        """Median norm of later positions, without `shared`."""
        return [n[:, 1:].flatten().median().item() for n in self.norms] if self.shared else [t[1] for t in self.typical]

    def standing(self) -> list[int]:
        """Layers after which the first token's norm stands out; empty if there is no norm spike."""
        return [
            i for i, (norm, usual) in enumerate(zip(self.spike, self.usual, strict=True)) if norm > SINK_RATIO * usual
        ]

    def direction(self) -> Tensor:
        """Direction of the spike: the first token's residual stream where it is largest, without shared dimensions."""
        peak = int(torch.tensor(self.spike).argmax())
        way = self.residual[peak].clone()
        way[self.shared] = 0
        return way / way.norm()

    def stages(self) -> list[int]:
        """Layers whose MLP builds the first token's norm (definition of a stage), in order; may be empty."""
        if not self.standing():
            return []
        largest, spike = max(self.spike), self.direction()
        found: list[int] = []
        for i in range(len(self.first)):
            along = float(self.written[i] @ spike)
            usual = (self.sample[i] @ spike).abs().median().item()
            builds = along >= STAGE_SHARE * largest and along > STAGE_OUTLIER * usual
            # A stage may also be orthogonal to the rest of the spike; an MLP that points against it removes the spike.
            across = self.mlp_first[i] >= STAGE_SHARE * largest and along > -STAGE_SHARE * largest
            if builds or (across and self.mlp_first[i] > STAGE_OUTLIER * self.mlp_typical[i]):
                found.append(i)
        return found

    def steps(self, sign: int) -> list[int]:
        """Layers that make the spike longer (`sign` 1) or shorter (-1) by at least 5 % of its largest length."""
        if not self.standing():
            return []
        spike = self.direction()
        length = [float(r @ spike) for r in self.residual]
        bar = FALL_SHARE * max(length)
        return [i for i in range(1, len(length)) if sign * (length[i] - length[i - 1]) >= bar]

    def sink_layer(self) -> int | None:
        """The stage that adds most to the norm."""
        return max(self.stages(), key=lambda i: self.mlp_first[i], default=None)

    def flat(self) -> bool:
        """Whether no new stage appeared for a third of the layers (at least three) after one was seen."""
        stages = self.stages()
        return bool(stages) and len(self.first) - 1 - stages[-1] >= max(3, math.ceil(self.n_layers / 3))

    def notebook_layer(self) -> int | None:
        """First layer whose MLP output at the first token exceeds mean + 2 sd over all layers.

        This rule comes from the notebook behind Yona et al. 2025, not from the paper. With n layers no z-score exceeds
        (n - 1) / sqrt(n), so the rule cannot fire for n < 6.
        """
        if len(self.first) < self.n_layers:
            return None
        norms = torch.tensor(self.raw_first)
        bar = norms.mean() + 2 * norms.std(correction=0)
        above = (norms > bar).nonzero().flatten().tolist()
        return above[0] if above else None


def massive_dims(resid: Float[Tensor, "row pos d_model"]) -> list[int]:
    """Dimensions massive on all tokens alike, if they make up more than half of a typical residual stream.

    A dimension in which the first token itself stands out does not count, because leaving it out would hide a spike.
    """
    size = resid[:, 1:].flatten(0, 1)[:_SAMPLE].abs().median(0).values
    first = resid[:, 0].abs().median(0).values
    massive = (size > _SHARED * size.median()) & (first < SINK_RATIO * size)
    dominates = size[massive].square().sum() > size[~massive].square().sum()
    return massive.nonzero().flatten().tolist() if bool(dominates) else []


@torch.no_grad()
def walk(
    target: Target, ids: Int[Tensor, "row pos"], *, whole: bool, upto: int | None = None, progress: Progress = silent
) -> Walk:
    """Run `ids` upward, layer by layer, and stop once the first token's norm has stayed flat (unless `whole`).

    Args:
        target: The model. Layers of a streamed model are read when they are reached.
        ids: Typical text; position 0 is the first token.
        whole: Read every layer.
        upto: The last layer to read. None: no limit.
        progress: Called after each layer.
    """
    seen = Walk(target.n_layers)

    def mlp_raw(out: Any) -> None:
        seen.raw_first.append(_norms(first_tensor(out), ids.shape)[:, 0].median().item())

    def mlp_added(out: Any) -> None:
        added = first_tensor(out).detach().reshape(*ids.shape, -1).float()
        seen.written.append(added[:, 0].mean(0).cpu())
        seen.sample.append(added[:, 1:].flatten(0, 1)[:_SAMPLE].cpu())
        norms = added.norm(dim=-1)
        seen.mlp_norms.append(norms.cpu())
        seen.mlp_first.append(norms[:, 0].median().item())
        seen.mlp_typical.append(norms[:, 1:].flatten().median().item())

    def layer_done(out: Any) -> None:
        resid = first_tensor(out).detach()
        norms = _norms(resid, ids.shape)
        if not bool(norms.isfinite().all()):
            raise SinkscopeError(
                f"layer {len(seen.first)} of {target.name} gives infinite or NaN norms in {target.dtype}; "
                "try --dtype float32, and check the checkpoint"
            )
        seen.first.append(norms[:, 0].median().item())
        seen.residual.append(resid[:, 0].float().mean(0).cpu())
        low, mid, high = norms[:, 1:].flatten().quantile(torch.tensor([0.05, 0.5, 0.95], device=norms.device)).tolist()
        seen.typical.append((low, mid, high))
        seen.whole.append(norms.cpu())
        if massive := massive_dims(resid.float()):
            seen.massive += [d for d in massive if d not in seen.massive]
            norms = norm_of(resid.reshape(*ids.shape, -1), massive)
        seen.partial.append(norms.cpu())
        progress("layers", len(seen.first), target.n_layers)
        if len(seen.first) - 1 == upto or (not whole and seen.flat()):
            target.stop()

    a = target.adapter
    seers = ((a.mlp, on_output(mlp_raw)), (a.post_mlp_norm or a.mlp, on_output(mlp_added)), ("", on_output(layer_done)))
    with target.hooks(*((target.sub(i, path), "post", see) for i in range(len(target.layers)) for path, see in seers)):
        target.forward(ids)
    return seen


def _norms(tensor: Tensor, shape: torch.Size) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach().reshape(*shape, -1), dim=-1, dtype=torch.float32)


def walk_far_enough(made: Setup, *, whole: bool) -> Walk:
    """Run `walk`; if only the first layers of a file are in memory, repeat it with more of them until they suffice."""
    while True:
        seen = walk(made.target, made.ids, whole=whole, progress=made.progress)
        enough = len(seen.first) == made.target.n_layers or (seen.flat() and not whole)
        if enough or not made.more():
            return seen


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


@torch.no_grad()
def reach(target: Target, view: LayerView) -> Float[Tensor, " neuron"]:
    """The ranking criterion for candidates: contribution norms, median over the positions.

    If a norm stands behind the MLP (Gemma 2, OLMo 2), its gain is included: it can pass one residual dimension and
    suppress others, and a neuron that writes mostly into suppressed dimensions makes no spike.
    """
    if target.adapter.post_mlp_norm is None:
        return contribution_norms(target, view).median(0).values
    return view.post.abs().median(0).values * column_norms(target, view.layer)


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


def norms_after(
    target: Target,
    layer: int,
    ids: Int[Tensor, "row pos"],
    batch_size: int | None = None,
    progress: Progress = silent,
    what: str = "norms",
) -> Float[Tensor, "row pos"]:
    """Norm of the residual stream after a layer at every position; the passes end at this layer."""
    site, parts = f"blocks.{layer}.hook_resid_post", list[Tensor]()
    for rows in ids.split(batch_size or len(ids)):
        parts.append(trace(target, rows, [site], "norm")[site])
        progress(what, sum(map(len, parts)), len(ids))
    return torch.cat(parts)


def until_half(norms: Float[Tensor, " repetition"], first: float | Tensor) -> int | None:
    """The first number of repetitions whose norm reaches half of the first token's; None if it never does."""
    reached = (norms >= first / 2).nonzero().flatten()
    return int(reached[0]) + 1 if len(reached) else None


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
