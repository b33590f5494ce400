"""Scores one period apart on a real loop, the bound of Lemma 1, and what a disturbed cache becomes (App. A)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import einsum
from jaxtyping import Complex, Float
from plotly.subplots import make_subplots
from torch import Tensor

from experiments.papers.loopguard.caches import WHOLE
from experiments.papers.loopguard.runs import COUNT, NEW, Source
from sinkscope.engine.attention import Attention
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import SinkscopeError
from sinkscope.hooks.trace import trace
from sinkscope.loops.text.signals import end_loop
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement
from sinkscope.models.draws import draws
from sinkscope.models.inputs import attending_layers
from sinkscope.models.layers import per_query_head
from sinkscope.models.text import text_rows
from sinkscope.results.style import COLOURS, figure_of

TAIL, NOISE, DRAWS, STEPS = 32, 0.01, 4, 96
APART = ("one period apart", "a token further apart", "ordinary text, one period apart")
AFTER = ("in the loop", "after a cut", "ordinary text")


@dataclass(frozen=True)
class Place:
    """Which scores are compared."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, kw_only=True)
class Shift(
    Row,
    table="shifts",
    title="scores of queries and keys that are shifted alike",
    note="Medians over heads. spread: standard deviation of the scores of the same queries and keys.",
):
    """How far the scores are from those of the same queries and keys a shift earlier."""

    key: Place
    change: Mean = column("difference", "share", "Mean difference of scores, over their spread.")
    bound: Mean = column("bound of Lemma 1", "share", "Mean bound of Eq. 15 on that difference, over the spread.")
    broken: Mean = column("above the bound", "share", "Scores that differ by more than the bound; largest head.")
    tail: Mean = column("tail operator", "share", "How far the tail operator of Eq. 4 moves, over its length.")

    @property
    def is_control(self) -> bool:
        """Whether it is no repetition."""
        return self.key.name != APART[0]


@dataclass(frozen=True, kw_only=True)
class Lemma(Result):
    """How scores and the tail operator repeat in a real loop, and what becomes of noise in its cache.

    Attributes:
        period: Period of the loop.
        printed_sign: Error of Eq. 13 as printed against the model's own scores, over their spread; median over heads.
        other_sign: The same of Eq. 13 with R(w (i - t)).
        change: Differences of scores over their spread, by shift and head.
        noise: Distance of keys and values of each new token to those without noise, over the noise.
    """

    shifts: tuple[Shift, ...]
    period: int
    printed_sign: float
    other_sign: float
    change: Float[np.ndarray, "shift head"]
    noise: dict[str, tuple[float, ...]]

    def conclusion(self) -> str:
        """Return how far scores are one period apart beside the contrasts, and which sign Eq. 13 has."""
        own, other, ordinary = self.shifts
        last = {name: np.mean(line[-self.period :]) for name, line in self.noise.items()}
        return (
            f"Scores one period ({self.period} tokens) apart differ by {own.text('change')} of their spread (bound: "
            f"{own.text('bound')}), as controls {other.text('change')} a token further apart and "
            f"{ordinary.text('change')} in ordinary text; of noise in the cache {last[AFTER[0]]:.2f} is left in the "
            f"loop and {last[AFTER[2]]:.2f} in ordinary text. Eq. 13 as printed misses the model's scores by "
            f"{self.printed_sign:.0%} of their spread, with R(w (i - t)) by {self.other_sign:.0%}."
        )

    def figure(self) -> Any:
        """Draw the differences of every head, and what noise in the cache leaves."""
        titles = ["scores a shift apart, over their spread, by head", "noise that is left, over the noise"]
        fig: Any = make_subplots(1, 2, subplot_titles=titles, horizontal_spacing=0.09)
        for number, (name, heads) in enumerate(zip(APART, self.change, strict=True)):
            style: dict[str, Any] = {"mode": "markers", "marker": {"color": COLOURS[number], "size": 5}, "name": name}
            fig.add_scatter(y=np.maximum(heads, 1e-6), **style, row=1, col=1)
        for number, (name, line) in enumerate(self.noise.items(), len(APART)):
            style = {"mode": "lines", "line": {"color": COLOURS[number]}, "name": f"noise {name}"}
            fig.add_scatter(y=line, **style, row=1, col=2)
        fig.update_yaxes(type="log", dtick=1, exponentformat="power").update_xaxes(title_text="head", row=1, col=1)
        fig.update_xaxes(title_text="new tokens", row=1, col=2)
        return figure_of(fig, self, width=1200, height=580, legend=-0.16)


