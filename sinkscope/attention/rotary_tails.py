"""One pass over ids, and how far queries, keys, scores and the tail operator repeat after a shift of positions.

Layers are measured as they pass and forgotten; nothing of size query x key is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.trace.attention import attention_rows, queries_and_keys
from sinkscope.trace.sites import resolve


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer.

    Attributes:
        angle: `exp(i * omega_j * t)`, `[pos block]`, of unit length.
        scale: factor that rotary puts on queries and on keys (YaRN's attention factor; 1 elsewhere).
    """

    angle: Complex[Tensor, "pos block"]
    scale: float

    @classmethod
    def of(cls, cos: Float[Tensor, "pos turned"], sin: Float[Tensor, "pos turned"]) -> Rotation:
        """From the tables that the model hands to its attention, of positions 0, 1, 2, ...

        Most families write each frequency twice, one behind the other; gpt-oss writes it once.
        """
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        angle = torch.complex(cos.float(), sin.float())
        scale = float(angle[0, 0].abs())
        return cls(angle / angle.abs().clamp_min(1e-12), scale)

    @property
    def turned(self) -> int:
        """How many of a head's dimensions take part; the rest is left alone (partial rotary)."""
        return 2 * self.angle.shape[1]

    def blocks(self, x: Float[Tensor, "*head d_head"]) -> Complex[Tensor, "*head block"]:
        """The pairs of dimensions that turn together, as complex numbers: those that do not turn come last, in pairs.

        The two of a pair lie half of the turned dimensions apart (as in Llama, NeoX and all families known here).
        """
        x = x.float()
        moving, still = x[..., : self.turned], x[..., self.turned :]
        return torch.cat([torch.complex(*(t.contiguous() for t in part.chunk(2, -1))) for part in (moving, still)], -1)

    def scores(
        self,
        query: Float[Tensor, "head query d_head"],
        key: Float[Tensor, "head key d_head"],
        query_pos: Int[Tensor, " query"],
        key_pos: Int[Tensor, " key"],
    ) -> Float[Tensor, "head query key"]:
        """Eq. 13 from queries and keys before rotary: only the offset of two positions enters.

        With the rotation of Eq. 12, `R(wt) q . R(wi) k = q . R(w (i - t)) k`: the sign of the offset is the opposite
        of what Eq. 2 and 13 print. Where it is turned by the wrong sign the scores are not the model's.
        """
        q, k = self.blocks(query), self.blocks(key)
        factor = self.factor(2 * k.shape[-1])
        rows: list[Tensor] = []
        for n, t in enumerate(query_pos.tolist()):
            offset = key_pos - t
            turn = self.angle[offset.abs()]
            turn = torch.where(offset[:, None] < 0, turn.conj(), turn)  # the table begins at position 0
            moved = torch.cat([turn, turn.new_ones(len(turn), k.shape[-1] - turn.shape[1])], 1) * factor
            rows.append((q[:, n, None].conj() * moved * k).sum(-1).real)
        return torch.stack(rows, 1)

    def factor(self, d_head: int) -> Float[Tensor, " block"]:
        """What a block's product is multiplied with in a score: the square of `scale` where it turns, else 1."""
        out = self.angle.real.new_ones(d_head // 2)
        out[: self.angle.shape[1]] = self.scale**2
        return out


POINTS = 256  # of a drift curve
ROWS = 4  # queries whose scores with every earlier key are held against Eq. 13


@dataclass(frozen=True)
class Shift:
    """What a shift by some number of positions changes in one layer, over the tail; each tensor per query head.

    Attributes:
        delta_q: largest distance of two queries a shift apart, before rotary.
        delta_k: the same of the keys of its key/value head.
        change: mean absolute difference of two scores a shift apart.
        largest: the largest one.
        bound: mean over the same pairs of the right side of Eq. 15.
        tightness: largest ratio of a difference to its bound, less what rounding makes of scores of that size.
        whole: mean of the bound without blocks.
    """

    delta_q: Float[Tensor, " head"]
    delta_k: Float[Tensor, " head"]
    change: Float[Tensor, " head"]
    largest: Float[Tensor, " head"]
    bound: Float[Tensor, " head"]
    tightness: Float[Tensor, " head"]
    whole: Float[Tensor, " head"]


@dataclass(frozen=True)
class LayerTail:
    """One layer, over the tail; each tensor per query head.

    Attributes:
        layer: which.
        query_norm: median length of a query.
        key_norm: of a key.
        spread: standard deviation of the scores.
        scale: factor of rotary on queries and keys.
        error: largest difference between Eq. 13 and the model's own scores, over the largest score.
        shifts: by number of positions.
        mass: share of attention on the tail, mean over the tail's queries.
        drift: per shift, median over the tail of how far the tail operator moves, over its length.
        curve: per shift, the same over all heads together, at every position; NaN where there is nothing to compare.
    """

    layer: int
    query_norm: Float[Tensor, " head"]
    key_norm: Float[Tensor, " head"]
    spread: Float[Tensor, " head"]
    scale: float
    error: Float[Tensor, " head"]
    shifts: dict[int, Shift]
    mass: Float[Tensor, " head"]
    drift: dict[int, Float[Tensor, " head"]]
    curve: dict[int, Float[Tensor, " pos"]]


@torch.no_grad()
def tails(
    target: Target, ids: Int[Tensor, " pos"], layers: list[int], tail: int, shifts: Sequence[int], steps: Sequence[int]
) -> list[LayerTail]:
    """Run over `ids` once and measure the last `tail` queries with the `tail` keys up to each.

    Args:
        target: a plain model with rotary positions.
        ids: at least `2 * tail` and the largest shift.
        layers: which to measure.
        tail: positions of the window on which attention is taken to concentrate (the paper's B_t).
        shifts: numbers of positions for queries, keys and scores.
        steps: numbers of positions for the tail operator.
    """
    found: list[LayerTail] = []
    with ExitStack() as stack:
        layered = {i: _Layer(i, tail, tuple(shifts), tuple(steps), len(ids)) for i in layers}
        for i, part in layered.items():
            (value,) = resolve(target, [f"blocks.{i}.attn.hook_v"])
            assert value.module is not None
            attention = target.sub(i, target.adapter.attn)
            stack.enter_context(
                target.hooks(
                    (attention, "pre", part.on_entry),
                    (value.module, "post", lambda _m, _a, _k, out, s=value, p=part: p.on_value(s.cut(out))),
                    (attention, "post", lambda *_, p=part: found.extend(p.finish())),
                )
            )
        stack.enter_context(attention_rows(target, lambda i, first, r: layered[i].on_rows(first, r), layers=layers))
        stack.enter_context(queries_and_keys(target, lambda i, r, q, k: layered[i].on_qk(r, q, k), layers))
        target.forward(ids[None])
    return found


class _Layer:
    """Takes what passes through one attention module; it is called twice, first without rotation."""

    def __init__(self, layer: int, tail: int, shifts: tuple[int, ...], steps: tuple[int, ...], length: int) -> None:
        self.layer, self.tail, self.shifts, self.steps, self.length = layer, tail, shifts, steps, length
        self.eps = 0.0
        self.turn: Rotation | None = None
        self.plain: tuple[Tensor, Tensor] | None = None
        self.turned: tuple[Tensor, Tensor] | None = None
        self.value: Tensor | None = None
        self.sums: list[Tensor] = []
        self.masses: list[Tensor] = []

    def on_entry(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        tables = kwargs.get("position_embeddings")
        if tables is not None and self.turn is None:
            self.turn = Rotation.of(tables[0][0], tables[1][0])

    def on_qk(self, rotated: bool, query: Tensor, key: Tensor) -> None:
        self.eps = torch.finfo(query.dtype).eps
        pair = query[0].float(), key[0].float()
        if rotated:
            self.turned = pair
        else:
            self.plain = pair

    def on_value(self, value: Tensor) -> None:
        self.value = value[0].float().transpose(0, 1)  # kv_head pos d_head

    def on_rows(self, first: int, rows: Tensor) -> None:
        if self.turned is None or self.value is None:  # the extra call without rotation
            return
        probs = rows[0]
        t = torch.arange(first, first + probs.shape[1], device=probs.device)[:, None]
        i = torch.arange(probs.shape[2], device=probs.device)
        near = probs * ((i <= t) & (i > t - self.tail))
        self.masses.append(near.sum(-1).cpu())
        grouped = near.unflatten(0, (self.value.shape[0], -1))
        self.sums.append(torch.einsum("kgqn,knd->kgqd", grouped, self.value).flatten(0, 1))

    def finish(self) -> list[LayerTail]:
        """The layer's numbers, once its real call is over."""
        if self.turned is None or self.plain is None or self.turn is None:
            return []
        query, key = self.plain
        own_query, own_key = self.turned
        groups = query.shape[0] // key.shape[0]
        key, own_key = (k.repeat_interleave(groups, 0) for k in (key, own_key))
        sums = torch.cat(self.sums, 1)
        window = _window(own_query, own_key, self.length, self.tail, 0)
        made = LayerTail(
            layer=self.layer,
            query_norm=query[:, -self.tail :].norm(dim=-1).median(-1).values.cpu(),
            key_norm=key[:, -2 * self.tail :].norm(dim=-1).median(-1).values.cpu(),
            spread=window.flatten(1).std(-1, correction=0).cpu(),
            scale=self.turn.scale,
            error=self._error(query, key, own_query, own_key),
            shifts={s: self._shift(query, key, window, own_query, own_key, s) for s in self.shifts},
            mass=torch.cat(self.masses, 1)[:, -self.tail :].mean(-1),
            drift={s: _drift(sums, s)[:, -self.tail :].median(-1).values.cpu() for s in self.steps},
            curve={s: _together(sums, s).cpu() for s in self.steps},
        )
        self.plain = self.turned = self.value = None  # one layer at a time
        self.sums.clear()
        return [made]

    def _error(self, query: Tensor, key: Tensor, own_query: Tensor, own_key: Tensor) -> Tensor:
        assert self.turn is not None
        at = torch.linspace(self.length // 2, self.length - 1, ROWS).long().unique().to(query.device)
        every = torch.arange(self.length, device=query.device)
        ours = self.turn.scores(query[:, at], key, at, every)
        own = torch.einsum("hqd,hnd->hqn", own_query[:, at], own_key)
        seen = every <= at[:, None]
        difference, size = ((x.abs() * seen).flatten(1).amax(-1) for x in (ours - own, own))
        return (difference / size.clamp_min(1e-12)).cpu()

    def _shift(
        self, query: Tensor, key: Tensor, window: Tensor, own_query: Tensor, own_key: Tensor, shift: int
    ) -> Shift:
        assert self.turn is not None
        n, tail = self.length, self.tail
        now_q, then_q = query[:, n - tail :], query[:, n - tail - shift : n - shift]
        delta_q = (now_q - then_q).norm(dim=-1).amax(-1)
        first = n - 2 * tail + 1  # the earliest key that a query of the tail sees in its window
        then_k = key[:, first - shift : n - shift]
        delta_k = (key[:, first:] - then_k).norm(dim=-1).amax(-1)
        change = (window - _window(own_query, own_key, n, tail, shift)).abs()
        blocks_q, blocks_k = self.turn.blocks(then_q).abs(), self.turn.blocks(then_k).abs()
        factor = self.turn.factor(query.shape[-1])
        of_q = (blocks_q * factor).sum(-1) * delta_k[:, None]  # head query
        of_k = (blocks_k * factor).sum(-1) * delta_q[:, None]  # head key
        bound = of_k.unfold(-1, tail, 1) + of_q[..., None] + (factor.sum() * delta_q * delta_k)[:, None, None]
        most = float(factor.max())
        whole = most * (
            (then_k.norm(dim=-1) * delta_q[:, None]).unfold(-1, tail, 1)
            + (then_q.norm(dim=-1) * delta_k[:, None])[..., None]
            + (delta_q * delta_k)[:, None, None]
        )
        rounding = 8 * self.eps * own_query.norm(dim=-1).amax(-1) * own_key.norm(dim=-1).amax(-1)
        excess = (change - rounding[:, None, None]).clamp_min(0)
        return Shift(
            delta_q.cpu(),
            delta_k.cpu(),
            change.mean((1, 2)).cpu(),
            change.amax((1, 2)).cpu(),
            bound.mean((1, 2)).cpu(),
            (excess / bound.clamp_min(1e-12)).amax((1, 2)).cpu(),
            whole.mean((1, 2)).cpu(),
        )


def _window(query: Tensor, key: Tensor, length: int, tail: int, shift: int) -> Tensor:
    """Scores of the last `tail` queries, `shift` positions earlier, with the `tail` keys up to each: head query key."""
    end = length - shift
    keys = key[:, end - 2 * tail + 1 : end].unfold(1, tail, 1)  # head query d_head key
    return torch.einsum("hqd,hqdi->hqi", query[:, end - tail : end], keys)


def _drift(sums: Tensor, shift: int) -> Tensor:
    """How far each head's sum moves in `shift` positions, over its length; head pos."""
    now, then = sums[:, shift:], sums[:, :-shift]
    return (now - then).norm(dim=-1) / now.norm(dim=-1).clamp_min(1e-12)


def _together(sums: Tensor, shift: int) -> Tensor:
    """The same over the heads side by side, for every position; NaN before there is one to compare with."""
    whole = sums.transpose(0, 1).flatten(1)
    out = torch.full((len(whole),), torch.nan)
    out[shift:] = _drift(whole[None], shift)[0].cpu()
    return out


@dataclass(frozen=True)
class RotaryHead:
    """One query head over the tail of a loop of period P. Queries, keys and scores are unscaled and before rotary.

    Attributes:
        layer: its layer.
        head: which head.
        query_norm: median length of its queries.
        key_norm: of its keys.
        delta_q: largest distance of two queries P apart (Eq. 14).
        delta_k: of two keys P apart.
        other_delta_q: the same P + 1 apart; None for P = 1, where every shift is a period.
        other_delta_k: the same P + 1 apart.
        healthy_delta_q: P apart in ordinary text; None where there was too little of it.
        healthy_delta_k: P apart in ordinary text.
        spread: standard deviation of the scores of the tail.
        change: mean absolute difference of two scores P apart, s(t, i) and s(t - P, i - P).
        largest: the largest one.
        other_change: mean difference P + 1 apart.
        healthy_change: mean difference P apart in ordinary text.
        bound: mean of the right side of Eq. 15.
        whole_bound: mean of the same without blocks, which is never larger.
        tightness: largest ratio of a difference to its bound; at most 1 where Eq. 15 holds.
        error: largest difference between Eq. 13 and the model's own scores, over the largest score.
        tail_mass: share of attention on the tail.
        drift: how far the tail operator (Eq. 4) moves in P steps, over its length (median over the tail).
        step_drift: in one step.
        healthy_drift: in P steps of ordinary text.
        healthy_step_drift: in one step of ordinary text.
    """

    layer: int
    head: int
    query_norm: float
    key_norm: float
    delta_q: float
    delta_k: float
    other_delta_q: float | None
    other_delta_k: float | None
    healthy_delta_q: float | None
    healthy_delta_k: float | None
    spread: float
    change: float
    largest: float
    other_change: float | None
    healthy_change: float | None
    bound: float
    whole_bound: float
    tightness: float
    error: float
    tail_mass: float
    drift: float
    step_drift: float
    healthy_drift: float | None
    healthy_step_drift: float | None


@dataclass(frozen=True)
class Drift:
    """How far the tail operator of one layer, all heads together, moves; None where nothing lies far enough before.

    Attributes:
        layer: which.
        period: in P steps, over its length, at `positions`.
        step: in one step.
        healthy_period: in P steps of ordinary text.
    """

    layer: int
    period: tuple[float | None, ...]
    step: tuple[float | None, ...]
    healthy_period: tuple[float | None, ...] | None


def heads_of(own: LayerTail, plain: LayerTail | None, period: int) -> list[RotaryHead]:
    """The heads of one layer; `plain` is the same layer on ordinary text."""
    here, other = own.shifts[period], own.shifts.get(period + 1)
    there = None if plain is None else plain.shifts[period]

    def at(values: torch.Tensor, head: int) -> float:
        return float(values[head])

    return [
        RotaryHead(
            layer=own.layer,
            head=h,
            query_norm=at(own.query_norm, h),
            key_norm=at(own.key_norm, h),
            delta_q=at(here.delta_q, h),
            delta_k=at(here.delta_k, h),
            other_delta_q=None if other is None else at(other.delta_q, h),
            other_delta_k=None if other is None else at(other.delta_k, h),
            healthy_delta_q=None if there is None else at(there.delta_q, h),
            healthy_delta_k=None if there is None else at(there.delta_k, h),
            spread=at(own.spread, h),
            change=at(here.change, h),
            largest=at(here.largest, h),
            other_change=None if other is None else at(other.change, h),
            healthy_change=None if there is None else at(there.change, h),
            bound=at(here.bound, h),
            whole_bound=at(here.whole, h),
            tightness=at(here.tightness, h),
            error=at(own.error, h),
            tail_mass=at(own.mass, h),
            drift=at(own.drift[period], h),
            step_drift=at(own.drift[1], h),
            healthy_drift=None if plain is None else at(plain.drift[period], h),
            healthy_step_drift=None if plain is None else at(plain.drift[1], h),
        )
        for h in range(len(own.spread))
    ]


def positions_of(count: int) -> tuple[int, ...]:
    """At most `POINTS` of them, and an odd stride, so that a short period shows all its phases."""
    stride = -(-count // POINTS)
    return tuple(range(0, count, stride + (stride + 1) % 2))


def curves_of(own: LayerTail, plain: LayerTail | None, period: int, positions: tuple[int, ...]) -> Drift:
    """The drift of one layer at `positions`."""

    def at(curve: torch.Tensor) -> tuple[float | None, ...]:
        return tuple(None if v != v else v for v in curve[list(positions)].tolist())

    healthy = None if plain is None else at(plain.curve[period])
    return Drift(own.layer, at(own.curve[period]), at(own.curve[1]), healthy)
