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
from sinkscope.trace.attention import Attention, listening, queries_and_keys


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
class LayerTail:
    """One layer, over the tail.

    Attributes:
        layer: which.
        scale: factor of rotary on queries and keys.
        heads: numbers per query head, by the names of `RotaryHead`.
        shifts: by number of positions, what a shift by that many changes; per query head, by the names of `RotaryHead`.
        drift: per shift, median over the tail of how far the tail operator moves, over its length.
        curve: per shift, the same over all heads together, at every position; NaN where there is nothing to compare.
    """

    layer: int
    scale: float
    heads: dict[str, Float[Tensor, " head"]]
    shifts: dict[int, dict[str, Float[Tensor, " head"]]]
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
    layered = {i: _Layer(i, tail, tuple(shifts), tuple(steps), len(ids)) for i in layers}

    def see(call: Attention) -> None:
        if call.layer in layered:
            layered[call.layer].on_call(call)

    with ExitStack() as stack:
        for i, part in layered.items():
            attention = target.sub(i, target.adapter.attn)
            finish = (attention, "post", lambda *_, p=part: found.extend(p.finish()))
            stack.enter_context(target.hooks((attention, "pre", part.on_entry), finish))
        stack.enter_context(listening(target, see))
        stack.enter_context(queries_and_keys(target, lambda i, r, q, k: layered[i].on_qk(r, q, k), layers))
        target.forward(ids[None])
    return found


