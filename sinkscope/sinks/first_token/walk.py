"""What typical text shows: norms across layers, where the first token's spike is built, and which heads attend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.console import Progress, silent
from sinkscope.measure import Setup
from sinkscope.models.target import Target, first_tensor, norm_of, on_output
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.found import HEADS, RATE_EPS, SinkRate
from sinkscope.trace.attention import attention_rows
from sinkscope.trace.run import trace

STAGE_SHARE = 0.01  # a stage adds at least this share of the first token's largest norm (definition of a stage)
STAGE_OUTLIER = 5.0  # ... and its MLP writes this many times its median on typical text, either in total or along the
# spike (an early stage can be small compared with everything that an MLP writes, but not along that direction)
FALL_SHARE = 0.05  # a step-down layer removes at least this share of the spike's largest length
SINK_RATIO = 3.0  # a spike: the first token's norm is this many times the typical one
# Medians are used instead of high quantiles: some later positions are sinks, too (delimiters; without BOS the first
# tokens, as long as they belong to one cluster), and must not hide the first one.
LEAST = 1e-9  # lower limit of a typical norm: in a hand-made model it can be 0, and it is a divisor
_SAMPLE = 64  # positions of typical text whose activations are kept for that comparison
_SHARED = 30.0  # a dimension is massive on all tokens if it is this many times the median dimension

RATE_LENGTH, RATE_TEXTS = 64, 100  # texts over which the sink rate is defined (Gu et al. 2024)
QUERIES = 16  # later queries a position needs: heads that attend to themselves favour the last positions
SHARE = 0.01  # a sink needs at least this share of all heads, and at least HEADS of them
LATER_SHARE = 0.05  # share for a position other than the first: a head that prefers one word is not a sink
SEEN = 3  # a later token must occur this often before it is judged


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

    @property
    def steps(self) -> tuple[list[int], list[int]]:
        """Layers that make the spike longer, and layers that make it shorter, by at least 5 % of its largest length."""
        spike = self.direction
        length = [float(r @ spike) for r in self.residual]
        bar = FALL_SHARE * max(length)
        grown = [(i, after - before) for i, (before, after) in enumerate(pairwise(length), 1)]
        return [i for i, more in grown if more >= bar], [i for i, more in grown if -more >= bar]

    @property
    def sink_layer(self) -> int | None:
        """The stage that adds most to the norm."""
        return max(self.stages, key=lambda i: self.mlp_first[i], default=None)

    @property
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
        if not whole and seen.flat:
            target.stop()

    a = target.adapter
    seers = ((a.mlp, on_output(mlp_raw)), (a.post_mlp_norm or a.mlp, on_output(mlp_added)), ("", on_output(layer_done)))
    with target.hooks(*((target.sub(i, path), "post", see) for i in range(len(target.layers)) for path, see in seers)):
        target.forward(ids, upto=upto)
    return seen


def _norms(tensor: Tensor, shape: torch.Size) -> Tensor:
    return torch.linalg.vector_norm(tensor.detach().reshape(*shape, -1), dim=-1, dtype=torch.float32)


def walk_far_enough(setup: Setup, *, whole: bool) -> Walk:
    """Run `walk`; if only the first layers of a file are in memory, repeat it with more of them until they suffice."""
    while True:
        seen = walk(setup.target, setup.ids, whole=whole, progress=setup.progress)
        enough = len(seen.first) == setup.target.n_layers or (seen.flat and not whole)
        if enough or not setup.more():
            return seen


@dataclass(frozen=True)
class Received:
    """Which heads attend to which positions of the texts `ids`.

    Attributes:
        ids: The texts, `[text pos]`.
        above: Whether the mean attention from all queries at or after the position exceeds the threshold. The last
            positions of each text are left out because too few queries see them.
        learned: The same for the learned sink logit of each head.
    """

    ids: Int[Tensor, "text pos"]
    above: Bool[Tensor, "layer head text at"]
    learned: Bool[Tensor, "layer head text"]

    @property
    def rate(self) -> float:
        """The sink rate of position 0: the share of (layer, head) above the threshold, averaged over texts."""
        return float(self.above[..., 0].float().mean())

    @cached_property
    def heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs that attend to the first token in most texts; empty if too few for a sink."""
        return _enough(self.above[..., 0].float().mean(-1) >= 0.5)

    @cached_property
    def learned_heads(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs whose learned sink logit exceeds the threshold in most texts; empty if too few."""
        return _enough(self.learned.float().mean(-1) >= 0.5)

    @cached_property
    def later(self) -> list[tuple[int | None, int, float]]:
        """Positions behind the first that receive attention: (token, first position where it was seen, share of heads).

        The token is None if the position receives attention regardless of the token there.
        """
        seen = self.ids[:, : self.above.shape[-1]]
        tokens: dict[int | None, tuple[int, float]] = {}
        for token in seen[:, 1:].unique().tolist():
            where = seen == token
            where[:, 0] = False
            if share := _share(self.above[:, :, where]):
                tokens[token] = (int(where.any(0).nonzero()[0]), share)
        found = [(token, *rest) for token, rest in tokens.items()]
        others = ~torch.isin(seen, torch.tensor([t for t in tokens if t is not None]))
        for at in range(1, seen.shape[1]):
            if share := _share(self.above[:, :, others[:, at], at]):
                found.append((None, at, share))
        return sorted(found, key=lambda place: -place[2])


def _share(above: Bool[Tensor, "layer head n"]) -> float:
    """Share of heads above the bar in most of `n` cases; 0 where the cases or the heads are too few for a sink."""
    steady = above.float().mean(-1) >= 0.5
    share = float(steady.float().mean())
    return share if above.shape[-1] >= SEEN and int(steady.sum()) >= HEADS and share >= LATER_SHARE else 0.0


def _enough(steady: Bool[Tensor, "layer head"]) -> list[tuple[int, int]]:
    heads = [(int(layer), int(head)) for layer, head in steady.nonzero().tolist()]
    return heads if len(heads) >= HEADS and len(heads) >= SHARE * steady.numel() else []


@torch.no_grad()
def received(
    target: Target,
    ids: Int[Tensor, "text pos"],
    eps: float,
    *,
    layers: int | None = None,
    progress: Progress = silent,
    batch: int = 8,
) -> Received:
    """Run texts and record which heads attend to which position.

    The attention that position k receives is the mean of A[i, k] over all queries i >= k (Gu et al. 2024).

    Args:
        target: The model.
        ids: Texts of equal length.
        eps: Threshold; 0.3 in the paper.
        layers: Number of layers to run. None: all.
        progress: Called after each batch.
        batch: Number of texts that run together.
    """
    count, length = target.n_layers if layers is None else layers, ids.shape[1]
    places = max(1, length - QUERIES)
    above = torch.zeros(count, target.n_heads, len(ids), places, dtype=torch.bool)
    learned = torch.zeros(count, target.n_heads, len(ids), dtype=torch.bool)
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        part = slice(start, start + len(rows))

        def note(layer: int, _first: int, probs: Tensor, texts: slice = part) -> None:
            mean = probs.sum(-2)[..., :places] / torch.arange(length, length - places, -1, device=probs.device)
            above[layer, :, texts] = (mean > eps).transpose(0, 1).cpu()
            if target.adapter.learned_sinks:
                learned[layer, :, texts] = (1 - probs.sum(-1).mean(-1) > eps).transpose(0, 1).cpu()

        with attention_rows(target, note, layers=list(range(count)), rows_per_chunk=length):
            target.forward(rows, upto=count - 1)
        progress("sink rate", min(start + batch, len(ids)), len(ids))
    return Received(ids, above, learned)


def listened(setup: Setup, depth: int, *, whole: bool) -> tuple[Received, SinkRate | None]:
    """Attention over many short texts, as the sink rate is defined; over the typical text where these do not fit.

    Of a model that is not read `whole`, the typical text is run up to layer `depth`, and there is no rate.
    """
    target, ids = setup.target, setup.ids
    if not whole or (target.max_positions or RATE_LENGTH) < RATE_LENGTH:
        return received(target, ids, RATE_EPS, layers=depth), None
    # A batch takes 128 MB at its widest activation. Layers read from disk are read once, so there is one smaller batch.
    fitting = max(1, (1 << 25) // (RATE_LENGTH * target.d_mlp))
    texts, batch = (RATE_TEXTS, fitting) if target.resident else (RATE_TEXTS // 4, RATE_TEXTS)
    ids = text_rows(setup.tokenizer, setup.text, texts, RATE_LENGTH, setup.bos)
    heard = received(target, ids, RATE_EPS, progress=setup.progress, batch=batch)
    return heard, SinkRate(RATE_EPS, RATE_LENGTH, len(ids), heard.rate)


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
