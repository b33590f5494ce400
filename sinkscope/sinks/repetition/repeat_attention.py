"""Attention to sinks: a repeated token against natural text, head-averaged per layer (Yona et al. 2025, Fig. 1, 8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.result import cell
from sinkscope.measure import Count, Positive, Result, Setup, measurement
from sinkscope.models.target import Target
from sinkscope.models.text import text_rows
from sinkscope.sinks.first_token.layer_scan import SPIKE_RATIO, norms_after, repeats_until_half, scan_layers
from sinkscope.sinks.tokens import repetitions, replaced_line, words_to_repeat
from sinkscope.trace.attention import attention_rows

EPS = 0.3  # Gu et al. 2024
BINS = 32  # bins of a picture, besides the first position and the tail, which have their own bins
_ROWS = 128  # queries at a time: at most batch x head x _ROWS x key values are in memory
TAIL = 64  # tokens of natural text behind the repetitions, the same at the same positions in every sequence


@dataclass(frozen=True)
class Picture:
    """Attention of one layer, averaged over heads: one row per bin of queries, one column per bin of keys.

    A cell is the share of attention that the queries of its row give to all keys of its column. Without learned sink
    logits, a row sums to one.
    """

    layer: int
    cells: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Attended:
    """One sequence. Lists have one entry per layer; means are over queries and heads.

    Attributes:
        label: "natural text", or the repeated token.
        repeats: First repetition whose norm reaches half of the first token's. None if never, and for natural text.
        high: Number of high-norm positions: the first position, and those whose norm at the sink layer exceeds three
            times the typical norm. None without a sink layer.
        uniform: The value of `mass` if every query attended to all visible keys equally.
        first: Mean attention to position 0.
        mass: Mean attention to all high-norm positions together.
        first_rate: Share of heads whose mean attention to position 0 exceeds 0.3 (sink rate, Gu et al. 2024).
        mass_rate: Share of heads whose mean attention to all high-norm positions together exceeds 0.3.
        tail: Number of queries in the tail: those of the last 64 tokens, the same text in every sequence, whose norm is
            no higher than that of 95 % of typical text. After repetitions some of these tokens are sinks themselves and
            attend elsewhere.
        tail_uniform: As `uniform`, for the queries of the tail.
        tail_first: As `first`, for the queries of the tail. None if the tail is empty.
        tail_mass: As `mass`, for the queries of the tail.
        tail_ratio: Mean attention from the tail to a high-norm position before the last 64, divided by that to a
            position there whose norm is no higher than that of 95 % of typical text. None if there is none.
        pictures: Pictures of the layers that are shown.
    """

    label: str
    repeats: int | None
    high: int | None = None
    uniform: float | None = None
    first: tuple[float, ...]
    mass: tuple[float, ...] | None = None
    first_rate: tuple[float, ...]
    mass_rate: tuple[float, ...] | None = None
    tail: int
    tail_uniform: float | None = None
    tail_first: tuple[float, ...] | None
    tail_mass: tuple[float, ...] | None = None
    tail_ratio: tuple[float, ...] | None = None
    pictures: tuple[Picture, ...]


@dataclass(frozen=True, kw_only=True)
class RepeatAttention(Result):
    """Where attention goes in repeated and in natural sequences of one length.

    Repetition distributes the sink over several positions, so attention to position 0 alone falls although the heads
    still attend to sinks as before. Both numbers are therefore given.

    Attributes:
        sink_layer: Layer whose norms determine which positions are high. None if the model has no sink.
        length: Number of tokens in every sequence.
        max_repeats: Number of repetitions in the repeated sequences.
        edges: First position of every bin of the pictures, followed by the length.
        replaced: Pairs of (word of the paper that is not one token here, word that took its place).
        sequences: Natural text, then one sequence per repeated token.
    """

    page: ClassVar[str] = "measure/repeat"
    kind: ClassVar[str] = "repeat-attention"
    percent: ClassVar[tuple[str, ...]] = (
        "to_first",
        "to_high_norm",
        "tail_to_first",
        "tail_to_high_norm",
        "sink_rate",
        "high_norm_rate",
    )

    columns: ClassVar[tuple[str, ...]] = ("layer", "sequence", "to_first", "to_high_norm", "tail_ratio", "sink_rate")
    glossary: ClassVar[dict[str, str]] = {
        "sequence": "natural text, or the token that is repeated",
        "to_first": "attention that position 0 receives, mean over queries and heads",
        "to_high_norm": "attention that all positions of high norm receive together",
        "tail_to_first": "attention to position 0 from ordinary tokens at the end of the sequence",
        "tail_to_high_norm": "attention of those tokens to all positions of high norm",
        "tail_ratio": "what those tokens give a high-norm position, over what they give an ordinary one",
        "sink_rate": "share of heads that give position 0 more than 0.3 of their attention",
        "high_norm_rate": "share of heads that give high-norm positions more than 0.3 of their attention",
    }

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

    def conclusion(self) -> str:
        """How much attention repetition takes from position 0 in layers behind the sink, compared with natural text."""
        layers = self._layers()
        said = [f"{s.label!r} {_mean(s.first, layers)}" for s in self.sequences[1:]]
        natural = _mean(self.sequences[0].first, layers)
        if self.sink_layer is None:
            return (
                f"The model has no attention sink; position 0 gets {natural} of the attention in natural text, and "
                f"under repetition of {', '.join(said)}."
            )
        shared = [f"{_mean(s.mass, layers)} for {s.label!r}" for s in self.sequences[1:]]
        return (
            f"Behind the sink layer, position 0 gets {natural} of the attention in natural text, and under repetition "
            f"of {', '.join(said)}; all high-norm positions together get {_mean(self.sequences[0].mass, layers)} in "
            f"natural text and {', '.join(shared)}."
        )

    def details(self) -> list[str]:
        """Attention of all queries and of the tail, sequence by sequence."""
        layers = self._layers()
        where = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        lines = [
            f"Every sequence has {self.length} tokens. The numbers are means over queries and heads of {where}, first "
            f"over all queries and then over the tail (queries of ordinary norm among the last {TAIL}).",
        ]
        if self.sink_layer is None:
            lines.insert(1, "No MLP raises the first token's norm, so no position has a high norm.")
        for s in self.sequences:
            line = f"{s.label}: position 0 receives {_mean(s.first, layers)} and {_mean(s.tail_first, layers)}, sink "
            line += f"rate {_mean(s.first_rate, layers)}"
            if s.mass is not None:
                line += (
                    f"; all {s.high} high-norm positions receive {_mean(s.mass, layers)} and "
                    f"{_mean(s.tail_mass, layers)} (uniform attention would give {cell(s.uniform, percent=True)} and "
                    f"{cell(s.tail_uniform, percent=True)}), sink rate {_mean(s.mass_rate, layers)}"
                )
            if s.tail_ratio is not None:
                ratio = sum(s.tail_ratio[i] for i in layers) / len(layers)
                line += f"; the tail gives each {ratio:.3g} times as much as a position of ordinary norm"
            lines.append(line + ".")
        return lines + replaced_line(self.replaced)

    def _layers(self) -> range:
        """Layers behind the sink layer; the last one where the sink is there, all of a model without a sink."""
        first = 0 if self.sink_layer is None else min(self.sink_layer + 1, self.model.n_layers - 1)
        return range(first, self.model.n_layers)


@measurement(
    group="Repetition",
    figure="sinkscope.figures.repetition:repeat_attention",
    command="repeat",
    flag="attention",
    quick={"max_repeats": 24, "batch_size": 2},
    scan={
        "order": 42,
        "seconds": [0.3, 1.2],
        "quick": {"max_repeats": 256},
        "numbers": {"attention to position 0 when repeating": ["sequences.1.first", "sequences.0.first"]},
    },
)
def repeat_attention(
    setup: Setup,
    *,
    tokens: Sequence[str] | None = None,
    prefix: str | None = None,
    max_repeats: Positive | None = None,
    layers: Sequence[Count] | None = None,
    batch_size: Positive = 4,
) -> RepeatAttention:
    """Measure how much attention a repeated token and natural text of the same length give to sinks.

    Attention is averaged over heads and streamed in chunks of queries. For a model without a sink, `sink_layer` is None
    and only attention to position 0 is given (Yona et al. 2025, Fig. 1 and 8).

    Args:
        tokens: Word to repeat, one token. By default "the", as in Fig. 1.
        prefix: Text between BOS and the repetitions; it must not contain what is repeated.
        max_repeats: Number of repetitions. By default 1,024, or what the context holds.
        layers: Layer to draw. By default the two after the sink layer, one past the middle, and the last (in a model of
            32 layers with the sink in layer 1 these are the paper's 2, 3, 17 and 31).
        batch_size: Sequences per pass.

    Example:
        sinkscope repeat --attention --model llama-2-7b
    """
    target = setup.target
    chosen = target.chosen_layers(layers)
    words, replaced = words_to_repeat(setup, tokens, prefix, ("the",))
    asked = repetitions(setup, [(w,) for w in words], prefix, max_repeats, after=TAIL)
    length = asked.ids.shape[1] + TAIL
    natural = text_rows(target.tokenizer, setup.text, 1, length, setup.bos)
    ids = torch.cat([natural, torch.cat([asked.ids, natural[:, -TAIL:].expand(len(words), -1)], 1)])

    seen = scan_layers(target, setup.ids, whole=target.resident, progress=setup.progress)
    layer, norms, halves = seen.sink_layer, torch.zeros(ids.shape), [None] * len(ids)
    if layer is not None:
        norms = norms_after(target, layer, ids, batch_size, setup.progress)
        halves = [
            None,
            *(repeats_until_half(row[asked.start : -TAIL], seen.layers[layer].first_norm) for row in norms[1:]),
        ]
    keys, tail = _weights(norms, None if layer is None else seen.layers[layer].typical_norms)
    shown = _shown(layer, target.n_layers) if layers is None else chosen
    edges, parts = _edges(length), list[tuple[Tensor, Tensor, Tensor]]()
    for rows, sets, late in zip(*(part.split(batch_size) for part in (ids, keys, _mean_of(tail))), strict=True):
        parts.append(attention_sums(target, rows, sets, late, shown, edges))
        setup.progress("attention", min(len(parts) * batch_size, len(ids)), len(ids))
    sums = [torch.cat(part) for part in zip(*parts, strict=True)]
    setup.record(max_repeats=asked.count, layers=shown, eps=EPS)
    return RepeatAttention(
        sink_layer=layer,
        length=length,
        max_repeats=asked.count,
        edges=edges,
        replaced=replaced,
        sequences=tuple(
            _attended({"label": label, "repeats": halves[row]}, [s[row] for s in sums], keys[row, 1:], tail[row], shown)
            for row, label in enumerate(("natural text", *asked.labels))
        ),
    )


@torch.no_grad()
def attention_sums(
    target: Target,
    ids: Int[Tensor, "row pos"],
    keys: Float[Tensor, "row set pos"],
    tail: Float[Tensor, "row pos"],
    shown: list[int],
    edges: tuple[int, ...],
) -> tuple[
    Float[Tensor, "row set layer head"], Float[Tensor, "row set layer head"], Float[Tensor, "row shown bin bin"]
]:
    """Attention to each set of keys, from one pass over all layers; nothing of size query x key is kept.

    Args:
        target: The model.
        ids: The sequences.
        keys: Sets of keys, as weights on their attention.
        tail: Weights of queries, for a second mean besides the one over all queries.
        shown: Layers of the pictures.
        edges: First position of every bin, followed by the length.

    Returns:
        The mean over all queries, the mean over the weighted queries, and, for the layers shown, the share that the
        queries of each bin give to the keys of each bin, averaged over heads.
    """
    count, length = ids.shape
    mean = torch.zeros(count, keys.shape[1], target.n_layers, target.n_heads)
    late, bins = torch.zeros_like(mean), len(edges) - 1
    cells = torch.zeros(count, len(shown), bins, bins)
    of_bin = torch.bucketize(torch.arange(length), torch.tensor(edges[1:]), right=True)
    member = torch.nn.functional.one_hot(of_bin, bins).float()  # position bin

    def add(layer: int, start: int, rows: Tensor) -> None:
        part = slice(start, start + rows.shape[2])
        given = torch.einsum("bhqk,bsk->bshq", rows, keys.to(rows.device)).cpu()
        mean[:, :, layer] += given.sum(-1) / length
        late[:, :, layer] += torch.einsum("bshq,bq->bsh", given, tail[:, part])
        if layer in shown:
            by_key = rows.mean(1) @ member.to(rows.device)
            cells[:, shown.index(layer)].index_add_(1, of_bin[part], by_key.cpu())

    with attention_rows(target, add, rows_per_chunk=_ROWS):
        target.forward(ids)
    return mean, late, cells / member.sum(0)[:, None]


def _weights(
    norms: Float[Tensor, "row pos"], typical: tuple[float, float, float] | None
) -> tuple[Float[Tensor, "row set pos"], Bool[Tensor, "row pos"]]:
    """Sets of keys (first; all high ones; the mean of high ones and of ordinary ones before the tail), and the tail.

    Without typical norms (5 %, median, 95 %) nothing is high, and there is only the first set.
    """
    rows, length = norms.shape
    late = torch.arange(length) >= length - TAIL
    first = torch.zeros(rows, length)
    first[:, 0] = 1
    if typical is None:
        return first[:, None], late.expand(rows, -1)
    high, ordinary = (norms > SPIKE_RATIO * typical[1]) | first.bool(), norms <= typical[2]
    means = [_mean_of(chosen & ~late) for chosen in (high, ordinary)]
    return torch.stack([first, high.float(), *means], 1), late & ordinary


def _mean_of(chosen: Bool[Tensor, "row pos"]) -> Float[Tensor, "row pos"]:
    return chosen / chosen.sum(1, keepdim=True).clamp(min=1)


def _attended(
    named: dict[str, Any],
    sums: list[Tensor],
    sets: Float[Tensor, "set pos"],
    tail: Bool[Tensor, " pos"],
    shown: list[int],
) -> Attended:
    """One sequence, from what attention came to and from its sets of keys without that of the first position."""
    mean, late, cells = sums  # set layer head, set layer head, shown bin bin
    some = bool(tail.any())
    named |= {
        "first": _tuple(mean[0].mean(-1)),
        "first_rate": _tuple((mean[0] > EPS).float().mean(-1)),
        "tail": int(tail.sum()),
        "tail_first": _tuple(late[0].mean(-1)) if some else None,
        "pictures": tuple(Picture(layer, tuple(map(_tuple, cells[i]))) for i, layer in enumerate(shown)),
    }
    if not len(sets):
        return Attended(**named)
    fair = sets[0].cumsum(0) / torch.arange(1, len(tail) + 1)
    return Attended(
        **named,
        high=int(sets[0].sum()),
        uniform=float(fair.mean()),
        mass=_tuple(mean[1].mean(-1)),
        mass_rate=_tuple((mean[1] > EPS).float().mean(-1)),
        tail_uniform=float(fair[tail].mean()) if some else None,
        tail_mass=_tuple(late[1].mean(-1)) if some else None,
        tail_ratio=_tuple(late[2].mean(-1) / late[3].mean(-1)) if some and bool((late[3] > 0).all()) else None,
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