class _Layer:
    """Takes what passes through one attention module; it is called twice, first without rotation."""

    def __init__(self, layer: int, tail: int, shifts: tuple[int, ...], steps: tuple[int, ...], length: int) -> None:
        self.layer, self.tail, self.shifts, self.steps, self.length = layer, tail, shifts, steps, length
        self.eps = 0.0
        self.turn: Rotation | None = None
        self.pairs: dict[bool, tuple[Tensor, Tensor]] = {}  # queries and keys, by whether they are rotated
        self.sums: list[Tensor] = []
        self.masses: list[Tensor] = []

    def on_entry(self, _module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        tables = kwargs.get("position_embeddings")
        if tables is not None and self.turn is None:
            self.turn = Rotation.of(tables[0][0], tables[1][0])

    def on_qk(self, rotated: bool, query: Tensor, key: Tensor) -> None:
        self.eps = torch.finfo(query.dtype).eps
        self.pairs[rotated] = query[0].float(), key[0].float()

    def on_call(self, call: Attention) -> None:
        value = call.value[0].float()  # kv_head pos d_head
        call.show(lambda first, rows: self._add(first, rows[0], value), by_mask=True)

    def _add(self, first: int, probs: Float[Tensor, "head query key"], value: Float[Tensor, "kv_head key d"]) -> None:
        t = torch.arange(first, first + probs.shape[1], device=probs.device)[:, None]
        i = torch.arange(probs.shape[2], device=probs.device)
        near = probs * ((i <= t) & (i > t - self.tail))
        self.masses.append(near.sum(-1).cpu())
        grouped = near.unflatten(0, (value.shape[0], -1))
        self.sums.append(torch.einsum("kgqn,knd->kgqd", grouped, value).flatten(0, 1))

    def finish(self) -> list[LayerTail]:
        """The layer's numbers, once its real call is over."""
        if len(self.pairs) < 2 or self.turn is None:
            return []
        (query, key), (own_query, own_key) = self.pairs[False], self.pairs[True]
        groups = query.shape[0] // key.shape[0]
        key, own_key = (k.repeat_interleave(groups, 0) for k in (key, own_key))
        sums = torch.cat(self.sums, 1)
        window = _window(own_query, own_key, self.length, self.tail, 0)
        made = LayerTail(
            layer=self.layer,
            scale=self.turn.scale,
            heads={
                "query_norm": query[:, -self.tail :].norm(dim=-1).median(-1).values.cpu(),
                "key_norm": key[:, -2 * self.tail :].norm(dim=-1).median(-1).values.cpu(),
                "spread": window.flatten(1).std(-1, correction=0).cpu(),
                "error": self._error(self.turn, query, key, own_query, own_key),
                "tail_mass": torch.cat(self.masses, 1)[:, -self.tail :].mean(-1),
            },
            shifts={s: self._shift(self.turn, query, key, window, own_query, own_key, s) for s in self.shifts},
            drift={s: _drift(sums, s)[:, -self.tail :].median(-1).values.cpu() for s in self.steps},
            curve={s: _together(sums, s).cpu() for s in self.steps},
        )
        self.pairs.clear()  # one layer at a time
        self.sums.clear()
        return [made]

    def _error(self, turn: Rotation, query: Tensor, key: Tensor, own_query: Tensor, own_key: Tensor) -> Tensor:
        at = torch.linspace(self.length // 2, self.length - 1, ROWS).long().unique().to(query.device)
        every = torch.arange(self.length, device=query.device)
        ours = turn.scores(query[:, at], key, at, every)
        own = torch.einsum("hqd,hnd->hqn", own_query[:, at], own_key)
        seen = every <= at[:, None]
        difference, size = ((x.abs() * seen).flatten(1).amax(-1) for x in (ours - own, own))
        return (difference / size.clamp_min(1e-12)).cpu()

    def _shift(
        self,
        turn: Rotation,
        query: Tensor,
        key: Tensor,
        window: Tensor,
        own_query: Tensor,
        own_key: Tensor,
        shift: int,
    ) -> dict[str, Tensor]:
        n, tail = self.length, self.tail
        now_q, then_q = query[:, n - tail :], query[:, n - tail - shift : n - shift]
        delta_q = (now_q - then_q).norm(dim=-1).amax(-1)
        first = n - 2 * tail + 1  # the earliest key that a query of the tail sees in its window
        then_k = key[:, first - shift : n - shift]
        delta_k = (key[:, first:] - then_k).norm(dim=-1).amax(-1)
        change = (window - _window(own_query, own_key, n, tail, shift)).abs()
        blocks_q, blocks_k = turn.blocks(then_q).abs(), turn.blocks(then_k).abs()
        factor = turn.factor(query.shape[-1])
        of_q = (blocks_q * factor).sum(-1) * delta_k[:, None]  # head query
        of_k = (blocks_k * factor).sum(-1) * delta_q[:, None]  # head key
        bound = of_k.unfold(-1, tail, 1) + of_q[..., None] + (factor.sum() * delta_q * delta_k)[:, None, None]
        most = float(factor.max())
        whole = most * (
            (then_k.norm(dim=-1) * delta_q[:, None]).unfold(-1, tail, 1)
            + (then_q.norm(dim=-1) * delta_k[:, None])[..., None]
            + (delta_q * delta_k)[:, None, None]
        )
        # an angle of n radians is itself rounded, to n eps at most
        rounding = (8 + n) * self.eps * own_query.norm(dim=-1).amax(-1) * own_key.norm(dim=-1).amax(-1)
        excess = (change - rounding[:, None, None]).clamp_min(0)
        found = {
            "delta_q": delta_q,
            "delta_k": delta_k,
            "change": change.mean((1, 2)),
            "largest": change.amax((1, 2)),
            "bound": bound.mean((1, 2)),
            "tightness": (excess / bound.clamp_min(1e-12)).amax((1, 2)),
            "whole_bound": whole.mean((1, 2)),
        }
        return {name: values.cpu() for name, values in found.items()}


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


@dataclass(frozen=True, kw_only=True)
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
    other_delta_q: float | None = None
    other_delta_k: float | None = None
    healthy_delta_q: float | None = None
    healthy_delta_k: float | None = None
    spread: float
    change: float
    largest: float
    other_change: float | None = None
    healthy_change: float | None = None
    bound: float
    whole_bound: float
    tightness: float
    error: float
    tail_mass: float
    drift: float
    step_drift: float
    healthy_drift: float | None = None
    healthy_step_drift: float | None = None


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
    numbers = {**own.heads, **own.shifts[period], "drift": own.drift[period], "step_drift": own.drift[1]}
    compared = {"other": own.shifts.get(period + 1, {}), "healthy": {} if plain is None else plain.shifts[period]}
    for prefix, shift in compared.items():
        numbers |= {f"{prefix}_{name}": shift[name] for name in ("delta_q", "delta_k", "change") if name in shift}
    if plain is not None:
        numbers |= {"healthy_drift": plain.drift[period], "healthy_step_drift": plain.drift[1]}
    return [
        RotaryHead(layer=own.layer, head=head, **{name: float(values[head]) for name, values in numbers.items()})
        for head in range(len(own.drift[1]))
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
