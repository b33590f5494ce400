"""Why a loop persists: scores that repeat under rotary positions (Xu et al. 2026, section 3.3 and appendix A)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from sinkscope.attention.texts import QueryHead, generated, healthy_ids, loop_of, prompt_ids
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.measure import Option, Positive, Result, Setup, measurement
from sinkscope.models.inputs import read_row
from sinkscope.models.target import Target, first_tensor, on_input
from sinkscope.trace.attention import Attention, listening, queries_and_keys, refuse_opaque


@dataclass(frozen=True)
class Rotation:
    """The rotation of one layer.

    Attributes:
        angle: `exp(i * omega_j * t)`, `[pos block]`, of unit length.
        scale: Factor by which rotary multiplies queries and keys (YaRN's attention factor; 1 elsewhere).
    """

    angle: Complex[Tensor, "pos block"]
    scale: float

    @classmethod
    def of(cls, cos: Float[Tensor, "pos turned"], sin: Float[Tensor, "pos turned"]) -> Rotation:
        """Build from the tables that the model passes to its attention, for positions 0, 1, 2, ...

        Most families list each frequency twice, in two consecutive halves; gpt-oss lists it once.
        """
        half = cos.shape[-1] // 2
        if torch.equal(cos[:, :half], cos[:, half:]):
            cos, sin = cos[:, :half], sin[:, :half]
        angle = torch.complex(cos.float(), sin.float())
        scale = float(angle[0, 0].abs())
        return cls(angle / angle.abs().clamp_min(1e-12), scale)

    @property
    def turned(self) -> int:
        """How many of a head's dimensions are rotated; the others are left unchanged (partial rotary)."""
        return 2 * self.angle.shape[1]

    def blocks(self, x: Float[Tensor, "*head d_head"]) -> Complex[Tensor, "*head block"]:
        """The pairs of dimensions that rotate together, as complex numbers; unrotated dimensions come last, in pairs.

        The two dimensions of a pair are half of the rotated dimensions apart (as in Llama, NeoX and all families known
        here).
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
        """Eq. 13, from queries and keys before rotary: only the offset between two positions matters.

        With the rotation of Eq. 12, `R(wt) q . R(wi) k = q . R(w (i - t)) k`: the sign of the offset is the opposite of
        the one printed in Eq. 2 and 13. With the printed sign, the scores do not match the model's.
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
        """Factor of a block's product in a score: the square of `scale` for rotated blocks, otherwise 1."""
        out = self.angle.real.new_ones(d_head // 2)
        out[: self.angle.shape[1]] = self.scale**2
        return out


POINTS = 256  # most points of a drift curve
ROWS = 4  # queries whose scores with every earlier key are compared with Eq. 13


@dataclass(frozen=True)
class LayerTail:
    """Measurements of one layer over the tail.

    Attributes:
        layer: The layer.
        scale: Factor by which rotary multiplies queries and keys.
        heads: Numbers per query head, under the field names of `RotaryHead`.
        shifts: By shift in positions: differences under this shift, per query head, under the names of `RotaryHead`.
        drift: Per shift, median over the tail of how far the tail operator moves, relative to its norm.
        curve: Per shift, the same over all heads together, at every position; NaN if there is nothing to compare.
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
    """Run over `ids` once and measure each of the last `tail` queries with the `tail` keys up to it.

    Args:
        target: A plain model with rotary positions.
        ids: Token ids; at least `2 * tail` plus the largest shift.
        layers: Layers to measure.
        tail: Length of the window on which attention is assumed to concentrate (the paper's B_t).
        shifts: Shifts in positions for queries, keys and scores.
        steps: Shifts in steps for the tail operator.
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
        """Compute the layer's numbers after its real call has finished."""
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
class RotaryHead(QueryHead):
    """One query head over the tail of a loop of period P. Queries, keys and scores are unscaled and before rotary.

    Attributes:
        query_norm: Median norm of the queries.
        key_norm: Median norm of the keys.
        delta_q: Largest distance between two queries P apart (Eq. 14).
        delta_k: Largest distance between two keys P apart.
        other_delta_q: Largest distance between two queries P + 1 apart; None for P = 1, where every shift is a period.
        other_delta_k: Largest distance between two keys P + 1 apart; None for P = 1.
        healthy_delta_q: Largest distance between queries P apart in ordinary text; None if the text was too short.
        healthy_delta_k: Largest distance between keys P apart in ordinary text; None if the text was too short.
        spread: Standard deviation of the scores of the tail.
        change: Mean absolute difference between two scores P apart, s(t, i) and s(t - P, i - P).
        largest: Largest of these differences.
        other_change: Mean absolute difference between scores P + 1 apart.
        healthy_change: Mean absolute difference between scores P apart in ordinary text.
        bound: Mean of the right side of Eq. 15.
        whole_bound: Mean of the same bound computed without blocks, which is never larger.
        tightness: Largest ratio of a difference to its bound; at most 1 where Eq. 15 holds.
        error: Largest difference between Eq. 13 and the model's own scores, relative to the largest score.
        tail_mass: Share of attention on the tail.
        drift: Distance that the tail operator (Eq. 4) moves in P steps, relative to its norm (median over the tail).
        step_drift: Drift in one step.
        healthy_drift: Drift in P steps of ordinary text.
        healthy_step_drift: Drift in one step of ordinary text.
    """

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
    """Drift of the tail operator of one layer, all heads together. None if no position lies far enough back.

    Attributes:
        layer: The layer.
        period: Drift in P steps, relative to the operator's norm, at `positions`.
        step: Drift in one step.
        healthy_period: Drift in P steps of ordinary text.
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
    """At most `POINTS` positions at an odd stride, so that a short period shows all its phases."""
    stride = -(-count // POINTS)
    return tuple(range(0, count, stride + (stride + 1) % 2))


def curves_of(own: LayerTail, plain: LayerTail | None, period: int, positions: tuple[int, ...]) -> Drift:
    """The drift of one layer at `positions`."""

    def at(curve: torch.Tensor) -> tuple[float | None, ...]:
        return tuple(None if v != v else v for v in curve[list(positions)].tolist())

    healthy = None if plain is None else at(plain.curve[period])
    return Drift(own.layer, at(own.curve[period]), at(own.curve[1]), healthy)


ENERGY = 0.999  # share of the hidden states' energy in the tail subspace


@dataclass(frozen=True)
class Decay:
    """Effect of a disturbance that enters one layer during one period.

    Attributes:
        layer: Layer whose input (`hook_resid_pre`) is disturbed.
        dimensions: Dimensions of the tail subspace at that input.
        size: Size of the disturbance relative to the norm of the hidden state, at every position of the period.
        within: Whether the disturbance lies inside the tail subspace; False means orthogonal to it.
        change: Relative change of the last hidden state, root mean square over the directions, in the disturbed period
            and in each period that follows.
        kept: Share of directions under which every token of the following periods remains the model's top prediction.
    """

    layer: int
    dimensions: int
    size: float
    within: bool
    change: tuple[float, ...]
    kept: float

    @property
    def contraction(self) -> float:
        """Change in the following period divided by the change in the disturbed one."""
        return self.change[1] / self.change[0] if self.change[0] else 0.0

    @property
    def rate(self) -> float | None:
        """Geometric mean factor from one later period to the next; None if fewer than two followed."""
        later = self.change[1:]
        if len(later) < 2 or not later[0]:
            return None
        return (later[-1] / later[0]) ** (1 / (len(later) - 1))


class Disturbed:
    """A model that has read a sequence up to its last periods and can be disturbed there repeatedly.

    The tokens continue unchanged. As long as the top prediction stays the same, this is what greedy decoding does:
    tokens are discrete, so a hidden state affects later steps only through the keys and values it left in the cache.
    """

    @torch.no_grad()
    def __init__(
        self, target: Target, ids: Int[Tensor, " pos"], period: int, periods: int, directions: int = 4, seed: int = 0
    ) -> None:
        """Read the sequence.

        Args:
            target: The model.
            ids: A sequence that ends in at least `2 * periods + 1` periods.
            period: Period in tokens.
            periods: Number of periods that follow the disturbed one.
            directions: Number of random directions, each a row of a batch.
            seed: Seed of the directions.
        """
        from transformers import DynamicCache

        self.target, self.period, self.periods, self.directions, self.seed = target, period, periods, directions, seed
        self.start = len(ids) - (periods + 1) * period
        self.rest = ids[None, self.start :].expand(directions + 1, -1)
        self.states: dict[int, Tensor] = {}  # entering each layer, row 0
        self.cache: Any = DynamicCache()  # without sliding windows, so that it can be cropped
        layers = [(module, "pre", on_input(partial(self._keep, i))) for i, module in enumerate(target.layers)]
        with target.hooks(*layers):
            target.forward(ids[None, : self.start], past_key_values=self.cache, use_cache=True)
            self.cache.batch_repeat_interleave(directions + 1)
            self._pass()

    @torch.no_grad()
    def decay(self, layer: int, *, size: float, within: bool = False) -> Decay | None:
        """Disturb the input of `layer` for one period.

        Args:
            layer: Layer whose input is disturbed.
            size: Size of the disturbance relative to the norm of the hidden state, at every position of the period.
            within: Disturb inside the tail subspace instead of orthogonally to it.

        Returns:
            None if the tail subspace leaves no orthogonal direction.
        """
        period, hidden = self.period, self.states[layer]
        basis = _subspace(hidden[self.start - self.periods * period : self.start])
        if not within and basis.shape[0] == basis.shape[1]:
            return None
        noise = torch.randn(self.directions, period, basis.shape[1], generator=torch.Generator().manual_seed(self.seed))
        inside = noise @ basis.T @ basis
        noise = inside if within else noise - inside
        length = hidden[self.start : self.start + period].norm(dim=-1, keepdim=True)
        push = noise / noise.norm(dim=-1, keepdim=True) * length * size

        def pushed(states: Tensor) -> Tensor:
            states = states.clone()
            states[1:, :period] += push.to(states)
            return states

        with self.target.hooks((self.target.layers[layer], "pre", on_input(pushed))):
            out = self._pass()
        sizes = (out[1:] - out[:1]).float().norm(dim=-1) / out[:1].float().norm(dim=-1)
        change = sizes.square().unflatten(1, (self.periods + 1, period)).mean((0, 2)).sqrt()
        logits = self.target.hf.get_output_embeddings()
        said = torch.stack([logits(row[period:]).argmax(-1) for row in out])  # row by row: vocabularies are large
        kept = (said[1:] == said[:1]).all(1).float().mean()
        return Decay(layer, basis.shape[0], size, within, tuple(change.tolist()), float(kept))

    def _pass(self) -> Tensor:
        out = self.target.forward(self.rest, past_key_values=self.cache, use_cache=True).last_hidden_state
        self.cache.crop(-self.rest.shape[1])
        return out

    def _keep(self, layer: int, states: Tensor) -> None:
        seen = first_tensor(states)[0].float().cpu()
        self.states[layer] = torch.cat([self.states[layer], seen]) if layer in self.states else seen


def _subspace(states: Float[Tensor, "pos d_model"]) -> Float[Tensor, "dimension d_model"]:
    """An orthonormal basis of the smallest subspace with `ENERGY` of the states' squared length."""
    _, singular, right = torch.linalg.svd(states, full_matrices=False)
    energy = singular.square().cumsum(0) / singular.square().sum()
    return right[: int((energy < ENERGY).sum()) + 1]


TAIL = 32  # positions of the window, rounded up to whole periods
PERIODS = 8  # number of periods after a disturbance
_SHOWN = (
    "query_norm",
    "delta_q",
    "other_delta_q",
    "healthy_delta_q",
    "key_norm",
    "delta_k",
    "spread",
    "change",
    "other_change",
    "healthy_change",
    "bound",
    "tail_mass",
    "drift",
    "step_drift",
)
SMALL, LARGE = 0.01, 1.0  # sizes of a disturbance, relative to the norm of the hidden state


@dataclass(frozen=True, kw_only=True)
class RotaryInvariance(Result):
    """Lemma 1 measured on a real loop.

    Attributes:
        tokens: Prompt and generated ids.
        prompt_tokens: How many of these tokens belong to the prompt.
        period: Period of the loop in tokens. None if no loop was found; everything below is then empty.
        onset: Position of the loop's first token.
        repeated: The text of one period.
        tail: Length of the window in positions (the paper's B_t).
        rotary_scale: Factor by which rotary multiplies queries and keys (1 except with YaRN).
        heads: Every head of every layer.
        positions: Positions at which the drift curves are sampled.
        drift: One curve per layer.
        decays: Effects of disturbing one period.
        healthy_decays: The same in ordinary text.
    """

    kind: ClassVar[str] = "rotary"
    columns: ClassVar[tuple[str, ...]] = (
        *("layer", "spread", "change", "other_change", "healthy_change", "bound", "tail_mass", "drift", "step_drift"),
        *("contraction", "tightness", "error"),
    )

    tokens: int
    prompt_tokens: int
    period: int | None = None
    onset: int | None = None
    repeated: str | None = None
    tail: int | None = None
    rotary_scale: float | None = None
    heads: tuple[RotaryHead, ...] = ()
    positions: tuple[int, ...] = ()
    drift: tuple[Drift, ...] = ()
    decays: tuple[Decay, ...] = ()
    healthy_decays: tuple[Decay, ...] = ()

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer: medians over its heads; maxima for the bound's tightness and the error."""
        out: list[dict[str, Any]] = []
        for layer in sorted({h.layer for h in self.heads}):
            own = [h for h in self.heads if h.layer == layer]
            row: dict[str, Any] = {"layer": layer}
            for name in _SHOWN:
                row[name] = _median([getattr(h, name) for h in own])
            row |= {"tightness": max(h.tightness for h in own), "error": max(h.error for h in own)}
            row["contraction"] = _median([d.contraction for d in _of_size(self.decays) if d.layer == layer])
            out.append(row)
        return out

    def conclusion(self) -> str:
        """Whether scores repeat with the loop, compared with another shift and with ordinary text."""
        if self.period is None:
            return f"The {self.tokens} tokens end in no loop, so there is nothing to measure."
        h = self.heads
        return (
            f"Scores one period ({self.period} tokens) apart differ by {_of(h, 'change')} of their spread; one token "
            f"further apart they differ by {_of(h, 'other_change')}, and in ordinary text by "
            f"{_of(h, 'healthy_change')} (median over heads)."
        )

    def details(self) -> list[str]:
        """The loop, Eq. 13 compared with the model, the tail operator and the contraction."""
        if self.period is None:
            return ["More tokens or another prompt may end in a loop."]
        h = self.heads
        tight = max(x.tightness for x in h)
        in_period, in_step, in_text, in_text_step = (
            _median([getattr(x, name) for x in h])
            for name in ("drift", "step_drift", "healthy_drift", "healthy_step_drift")
        )
        moves = in_step is not None and in_period is not None and in_step > max(0.1, 2 * in_period)
        return [
            f"The loop begins at position {self.onset} of {self.tokens} and repeats {self.repeated!r}; the tail has "
            f"{self.tail} positions.",
            f"Eq. 13 agrees with the model's own scores to {max(x.error for x in h):.1e} of the largest score.",
            f"Eq. 15 {'holds' if tight <= 1 else 'DOES NOT HOLD'}: differences reach at most {tight:.0%} of the "
            f"bound; the bound itself is {_of(h, 'bound')} of the spread, and {_of(h, 'whole_bound')} without blocks.",
            f"The tail operator moves by {_share(in_period)} of its length in a period and by {_share(in_step)} in a "
            f"step (in ordinary text {_share(in_text)} and {_share(in_text_step)})"
            + (": it is periodic, not constant." if moves else "."),
            *self._contraction(),
        ]

    def _contraction(self) -> list[str]:
        own, inside, plain = _of_size(self.decays), _of_size(self.decays, within=True), _of_size(self.healthy_decays)
        if not own:
            return ["The tail subspace leaves no orthogonal direction: contraction cannot be asked for."]
        found = [_median([d.contraction for d in part]) for part in (own, inside, plain)]
        slower = _median([d.rate for d in own])
        lines = [
            f"A small disturbance orthogonal to the tail subspace is {_times(found[0])} its size a period later "
            f"(inside the subspace {_times(found[1])}, in ordinary text {_times(found[2])}), and {_times(slower)} with "
            "each further one."
        ]
        if self.provenance.dtype != "float32":
            lines.append(f"So small a disturbance is near the rounding of {self.provenance.dtype}: use float32 for it.")
        if found[0] is not None and found[0] >= 1:
            lines.append("It grows: no contraction was found, against appendix A.3.")
        elif found[2] is not None and found[0] is not None and found[0] > 0.5 * found[2]:
            lines.append("Ordinary text forgets disturbances about as fast: the decay is not a mark of the loop.")
        large, other = _of_size(self.decays, LARGE), _of_size(self.healthy_decays, LARGE)
        if large and other:
            lines.append(
                f"With one as large as the hidden state, {_share(fmean(d.kept for d in large))} of the directions "
                f"leave all later choices of tokens as they were, in ordinary text "
                f"{_share(fmean(d.kept for d in other))}."
            )
        return lines


@measurement(
    group="Loops",
    command="rotary",
    figure="sinkscope.figures.attention:draw_rotary",
    loading="whole",
    quick={"max_new_tokens": 160, "layers": [0]},
)
def rotary_invariance(
    setup: Setup,
    prompt: Annotated[str | Sequence[int] | None, Option("--prompt-file", metavar="FILE|-", reads="text")] = None,
    *,
    ids: Annotated[Sequence[int] | None, Option(hidden=True)] = None,
    max_new_tokens: Positive = 512,
    layers: Annotated[Sequence[int] | None, Option(min=0)] = None,
) -> RotaryInvariance:
    """Measure how closely queries, keys and scores repeat under rotary positions while the model loops.

    The paper uses this to explain why a loop persists (Xu et al. 2026, section 3.3 and appendix A). If the text does
    not loop, `period` is None. A model without rotary positions, or one whose queries and keys are not accessible,
    raises an `UnsupportedError`.

    Args:
        prompt: Text to continue greedily until it loops; from Python also ids. By default the beginning of the typical
            text.
        ids: A complete sequence that ends in a loop, instead of generating one.
        max_new_tokens: Tokens to generate.
        layers: Measure this layer. By default all layers.

    Example:
        sinkscope rotary --model qwen3-1.7b --layer 3
    """
    if prompt is not None and ids is not None:
        raise SinkscopeError("a prompt and ids are given: expected one of them")
    target = setup.target
    if target.adapter.absolute_positions:
        raise UnsupportedError(
            f"{target.name} ({target.config.model_type}) has learned absolute positions and no rotation: rotary needs "
            "a model with rotary positions (barcode and locking work on this one, also with backend='hf')"
        )
    refuse_opaque(target)
    wanted = setup.target.chosen_layers(layers)
    setup.progress("loop", 0, 4)
    given = None if ids is None else loop_of(read_row(setup.target, ids), 0)
    loop = given or generated(setup, prompt_ids(setup, prompt), max_new_tokens)
    period, count = loop.period, len(loop.ids)
    if period is None:
        return RotaryInvariance(tokens=count, prompt_tokens=loop.prompt)
    tail = period * max(1, min(-(-TAIL // period), (loop.length - period) // (2 * period)))
    shifts = [period] if period == 1 else [period, period + 1]
    steps = sorted({1, period})
    setup.progress("loop", 1, 4)
    own = tails(target, loop.ids, wanted, tail, shifts, steps)
    setup.progress("loop", 2, 4)
    control = healthy_ids(setup, count)
    plain = [None] * len(own) if control is None else tails(target, control, wanted, tail, [period], steps)
    setup.progress("loop", 3, 4)
    periods = min(PERIODS, (loop.length // period - 1) // 2)
    decays = _decays(setup, loop.ids, wanted, period, periods)
    healthy = () if control is None else _decays(setup, control, wanted, period, periods)
    positions = positions_of(count)
    setup.progress("loop", 4, 4)
    return RotaryInvariance(
        tokens=count,
        prompt_tokens=loop.prompt,
        period=period,
        onset=loop.onset,
        repeated=target.tokenizer.decode(loop.ids[-period:].tolist()),
        tail=tail,
        rotary_scale=own[0].scale,
        heads=tuple(h for part, other in zip(own, plain, strict=True) for h in heads_of(part, other, period)),
        positions=positions,
        drift=tuple(curves_of(part, other, period, positions) for part, other in zip(own, plain, strict=True)),
        decays=decays,
        healthy_decays=healthy,
    )


def _decays(setup: Setup, ids: torch.Tensor, layers: list[int], period: int, periods: int) -> tuple[Decay, ...]:
    bench = Disturbed(setup.target, ids, period, periods, seed=setup.seed)
    found = [
        bench.decay(layer, size=size, within=within)
        for layer in layers
        for size, within in ((SMALL, False), (SMALL, True), (LARGE, False))
    ]
    return tuple(d for d in found if d is not None)


def _of_size(decays: tuple[Decay, ...], size: float = SMALL, *, within: bool = False) -> list[Decay]:
    return [d for d in decays if d.size == size and d.within == within]


def _median(values: Sequence[float | None]) -> float | None:
    known = sorted(v for v in values if v is not None)
    return known[len(known) // 2] if known else None


def _of(heads: tuple[RotaryHead, ...], name: str) -> str:
    """A field over the spread of the scores, median over the heads."""
    found = [None if getattr(h, name) is None or not h.spread else getattr(h, name) / h.spread for h in heads]
    return _share(_median(found))


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} times"
