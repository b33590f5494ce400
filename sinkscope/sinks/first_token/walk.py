"""Norms across layers on typical text, where the first token's spike is built, and norms at repetitions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.console import Progress, silent
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.models.target import Target, first_tensor, norm_of, on_output
from sinkscope.sinks.first_token.layer import LayerView, view_layer
from sinkscope.trace.run import trace

LEAST = 1e-9  # lower limit of a typical norm: in a hand-made model it can be 0, and it is a divisor
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

    @property
    def standing(self) -> list[int]:
        """Layers after which the first token's norm stands out; empty if there is no norm spike."""
        return [
            i for i, (norm, usual) in enumerate(zip(self.spike, self.usual, strict=True)) if norm > SINK_RATIO * usual
        ]

    @property
    def direction(self) -> Tensor:
        """Direction of the spike: the first token's residual stream where it is largest, without shared dimensions."""
        peak = int(torch.tensor(self.spike).argmax())
        way = self.residual[peak].clone()
        way[self.shared] = 0
        return way / way.norm()

    @property
    def stages(self) -> list[int]:
        """Layers whose MLP builds the first token's norm (definition of a stage), in order; may be empty."""
        if not self.standing:
            return []
        largest, spike = max(self.spike), self.direction
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
        if not self.standing:
            return []
        spike = self.direction
        length = [float(r @ spike) for r in self.residual]
        bar = FALL_SHARE * max(length)
        return [i for i in range(1, len(length)) if sign * (length[i] - length[i - 1]) >= bar]

    @property
    def sink_layer(self) -> int | None:
        """The stage that adds most to the norm."""
        return max(self.stages, key=lambda i: self.mlp_first[i], default=None)

    def flat(self) -> bool:
        """Whether no new stage appeared for a third of the layers (at least three) after one was seen."""
        stages = self.stages
        return bool(stages) and len(self.first) - 1 - stages[-1] >= max(3, math.ceil(self.n_layers / 3))

    @property
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