@dataclass
class Layer:
    """Queries and keys of a layer before rotary and behind their norms as complex blocks, and after it as they are.

    Attributes:
        query: Before rotary, `[head pos block]`.
        key: The same, one for each query head.
        scores: Scores of the model, unscaled.
        sums: The tail operator of each position (Eq. 4).
        turn: The frequency of each block, read from the queries at position 1.
    """

    query: Complex[Tensor, "head pos block"]
    key: Complex[Tensor, "head pos block"]
    scores: Float[Tensor, "head query key"]
    sums: Float[Tensor, "head pos d"]
    turn: Float[Tensor, " block"]

    def by_eq13(self, sign: int) -> Float[Tensor, "head query key"]:
        """Return the scores of Eq. 13: with R(w (t - i)) as printed (1), or with R(w (i - t)) (-1)."""
        at = torch.arange(self.query.shape[1]).double()[:, None] * self.turn.double()
        turned = torch.polar(torch.ones_like(at), -sign * at).to(self.query.dtype)
        return einsum((self.query * turned).conj(), self.key * turned, "h t b, h i b -> h t i").real

    def error(self, sign: int) -> Float[Tensor, " head"]:
        """Return the mean difference of Eq. 13 to the model's scores, over their spread, for the last queries."""
        last = slice(-TAIL, None)
        own = self.scores[:, last]
        return (self.by_eq13(sign)[:, last] - own).abs().mean((1, 2)) / own.std((1, 2), correction=0)

    def shifted(self, shift: int, tail: int) -> Float[Tensor, "number head"]:
        """Return difference, bound and share above the bound, for the last `tail` queries and the keys near each."""
        end = self.query.shape[1]
        rows = torch.arange(end - tail, end)[:, None]
        keys = rows - torch.arange(tail)
        now, before = self.scores[:, rows, keys], self.scores[:, rows - shift, keys - shift]
        gap = (now - before).abs()
        query, key = self.query, self.key
        moved_q = (query[:, rows[:, 0]] - query[:, rows[:, 0] - shift]).norm(dim=-1).amax(1)[:, None]
        near = torch.arange(end - 2 * tail + 1, end)
        moved_k = (key[:, near] - key[:, near - shift]).norm(dim=-1).amax(1)[:, None]
        key_sizes = key.abs().sum(-1)[:, keys - shift]
        query_sizes = query.abs().sum(-1)[:, rows - shift]
        both = (moved_q * moved_k * query.shape[-1])[..., None]
        bound = key_sizes * moved_q[..., None] + query_sizes * moved_k[..., None] + both
        spread = now.std((1, 2), correction=0)
        broken = (gap > bound * 1.001 + 1e-3 * spread[:, None, None]).float().mean((1, 2))
        return torch.stack([gap.mean((1, 2)) / spread, bound.mean((1, 2)) / spread, broken])

    def drift(self, shift: int, tail: int) -> Float[Tensor, " head"]:
        """Return how far the tail operator moves in a shift, over its length, median over the tail."""
        end = self.sums.shape[1]
        now, before = self.sums[:, end - tail :], self.sums[:, end - tail - shift : end - shift]
        return ((now - before).norm(dim=-1) / now.norm(dim=-1)).median(1).values


def complex_blocks(vectors: Float[Tensor, "head pos d"]) -> Complex[Tensor, "head pos block"]:
    """Return halves of vectors as the parts of complex numbers: block j has dimensions j and j + d / 2."""
    return torch.complex(*vectors.float().chunk(2, dim=-1))


