"""Attention to sinks: a repeated token against natural text, head-averaged per layer (Yona et al. 2025, Fig. 1, 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.results import Result, cell
from sinkscope.sinks.first_token.locate import Progress, setup
from sinkscope.sinks.first_token.walk import SINK_RATIO, walk
from sinkscope.sinks.repetition.attention_sums import Sums, attention_sums, join
from sinkscope.sinks.repetition.repeat import norms_at
from sinkscope.sinks.repetition.sequences import check, choose, repetitions
from sinkscope.text import text_rows

EPS = 0.3  # Gu et al. 2024
BINS = 32  # of a picture, beside the first position and the tail, which have bins of their own
TAIL = 64  # tokens of natural text behind the repetitions, the same at the same positions in every sequence


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
        tail: queries of the tail: those of the last 64 tokens, the same text in every sequence, whose norm is no higher
            than that of 95 % of typical text; behind repetitions some are sinks themselves, and those look elsewhere.
        tail_uniform: as `uniform`, for the queries of the tail.
        tail_first: as `first`, for the queries of the tail; None where the tail is empty.
        tail_mass: as `mass`, for the queries of the tail.
        tail_ratio: what the tail gives a high-norm position before the last 64, over what it gives one there whose norm
            is no higher than that of 95 % of typical text, each on average; None where there is none.
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
    tail: int
    tail_uniform: float | None
    tail_first: tuple[float, ...] | None
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
        "to_first",
        "to_high_norm",
        "tail_to_first",
        "tail_to_high_norm",
        "sink_rate",
        "high_norm_rate",
    )

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
                "layer": layer,
                "sequence": s.label,
                "to_first": s.first[layer],
                "to_high_norm": None if s.mass is None else s.mass[layer],
                "tail_to_first": None if s.tail_first is None else s.tail_first[layer],
                "tail_to_high_norm": None if s.tail_mass is None else s.tail_mass[layer],
                "tail_ratio": None if s.tail_ratio is None else s.tail_ratio[layer],
                "sink_rate": s.first_rate[layer],
                "high_norm_rate": None if s.mass_rate is None else s.mass_rate[layer],
            }
            for layer in range(self.model.n_layers)
            for s in self.sequences
        ]

    def summary(self) -> str:
        """What was found, in a few lines."""
        lines = [f"{self.model.name}: attention in sequences of {self.length} tokens, means over queries and heads."]
        if self.sink_layer is None:
            lines.append("No attention sink: no MLP lifts the first token's norm, so no position is a high-norm one.")
        first_shown = 0 if self.sink_layer is None else min(self.sink_layer + 1, self.model.n_layers - 1)
        layers = range(first_shown, self.model.n_layers)
        where = f"Layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"Layer {layers[0]}"
        lines.append(f"{where}; of all queries / of the tail, ordinary ones of the last {TAIL}:")
        for s in self.sequences:
            line = f"{s.label}: {_mean(s.first, layers)} / {_mean(s.tail_first, layers)} to position 0, sink rate "
            line += _mean(s.first_rate, layers)
            if s.mass is not None:
                line += (
                    f"; {_mean(s.mass, layers)} / {_mean(s.tail_mass, layers)} to all {s.high} high-norm positions "
                    f"(were it uniform: {cell(s.uniform, percent=True)} / {cell(s.tail_uniform, percent=True)}), "
                    f"sink rate {_mean(s.mass_rate, layers)}"
                )
            if s.tail_ratio is not None:
                ratio = sum(s.tail_ratio[i] for i in layers) / len(layers)
                line += f"; the tail gives each {ratio:.3g} times as much as one of ordinary norm"
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
        model,
        tokenizer=tokenizer,
        bos=bos,
        text=text,
        texts=texts,
        seed=seed,
        revision=revision,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    target = made.target
    if wrong := [n for n in layers or () if not 0 <= n < target.n_layers]:
        raise SinkscopeError(f"--layer {wrong[0]}: the model has layers 0 to {target.n_layers - 1}; give one of those")
    words, replaced = choose(made, tokens, prefix, ("the",))
    asked = repetitions(made, [(w,) for w in words], prefix, max_repeats, after=TAIL)
    length = asked.ids.shape[1] + TAIL
    natural = text_rows(target.tokenizer, made.text, 1, length, made.bos)
    ids = torch.cat([natural, torch.cat([asked.ids, natural[:, -TAIL:].expand(len(words), -1)], 1)])

    seen = walk(target, made.ids, whole=target.resident, progress=progress)
    layer, kinds = seen.sink_layer(), None
    if layer is not None:
        norms = norms_at(target, layer, ids, batch_size, progress=progress, what="norms")
        kinds = _Kinds.of(norms, seen.first[layer], seen.typical[layer])
    keys, tail = _weights(kinds, ids.shape)
    shown = _shown(layer, target.n_layers) if layers is None else sorted(set(layers))
    edges, parts = _edges(length), []
    for start in range(0, len(ids), batch_size):
        rows = slice(start, start + batch_size)
        parts.append(attention_sums(target, ids[rows], keys[rows], _mean_of(tail[rows]), shown, edges))
        if progress is not None:
            progress("attention", min(start + batch_size, len(ids)), len(ids))
    sums = join(parts)
    return RepeatAttention(
        model=made.info(),
        settings={
            "bos": made.bos is not None,
            "text": None if text is None else Path(text).name,
            "texts": len(made.ids),
            "tokens": None if tokens is None else list(tokens),
            "prefix": prefix,
            "max_repeats": asked.count,
            "layers": shown,
            "eps": EPS,
            "batch_size": batch_size,
            "seed": seed,
            "revision": revision,
        },
        provenance=made.provenance(),
        sink_layer=layer,
        length=length,
        max_repeats=asked.count,
        edges=edges,
        replaced=replaced,
        sequences=tuple(
            _attended(label, row, sums, kinds, tail[row], shown, asked.start)
            for row, label in enumerate(("natural text", *asked.labels))
        ),
    )


@dataclass(frozen=True)
class _Kinds:
    """What the norm at the sink layer makes of each position."""

    half: Bool[Tensor, "row pos"]  # at least half of the first token's
    high: Bool[Tensor, "row pos"]
    ordinary: Bool[Tensor, "row pos"]

    @classmethod
    def of(cls, norms: Float[Tensor, "row pos"], first: float, typical: tuple[float, float, float]) -> _Kinds:
        """Against the first token's norm and the 5 %, median and 95 % of the typical one."""
        high = norms > SINK_RATIO * typical[1]
        high[:, 0] = True
        return cls(norms >= first / 2, high, norms <= typical[2])


