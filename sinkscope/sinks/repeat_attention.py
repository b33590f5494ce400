"""Attention to sinks: a repeated token against natural text, head-averaged per layer (Yona et al. 2025, Fig. 1, 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.models.target import Target
from sinkscope.results import Result
from sinkscope.sinks._repetitions import check, choose, repetitions
from sinkscope.sinks._setup import Progress, setup
from sinkscope.sinks._walk import SINK_RATIO, walk
from sinkscope.sinks.repeat import norms_at
from sinkscope.text import text_rows
from sinkscope.trace.attention import attention_rows

EPS = 0.3  # Gu et al. 2024
BINS = 32  # of a picture, beside the first position and the tail, which have bins of their own
TAIL = 32  # tokens of natural text behind the repetitions, the same at the same positions in every sequence
_ROWS = 128  # queries at a time: batch x head x _ROWS x key is the most that is in memory


@dataclass(frozen=True)
class Picture:
    """Attention of one layer, mean over heads: a row per bin of queries, a column per bin of keys.

    A cell is the share of attention that the queries of its row give to all keys of its column; without learned sink
    logits a row sums to one.
    """

    layer: int
    cells: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Attended:
    """One sequence. Lists have an entry per layer; means are over queries and heads.

    Attributes:
        label: "natural text", or the repeated token.
        repeats: first repetition whose norm reaches half of the first token's; None: never, or natural text.
        high: number of high-norm positions: the first, and those whose norm at the sink layer is more than three times
            the typical one; None without a sink layer.
        uniform: what `mass` would be if every query gave every key it sees the same.
        first: mean attention to position 0.
        mass: mean attention to all high-norm positions together.
        first_rate: share of heads whose mean attention to position 0 exceeds 0.3 (sink rate, Gu et al. 2024).
        mass_rate: share of heads whose mean attention to all high-norm positions together does.
        tail_uniform: as `uniform`, for the queries of the last 32 tokens, which are the same in every sequence.
        tail_first: as `first`, for these queries.
        tail_mass: as `mass`, for these queries.
        tail_ratio: what these queries give a high-norm position before them, over what they give one there whose norm
            is within 95 % of typical text, each on average; NaN where there is none.
        pictures: of the layers that are shown.
    """

    label: str
    repeats: int | None
    high: int | None
    uniform: float | None
    first: tuple[float, ...]
    mass: tuple[float, ...] | None
    first_rate: tuple[float, ...]
    mass_rate: tuple[float, ...] | None
    tail_uniform: float | None
    tail_first: tuple[float, ...]
    tail_mass: tuple[float, ...] | None
    tail_ratio: tuple[float, ...] | None
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, kw_only=True)
class RepeatAttention(Result):
    """Where attention goes in repeated and in natural sequences of one length.

    Repetition shares the sink out, so attention to position 0 alone falls while nothing has changed for the heads:
    both numbers are given.

    Attributes:
        sink_layer: whose norms say which positions are high; None: the model has no sink.
        length: tokens of every sequence.
        max_repeats: repetitions of the repeated ones.
        edges: first position of every bin of the pictures, and the length.
        replaced: (word of the paper that is not one token here, word that took its place).
        sequences: natural text, then one per repeated token.
    """

    kind: ClassVar[str] = "repeat-attention"
    percent: ClassVar[tuple[str, ...]] = (
        "to_first", "to_high_norm", "tail_to_first", "tail_to_high_norm", "sink_rate", "high_norm_rate",
    )  # fmt: skip

    sink_layer: int | None
    length: int
    max_repeats: int
    edges: tuple[int, ...]
    replaced: tuple[tuple[str, str], ...]
    sequences: tuple[Attended, ...]

    def rows(self) -> list[dict[str, Any]]:
        """One row per layer and sequence."""
        return [
            {
                "layer": layer, "sequence": s.label,
                "to_first": s.first[layer], "to_high_norm": None if s.mass is None else s.mass[layer],
                "tail_to_first": s.tail_first[layer],
                "tail_to_high_norm": None if s.tail_mass is None else s.tail_mass[layer],
                "tail_ratio": None if s.tail_ratio is None else s.tail_ratio[layer],
                "sink_rate": s.first_rate[layer], "high_norm_rate": None if s.mass_rate is None else s.mass_rate[layer],
            }
            for layer in range(self.model.n_layers)
            for s in self.sequences
        ]  # fmt: skip

    def summary(self) -> str:
        """What was found, in a few lines."""
        lines = [f"{self.model.name}: attention in sequences of {self.length} tokens, means over queries and heads."]
        if self.sink_layer is None:
            lines.append("No attention sink: no MLP lifts the first token's norm, so no position is a high-norm one.")
        first_shown = 0 if self.sink_layer is None else min(self.sink_layer + 1, self.model.n_layers - 1)
        layers = range(first_shown, self.model.n_layers)
        lines.append(
            f"Layers {layers[0]} to {layers[-1]}; of all / of the last {TAIL} tokens, the same in every sequence:"
        )
        for s in self.sequences:
            first = f"{_mean(s.first, layers):.1%} / {_mean(s.tail_first, layers):.1%}"
            line = f"{s.label}: {first} to position 0, sink rate {_mean(s.first_rate, layers):.1%}"
            if s.mass is not None and s.mass_rate is not None and s.tail_mass is not None:
                line += (
                    f"; {_mean(s.mass, layers):.1%} / {_mean(s.tail_mass, layers):.1%} to all {s.high} high-norm "
                    f"positions (were it uniform: {s.uniform:.1%} / {s.tail_uniform:.1%}), "
                    f"sink rate {_mean(s.mass_rate, layers):.1%}"
                )
            if s.tail_ratio is not None:
                line += f"; {_mean(s.tail_ratio, layers):.3g} times as much to each as to one of ordinary norm"
            lines.append(line + ".")
        if self.replaced:
            pairs = ", ".join(f"{wanted!r} by {used!r}" for wanted, used in self.replaced)
            lines.append(f"Not one token here, so replaced: {pairs}.")
        return "\n".join(lines)


def repeat_attention(
    model: object = None,
    *,
    tokenizer: Any = None,
    bos: bool | None = None,
    text: str | Path | None = None,
    tokens: Sequence[str] | None = None,
    prefix: str | None = None,
    max_repeats: int | None = None,
    layers: Sequence[int] | None = None,
    batch_size: int = 4,
    texts: int = 4,
    seed: int = 0,
    revision: str | None = None,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    trust_remote_code: bool = False,
    progress: Progress | None = None,
) -> RepeatAttention:
    """Head-averaged attention of a repeated token and of natural text of the same length, streamed in query chunks.

    Args:
        model: as for `find_sinks`.
        tokenizer: for live models that carry none.
        bos: as for `repeat_norms`.
        text: file of typical text; None: the neutral text that ships.
        tokens: strings to repeat, one token each; None: "the", as in Fig. 1.
        prefix: text between BOS and the repetitions; it may not contain what is repeated.
        max_repeats: number of repetitions; None: 1,024, or what the context holds.
        layers: of the pictures; None: the two after the sink layer, one past the middle, the last (of 32 layers with
            the sink in layer 1 those are the paper's 2, 3, 17 and 31). Numbers are of all layers.
        batch_size: sequences in a pass.
        texts: pieces of 64 tokens of typical text, for the search of the sink layer.
        seed: of random draws.
        revision: of a hub id.
        dtype: of the weights of a model given by name.
        device: for models given by name.
        trust_remote_code: run code that comes with the checkpoint.
        progress: called as `progress(what, done, total)`.

    In a model without a sink only attention to position 0 is given: `sink_layer` is None.

    Raises:
        SinkscopeError: bad input; the message is one line and says what to do.
    """
    check(max_repeats, batch_size, texts, seed)
    made = setup(
        model, tokenizer=tokenizer, bos=bos, text=text, texts=texts, seed=seed, revision=revision, dtype=dtype,
        device=device, trust_remote_code=trust_remote_code,
    )  # fmt: skip
    target = made.target
    if wrong := [n for n in layers or () if not 0 <= n < target.n_layers]:
        raise SinkscopeError(f"--layer {wrong[0]}: the model has layers 0 to {target.n_layers - 1}; give one of those")
    words, replaced = choose(made, tokens, prefix, ("the",))
    asked = repetitions(made, [(w,) for w in words], prefix, max_repeats, after=TAIL)
    length = asked.ids.shape[1] + TAIL
    natural = text_rows(target.tokenizer, made.text, 1, length, made.bos)
    ids = torch.cat([natural, torch.cat([asked.ids, natural[:, -TAIL:].expand(len(words), -1)], 1)])

    seen = walk(target, made.ids, whole=target.resident, progress=progress)
    layer, norms, wanted = seen.sink_layer(), None, None
    keys = torch.zeros(len(ids), 1, length)
    keys[:, 0, 0] = 1  # position 0
    if layer is not None:
        norms = norms_at(target, layer, ids, batch_size, progress=progress, what="norms") / seen.first[layer]
        wanted, keys = _key_sets(norms, SINK_RATIO * seen.typical[layer][1] / seen.first[layer],
                                 seen.typical[layer][2] / seen.first[layer])  # fmt: skip
    tail = torch.arange(length) >= length - TAIL
    if wanted is not None:
        tail &= ~wanted.any(0)
    shown = _shown(layer, target.n_layers) if layers is None else sorted(set(layers))
    edges, parts = _edges(length), []
    for start in range(0, len(ids), batch_size):
        rows = slice(start, start + batch_size)
        parts.append(attention_sums(target, ids[rows], keys[rows], tail / tail.sum().clamp(min=1), shown, edges))
        if progress is not None:
            progress("attention", min(start + batch_size, len(ids)), len(ids))
    sums = join(parts)
    return RepeatAttention(
        model=made.info(),
        settings={
            "bos": made.bos is not None, "text": None if text is None else Path(text).name, "texts": len(made.ids),
            "tokens": None if tokens is None else list(tokens), "prefix": prefix, "max_repeats": asked.count,
            "layers": shown, "eps": EPS, "batch_size": batch_size, "seed": seed, "revision": revision,
        },
        provenance=made.provenance(),
        sink_layer=layer,
        length=length,
        max_repeats=asked.count,
        edges=edges,
        replaced=replaced,
        sequences=tuple(
            _attended(label, row, taken, high, shown, asked.start)
            for row, label in enumerate(("natural text", *asked.labels))
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class _Seen:
    """What was added up as it passed: means over queries per head, and cells of the pictures."""

    first: Float[Tensor, "row layer head"]
    mass: Float[Tensor, "row layer head"]
    tail_first: Float[Tensor, "row layer head"]
    tail_mass: Float[Tensor, "row layer head"]
    tail_per_high: Float[Tensor, "row layer head"]
    tail_per_ordinary: Float[Tensor, "row layer head"]
    cells: Float[Tensor, "row shown bin bin"]


@torch.no_grad()
def _watch(
    target: Target, ids: Int[Tensor, "row pos"], high: Bool[Tensor, "row pos"] | None,
    ordinary: Bool[Tensor, "row pos"] | None, shown: list[int], edges: tuple[int, ...],
) -> _Seen:  # fmt: skip
    """One pass; rows of attention are added up as they come by, in chunks of queries."""
    count, length = ids.shape
    first, mass, tail_first, tail_mass, tail_per_high, tail_per_ordinary = (
        torch.zeros(count, target.n_layers, target.n_heads) for _ in range(6)
    )
    cells = torch.zeros(count, len(shown), len(edges) - 1, len(edges) - 1)
    of_bin = torch.bucketize(torch.arange(length), torch.tensor(edges[1:]), right=True)
    member = torch.nn.functional.one_hot(of_bin, len(edges) - 1).float()  # position bin
    wanted = torch.zeros(count, length) if high is None else high.float()
    per_high, per_ordinary = _weights(high, count, length), _weights(ordinary, count, length)

    def add(layer: int, start: int, rows: Tensor) -> None:
        to_first = rows[..., 0].cpu()
        to_high = torch.einsum("bhqk,bk->bhq", rows, wanted.to(rows.device)).cpu()
        late = max(0, length - TAIL - start)
        first[:, layer] += to_first.sum(-1)
        mass[:, layer] += to_high.sum(-1)
        tail_first[:, layer] += to_first[..., late:].sum(-1)
        tail_mass[:, layer] += to_high[..., late:].sum(-1)
        by_tail = rows[:, :, late:].sum(2).cpu()  # batch head key
        tail_per_high[:, layer] += torch.einsum("bhk,bk->bh", by_tail, per_high)
        tail_per_ordinary[:, layer] += torch.einsum("bhk,bk->bh", by_tail, per_ordinary)
        if layer in shown:
            by_key = rows.mean(1) @ member.to(rows.device)
            cells[:, shown.index(layer)].index_add_(1, of_bin[start : start + rows.shape[2]], by_key.cpu())

    with attention_rows(target, add, rows_per_chunk=_ROWS):
        target.forward(ids)
    means = (
        first / length,
        mass / length,
        tail_first / TAIL,
        tail_mass / TAIL,
        tail_per_high / TAIL,
        tail_per_ordinary / TAIL,
    )
    return _Seen(*means, cells / member.sum(0)[:, None])


def _attended(
    label: str, row: int, taken: _Seen, high: Bool[Tensor, "row pos"] | None, shown: list[int], start: int
) -> Attended:
    mine = None if high is None else high[row]
    fair = None if mine is None else mine.cumsum(0) / torch.arange(1, len(mine) + 1)
    above = [] if mine is None or not row else mine[start:-TAIL].nonzero().flatten().tolist()

    def of_high(sums: Tensor) -> tuple[float, ...] | None:
        return None if mine is None else _tuple(sums)

    return Attended(
        label,
        above[0] + 1 if above else None,
        None if mine is None else int(mine.sum()),
        None if fair is None else float(fair.mean()),
        _tuple(taken.first[row].mean(-1)),
        of_high(taken.mass[row].mean(-1)),
        _tuple((taken.first[row] > EPS).float().mean(-1)),
        of_high((taken.mass[row] > EPS).float().mean(-1)),
        None if fair is None else float(fair[-TAIL:].mean()),
        _tuple(taken.tail_first[row].mean(-1)),
        of_high(taken.tail_mass[row].mean(-1)),
        of_high(taken.tail_per_high[row].mean(-1) / taken.tail_per_ordinary[row].mean(-1)),
        tuple(Picture(layer, tuple(map(_tuple, taken.cells[row, i]))) for i, layer in enumerate(shown)),
    )


def _weights(chosen: Bool[Tensor, "row pos"] | None, count: int, length: int) -> Float[Tensor, "row pos"]:
    """The mean over the chosen positions before the tail, as weights; NaN where there are none."""
    if chosen is None:
        return torch.zeros(count, length)
    before = (chosen & (torch.arange(length) < length - TAIL)).float()
    return before / before.sum(1, keepdim=True)


def _shown(sink_layer: int | None, n_layers: int) -> list[int]:
    after = -1 if sink_layer is None else sink_layer
    return sorted({min(n, n_layers - 1) for n in (after + 1, after + 2, n_layers // 2 + 1, n_layers - 1)})


def _edges(length: int) -> tuple[int, ...]:
    """Position 0 alone, then up to `BINS` bins of nearly one size, then the tail."""
    body = length - TAIL - 1
    bins = min(BINS, body)
    return (0, *(1 + body * i // bins for i in range(bins + 1)), length)


def _tuple(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{v:.5g}") for v in values.tolist())


def _mean(values: Sequence[float], layers: range) -> float:
    return sum(values[i] for i in layers) / len(layers)
