"""Scores one period apart on a real loop, the bound of Lemma 1, and what a disturbed cache becomes (App. A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import einsum
from jaxtyping import Complex, Float
from torch import Tensor

from experiments.papers.loopguard.runs import COUNT, NEW, Source, loops
from sinkscope.engine.attention import Attention
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import trace
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement
from sinkscope.models.draws import draws
from sinkscope.models.layers import per_query_head
from sinkscope.models.text import text_rows

TAIL, NOISE, DRAWS, STEPS = 32, 0.01, 4, 96
SITES = ["blocks.*.attn.hook_q", "blocks.*.attn.hook_k"]


@dataclass(frozen=True, kw_only=True)
class Shift(Row, table="shifts", title="queries and keys that are shifted alike", note="Medians over heads."):
    """How far scores and the tail operator are from those of queries and keys a shift earlier."""

    key: str
    change: Mean = column("scores differ", "fine_share", "Mean difference of scores, over the spread of the scores.")
    bound: Mean = column("bound (Eq. 15)", "times", "Mean of Lemma 1's bound on it, over the spread.")
    tail: Mean = column("tail operator", "fine_share", "How far the tail operator of Eq. 4 moves, over its length.")


@dataclass(frozen=True, kw_only=True)
class Left(Row, table="noise", title="noise of 1 % in the cache's last 32 tokens"):
    """What is left of noise in the keys and values of the tokens that follow."""

    key: str
    first: Mean = column("first tokens", "fine_share", "Relative change of keys and values, over the noise: 16 tokens.")
    last: Mean = column("last tokens", "fine_share", f"The same of the last 16 of {STEPS} tokens.")


@dataclass(frozen=True, kw_only=True)
class Lemma(Result):
    """How scores and the tail operator repeat in a real loop, and what becomes of noise in its cache.

    Attributes:
        period: Period of the loop.
        printed_sign: Error of Eq. 13 as printed against the model's own scores, over their spread; median over heads.
        other_sign: The same of Eq. 13 with R(w (i - t)).
    """

    shifts: tuple[Shift, ...]
    noise: tuple[Left, ...]
    period: int
    printed_sign: float
    other_sign: float

    def conclusion(self) -> str:
        """Return how far scores are one period apart beside the contrasts, what noise leaves, and Eq. 13's sign."""
        own, other, ordinary = self.shifts
        loop, text = self.noise
        is_faster = loop.last.value < text.last.value and loop.text("last") != text.text("last")
        forgets = "forgets noise faster" if is_faster else "does not forget noise faster"
        return (
            f"Scores one period ({self.period} tokens) apart differ by {own.text('change')} of their spread, a token "
            f"further apart, a control, by {other.text('change')}, and in ordinary text by {ordinary.text('change')}; "
            f"the loop {forgets} than ordinary text ({loop.text('last')} and {text.text('last')} are left). Eq. 13 as "
            f"printed misses the model's scores by {self.printed_sign:.0%} of their spread, with R(w (i - t)) by "
            f"{self.other_sign:.0%}."
        )


@dataclass
class Layer:
    """A layer that read a text.

    Attributes:
        query: Queries before rotary and behind their norm, as complex blocks: dimensions j and j + d / 2 are block j.
        key: The same of keys, one for each query head.
        scores: Scores of the model, unscaled.
        sums: The tail operator of each position (Eq. 4).
        turn: The frequency of each block, read from the queries at position 1.
    """

    query: Complex[Tensor, "head pos block"]
    key: Complex[Tensor, "head pos block"]
    scores: Float[Tensor, "head query key"]
    sums: Float[Tensor, "head pos d"]
    turn: Float[Tensor, " block"]

    def error(self, sign: int) -> Float[Tensor, " head"]:
        """Return how far Eq. 13 is from the model's scores: with R(w (t - i)) as printed (1), or R(w (i - t)) (-1)."""
        at = torch.arange(self.query.shape[1])[:, None] * self.turn.double()
        turned = torch.polar(torch.ones_like(at), -sign * at).to(self.query.dtype)
        query = (self.query * turned)[:, -TAIL:].conj()
        made = einsum(query, self.key * turned, "h t b, h i b -> h t i").real
        own = self.scores[:, -TAIL:]
        return (made - own).abs().mean((1, 2)) / own.std((1, 2), correction=0)

    def shifted(self, shift: int) -> Float[Tensor, "number head"]:
        """Return difference and bound of the scores of the last queries with the keys near each, and the tail's."""
        end = self.query.shape[1]
        rows = torch.arange(end - TAIL, end)[:, None]
        keys = rows - torch.arange(TAIL)
        now = self.scores[:, rows, keys]
        spread = now.std((1, 2), correction=0)
        change = (now - self.scores[:, rows - shift, keys - shift]).abs().mean((1, 2)) / spread
        moved: list[Tensor] = []
        sizes: list[Tensor] = []
        for vectors, at in ((self.query, rows), (self.key, keys)):
            moved.append((vectors[:, at] - vectors[:, at - shift]).norm(dim=-1).amax((1, 2)))
            sizes.append(vectors[:, at - shift].abs().sum(-1).mean((1, 2)))
        bound = sizes[1] * moved[0] + sizes[0] * moved[1] + moved[0] * moved[1] * self.query.shape[2]
        tail = self.sums[:, -TAIL:]
        drift = (tail - self.sums[:, end - TAIL - shift : end - shift]).norm(dim=-1)
        drift /= tail.norm(dim=-1).clamp(min=1e-9)  # zero where a head gives its tail nothing
        return torch.stack([change, bound / spread, drift.median(1).values])