def layers_of(setup: Setup, ids: Sequence[int], tail: int) -> list[Layer]:
    """Return every layer of a text that the model reads at once."""
    target, row = setup.target, torch.tensor([[*ids]])
    chosen = attending_layers(target, None)
    before = trace(target, row, ["blocks.*.attn.hook_q", "blocks.*.attn.hook_k"])
    layers: list[Layer] = []

    def see(call: Attention) -> None:
        if call.layer not in chosen:
            return
        heads = call.query.shape[1]
        plain: list[Tensor] = []
        for name, norm in (("q", "q_norm"), ("k", "k_norm")):
            vectors = before[f"blocks.{call.layer}.attn.hook_{name}"]
            vectors = getattr(call.module, norm, lambda same: same)(vectors)
            plain.append(per_query_head(vectors.transpose(1, 2), heads)[0].expand(heads, -1, -1))
        query, key = map(complex_blocks, plain)
        after = complex_blocks(call.query[0])
        turn = (after[:, 1] * query[:, 1].conj()).sum(0).angle()
        keys = per_query_head(call.key, heads)[0].float().expand(heads, -1, -1)
        value = per_query_head(call.value, heads)[0].float().expand(heads, -1, -1)
        scores = call.query[0].float() @ keys.mT
        position = torch.arange(len(ids))
        far = (position > position[:, None]) | (position <= position[:, None] - tail)
        weights = (scores * call.scaling).masked_fill(position > position[:, None], -torch.inf).softmax(-1)
        layers.append(Layer(query, key, scores, weights.masked_fill(far, 0.0) @ value, turn))

    with tapped(target, Listener(see)):
        target.forward(row)
    return layers


@torch.no_grad()
def noise_left(setup: Setup, ids: Sequence[int], kept: int, told: Sequence[int], what: str) -> tuple[float, ...]:
    """Return how far the keys and values of tokens behind a text are from those without noise, over the noise.

    Args:
        setup: The model.
        ids: The text, the last 32 tokens of whose cache get the noise.
        kept: Number of first positions that stay in the cache.
        told: The tokens that follow.
        what: What the text is, for the draw.
    """
    model, generator = setup.target.hf, draws(setup.seed, f"noise {what}")
    cache = model(input_ids=torch.tensor([[*ids]] * (1 + DRAWS)), use_cache=True).past_key_values
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, :kept], layer.values[:, :, :kept]
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
            moved.append(((new[1:] - new[:1]).norm(dim=-1) / new[:1].norm(dim=-1)).mean((0, 1)))
    return tuple(round(float(value), 4) for value in torch.stack(moved).mean(0) / NOISE)


@measurement(loading="whole")
def lemma(setup: Setup, *, count: Natural = COUNT, new: Natural = NEW, runs: Path | None = None) -> Lemma:
    """Read the first output that ends in a loop, and compare queries, keys and scores that are a period apart.

    Args:
        count: Number of openings, a multiple of four.
        new: New tokens.
        runs: Folder in which outputs stay for this paper's other artefacts.
    """
    source = Source(setup, count, new, runs)
    for record in source.outputs([WHOLE])[WHOLE]:
        ids = [*source.ids_of(record), *record.tokens]
        loop = end_loop(ids)
        if loop is not None and record.ended == "cap" and len(ids) - loop.start >= 2 * TAIL + 2 * loop.period + 2:
            break
    else:
        raise SinkscopeError(f"none of {count} outputs of {new} tokens ends in a loop: give more --new or --count")
    period, length = loop.period, len(ids)
    text = text_rows(setup.tokenizer, setup.text, 1, length + STEPS, setup.bos)[0].tolist()
    own, plain = layers_of(setup, ids, TAIL), layers_of(setup, text[:length], TAIL)
    rows: list[Shift] = []
    change: list[list[float]] = []
    for name, layers, shift in zip(APART, (own, own, plain), (period, period + 1, period), strict=True):
        numbers = torch.cat([layer.shifted(shift, TAIL) for layer in layers], 1)
        tail = torch.cat([layer.drift(shift, TAIL) for layer in layers])
        middle = numbers.median(1).values
        means = {"change": Mean(float(middle[0])), "bound": Mean(float(middle[1]))}
        means |= {"broken": Mean(float(numbers[2].max())), "tail": Mean(float(tail.median()))}
        rows.append(Shift(key=Place(name), **means))
        change.append([round(value, 6) for value in numbers[0].tolist()])
    further = (ids[-period:] * STEPS)[:STEPS]
    noise: dict[str, tuple[float, ...]] = {}
    for what, read, kept, told in zip(
        AFTER, (ids, ids, text[:length]), (length, loop.start, length), (further, further, text[length:]), strict=True
    ):
        noise[what] = noise_left(setup, read, kept, told, what)
    errors = [float(torch.cat([layer.error(sign) for layer in plain]).median()) for sign in (1, -1)]
    return Lemma(
        shifts=tuple(rows),
        period=period,
        printed_sign=errors[0],
        other_sign=errors[1],
        change=np.array(change),
        noise=noise,
    )
