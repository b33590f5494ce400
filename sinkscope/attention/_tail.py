"""What `rotary_invariance` reports of each head, and of each layer along the sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sinkscope.attention._shift import LayerTail

POINTS = 256  # of a drift curve


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