def _weights(kinds: _Kinds | None, shape: torch.Size) -> tuple[Float[Tensor, "row set pos"], Bool[Tensor, "row pos"]]:
    """Sets of keys (first; all high ones; the mean of high ones and of ordinary ones before the tail), and the tail."""
    rows, length = shape
    late = torch.arange(length) >= length - TAIL
    first = torch.zeros(rows, length)
    first[:, 0] = 1
    if kinds is None:
        return first[:, None], late.expand(rows, -1)
    means = [_mean_of(chosen & ~late) for chosen in (kinds.high, kinds.ordinary)]
    return torch.stack([first, kinds.high.float(), *means], 1), late & kinds.ordinary


def _mean_of(chosen: Bool[Tensor, "row pos"]) -> Float[Tensor, "row pos"]:
    return chosen / chosen.sum(1, keepdim=True).clamp(min=1)


def _attended(
    label: str, row: int, sums: Sums, kinds: _Kinds | None, tail: Bool[Tensor, " pos"], shown: list[int], start: int
) -> Attended:
    mean, late = sums.mean[row], sums.tail[row]  # set layer head
    pictures = tuple(Picture(layer, tuple(map(_tuple, sums.cells[row, i]))) for i, layer in enumerate(shown))
    first, rate = _tuple(mean[0].mean(-1)), _tuple((mean[0] > EPS).float().mean(-1))
    late_first = _tuple(late[0].mean(-1)) if bool(tail.any()) else None
    if kinds is None:
        none = None
        return Attended(label, none, none, none, first, none, rate, none, TAIL, none, late_first, none, none, pictures)
    high = kinds.high[row]
    fair = high.cumsum(0) / torch.arange(1, len(high) + 1)
    above = kinds.half[row, start:-TAIL].nonzero().flatten().tolist() if row else []
    some = late_first is not None
    return Attended(
        label=label,
        repeats=above[0] + 1 if above else None,
        high=int(high.sum()),
        uniform=float(fair.mean()),
        first=first,
        mass=_tuple(mean[1].mean(-1)),
        first_rate=rate,
        mass_rate=_tuple((mean[1] > EPS).float().mean(-1)),
        tail=int(tail.sum()),
        tail_uniform=float(fair[tail].mean()) if some else None,
        tail_first=late_first,
        tail_mass=_tuple(late[1].mean(-1)) if some else None,
        tail_ratio=_tuple(late[2].mean(-1) / late[3].mean(-1)) if some and bool((late[3] > 0).all()) else None,
        pictures=pictures,
    )


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


def _mean(shares: Sequence[float] | None, layers: range) -> str:
    return cell(None if shares is None else sum(shares[i] for i in layers) / len(layers), percent=True)