def layers_of(setup: Setup, ids: Sequence[int]) -> list[Layer]:
    """Return every layer of a text that the model reads at once."""
    row = torch.tensor([[*ids]])
    before = trace(setup.target, row, SITES)
    layers: list[Layer] = []

    def see(call: Attention) -> None:
        heads = call.query.shape[1]
        plain: list[Tensor] = []
        for name in ("q", "k"):
            vectors = before[f"blocks.{call.layer}.attn.hook_{name}"]
            normed = getattr(call.module, f"{name}_norm", lambda same: same)(vectors).transpose(1, 2)
            plain.append(torch.complex(*per_query_head(normed, heads)[0].expand(heads, -1, -1).float().chunk(2, -1)))
        after = torch.complex(*call.query[0, :, 1].float().chunk(2, -1))
        key, value = (per_query_head(part, heads)[0].expand(heads, -1, -1).float() for part in (call.key, call.value))
        scores = call.query[0].float() @ key.mT
        weights = (scores * call.scaling).masked_fill(torch.ones_like(scores).triu(1) > 0, -torch.inf).softmax(-1)
        turn = (after * plain[0][:, 1].conj()).sum(0).angle()
        layers.append(Layer(plain[0], plain[1], scores, weights.triu(1 - TAIL) @ value, turn))

    with tapped(setup.target, Listener(see)):
        setup.target.forward(row)
    return layers


@torch.no_grad()
def noise_left(setup: Setup, ids: Sequence[int], told: Sequence[int], what: str) -> Left:
    """Return how far the keys and values of tokens behind a text are from those without noise, over the noise.

    Args:
        setup: The model.
        ids: The text, whose last 32 tokens in the cache get the noise.
        told: The tokens that follow.
        what: What the text is.
    """
    model, generator = setup.target.hf, draws(setup.seed, f"noise {what}")
    cache = model(input_ids=torch.tensor([[*ids]] * (1 + DRAWS)), use_cache=True).past_key_values
    for layer in cache.layers:
        for entries in (layer.keys, layer.values):
            near = entries[1:, :, -TAIL:]
            near *= 1 + NOISE * torch.randn(near.shape, generator=generator)
    rows = torch.tensor([[*told]] * (1 + DRAWS))
    at = torch.arange(len(ids), len(ids) + len(told)).expand_as(rows)
    model(input_ids=rows, past_key_values=cache, position_ids=at, use_cache=True)
    moved: list[Tensor] = []
    for layer in cache.layers[1:]:  # those of the first layer depend on the tokens alone
        for entries in (layer.keys, layer.values):
            new = entries[:, :, -len(told) :]
            moved.append(((new[1:] - new[:1]).norm(dim=-1) / new[:1].norm(dim=-1)).mean((0, 1)) / NOISE)
    left = torch.stack(moved).mean(0)
    return Left(key=what, first=Mean(float(left[:16].mean())), last=Mean(float(left[-16:].mean())))


@measurement(loading="whole")
def lemma(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> Lemma:
    """Read the first output that ends in a loop, and compare queries, keys and scores that are a period apart.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    source = Source(setup, count, new, runs)
    for record in source.outputs(["whole"])["whole"]:
        ids = [*source.opening(record), *record.tokens]
        loop = end_loop(ids)
        if loops(record) and loop is not None and len(ids) - loop.start > 2 * (TAIL + loop.period):
            break
    else:
        raise SinkscopeError(f"none of {count} outputs of {new} tokens ends in a loop: give more --new or --count")
    period, size = loop.period, len(ids)
    text = text_rows(setup.tokenizer, setup.text, 1, size + STEPS, setup.bos)[0].tolist()
    own, plain = layers_of(setup, ids), layers_of(setup, text[:size])
    rows: list[Shift] = []
    places = (("one period apart", own, period), ("a token further", own, period + 1), ("ordinary text", plain, period))
    for name, layers, shift in places:
        middle = torch.cat([layer.shifted(shift) for layer in layers], 1).median(1).values
        change, bound, tail = map(Mean, middle.tolist())
        rows.append(Shift(key=name, change=change, bound=bound, tail=tail))
    further = (ids[-period:] * STEPS)[:STEPS]
    noise = [noise_left(setup, ids, further, "in the loop")]
    noise.append(noise_left(setup, text[:size], text[size:], "ordinary text"))
    signs = [float(torch.cat([layer.error(sign) for layer in plain]).median()) for sign in (1, -1)]
    signed = dict(zip(("printed_sign", "other_sign"), signs, strict=True))
    return Lemma(shifts=tuple(rows), noise=tuple(noise), period=period, **signed)
