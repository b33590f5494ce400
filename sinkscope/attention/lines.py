"""How few vertical and slash lines carry the attention (Li et al. 2025, LoopServe, section 3.1, observation 1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.attention.texts import Input, chosen_layers, inputs, means, shares
from sinkscope.errors import SinkscopeError
from sinkscope.lines.choice import HeadLines, top_lines
from sinkscope.lines.sums import Scores, crossings, line_sums, scores_of
from sinkscope.measure import Positive, Result, Setup, measurement
from sinkscope.registry import Hidden, Option

ETAS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
MOST = 0.9  # share of the attention that the paper says a tenth of the lines carries
SHOWN = 8  # heaviest lines of a head that are kept
PICTURED = 96  # tokens of the attention map
DRAWN = 0.05  # share of the lines drawn over it; more would hide the map below them
_NAMES = ("mass", "line_sums", "random_mass", "cells")


@dataclass(frozen=True)
class Line:
    """One line of the first text.

    Attributes:
        at: key position of a vertical line, offset (query less key position) of a slash line.
        share: share of the head's attention.
    """

    at: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What the chosen lines carry, one number per eta.

    Attributes:
        mass: share of the attention that lies on the chosen lines; cells at crossings count once.
        line_sums: the same with the weights of the lines added up, so that cells at crossings count twice.
        random_mass: `mass` of random lines; lines of each kind have the same length together as the chosen ones.
        cells: share of all cells that the chosen lines cover.
    """

    mass: tuple[float, ...]
    line_sums: tuple[float, ...]
    random_mass: tuple[float, ...]
    cells: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class HeadWeights(Weights):
    """One query head; means over the texts.

    Attributes:
        layer: its layer.
        head: its number.
        vertical: share of the chosen lines that are vertical, one number per eta.
        top_vertical: the heaviest in the first text.
        top_slash: the heaviest in the first text.
    """

    layer: int
    head: int
    vertical: tuple[float, ...]
    top_vertical: tuple[Line, ...]
    top_slash: tuple[Line, ...]


@dataclass(frozen=True)
class LinePicture:
    """The attention map of one head over the first tokens of the first text, with its lines.

    A query's attention does not depend on what comes after it, so the beginning of a text can stand for itself.

    Attributes:
        layer: layer of the head.
        head: its number.
        words: the tokens as text.
        shares: one string per query: thousandths of its attention, one number per key that it sees.
        eta: share of the lines of this map that is drawn.
        vertical: key positions of the lines.
        slash: offsets of the lines.
    """

    layer: int
    head: int
    words: tuple[str, ...]
    shares: tuple[str, ...]
    eta: float
    vertical: tuple[int, ...]
    slash: tuple[int, ...]

    def values(self) -> list[list[float]]:
        """The shares as numbers, query by query."""
        return [[int(word) / 1000 for word in line.split()] for line in self.shares]


@dataclass(frozen=True, kw_only=True)
class LineWeights(Weights, Result):
    """What the heaviest lines carry, mean over the heads.

    Attributes:
        etas: shares of all lines that were chosen.
        inputs: the texts.
        heads: every head that was measured, by layer.
        picture: the attention map of one of them with its lines.
    """

    page: ClassVar[str] = "measure/lines"
    percent: ClassVar[tuple[str, ...]] = (*_NAMES, "vertical")
    columns: ClassVar[tuple[str, ...]] = ("head", "mass", "random_mass", "cells", "vertical", "line_sums", "eta")

    etas: tuple[float, ...]
    inputs: tuple[Input, ...]
    heads: tuple[HeadWeights, ...]
    picture: LinePicture

    @property
    def shown(self) -> int:
        """Number of the eta that tables show: the paper's, or the nearest."""
        return min(range(len(self.etas)), key=lambda i: abs(self.etas[i] - 0.1))

    def rows(self) -> list[dict[str, Any]]:
        """Up to 16 heads at eta 0.1 (or the nearest), those whose lines carry least first."""
        i = self.shown
        heads = sorted(self.heads, key=lambda h: h.mass[i])[:16]
        return [
            {"layer": h.layer, "head": h.head, "eta": self.etas[i], **{n: getattr(h, n)[i] for n in self.percent}}
            for h in heads
        ]

    def conclusion(self) -> str:
        """What the heaviest lines carry, beside random lines of the same length."""
        i = self.shown
        return (
            f"The heaviest {self.etas[i]:.0%} of all vertical and slash lines carry {self.mass[i]:.1%} of the "
            f"attention; they cover {self.cells[i]:.1%} of the cells, and random lines of the same total length carry "
            f"{self.random_mass[i]:.1%}."
        )

    def details(self) -> list[str]:
        """The texts, the sum over lines, and how many heads reach the paper's share."""
        m, i = self.model, self.shown
        tokens = sorted(x.tokens for x in self.inputs)
        size = f"{tokens[0]}" if tokens[0] == tokens[-1] else f"{tokens[0]} to {tokens[-1]}"
        whole = sum(h.mass[i] >= MOST for h in self.heads)
        fewest = next((eta for eta, mass in zip(self.etas, self.mass, strict=True) if mass >= MOST), None)
        need = f"no eta up to {self.etas[-1]:g}" if fewest is None else f"eta {fewest:g} is the first that"
        return [
            f"{m.name} ({m.family}, {m.n_layers} layers), {len(self.inputs)} text{'s' * (len(self.inputs) != 1)} of "
            f"{size} tokens, {len(self.heads)} heads",
            f"Added up line by line, with cells at crossings counted twice, the lines carry {self.line_sums[i]:.1%}.",
            f"{whole} of {len(self.heads)} heads reach {MOST:.0%} there; on average {need} does.",
        ]


@measurement(
    group="Dialogues",
    figure="sinkscope.figures.attention:draw_weights",
    command="lines",
    loading="whole",
    edits=True,
    quick={"count": 1, "length": 48, "layers": [1]},
    scan={
        "order": 70,
        "seconds": [0.6, 6.0],
        "quick": {"count": 4, "length": 256},
        "numbers": {"attention on the heaviest 10 % of lines": ["mass.1", "random_mass.1"]},
    },
)
def line_weights(
    setup: Setup,
    texts: Hidden = None,
    *,
    data: str | Path | None = None,
    count: Positive = 4,
    length: int | None = None,
    etas: Sequence[float] = ETAS,
    layers: Sequence[int] | None = None,
    head: Annotated[tuple[int, int] | None, Option(reads="head", metavar="L0.H4")] = None,
) -> LineWeights:
    """Measure how much of the attention of every head the heaviest vertical and slash lines carry.

    Attention is computed again from queries and keys, some rows at a time, while the model runs on its own. Memory
    grows with the length, never with its square. A second computation counts what lies where chosen lines cross.

    Args:
        texts: Texts or lists of ids. By default pieces of ordinary text.
        data: File of prompts instead, as published by LongBench (samsum.jsonl), LongEval (topics or lines), RULER,
            SCBench or MT-bench; or JSON lines with a "prompt".
        count: Pieces of ordinary text, or prompts of the file.
        length: Most tokens of each text, at least 16; longer ones lose their middle. By default the context, or 512
            for ordinary text.
        etas: Share of all lines to choose.
        layers: Layer to measure. By default all are measured.
        head: Show the attention map of this head. By default one with both kinds of lines is shown.

    Raises:
        UnsupportedError: A model whose queries and keys are not accessible (a TransformerBridge, Falcon).
        SinkscopeError: Bad input; the message is one line and says what to do.

    Example:
        sinkscope lines --model llama-3.1-8b --data samsum.jsonl
    """
    chosen = shares(etas)
    setup.record(etas=chosen)
    target, wanted = setup.target, chosen_layers(setup, layers)
    if head is not None and not (head[0] in wanted and 0 <= head[1] < target.n_heads):
        raise SinkscopeError(
            f"head {head[0]}.{head[1]} is not measured: expected one of layers {wanted[0]} to {wanted[-1]}, heads 0 to "
            f"{target.n_heads - 1}"
        )
    rows = inputs(setup, texts, data, count, length)
    generator = torch.Generator().manual_seed(setup.seed)
    found: dict[int, list[dict[str, Tensor]]] = {layer: [] for layer in wanted}

    def weigh(layer: int, scores: Scores) -> None:
        found[layer].append(weighed(scores, chosen, generator))
        setup.progress("layers", sum(map(len, found.values())), len(wanted) * len(rows))

    with setup.edited(), scores_of(target, weigh, wanted):
        for _, ids in rows:
            target.forward(ids[None])
    heads = tuple(_head(layer, h, found[layer]) for layer in wanted for h in range(target.n_heads))
    mean: dict[str, Any] = {name: means([getattr(h, name) for h in heads]) for name in _NAMES}
    return LineWeights(
        **mean,
        etas=chosen,
        inputs=tuple(one for one, _ in rows),
        heads=heads,
        picture=_pictured(setup, rows[0][1], *(head or _both_kinds(heads))),
    )


def weighed(
    scores: Scores, etas: Sequence[float], generator: torch.Generator
) -> dict[str, Float[Tensor, "choice head"] | Float[Tensor, "2 head place"]]:
    """The numbers of `HeadWeights` for one layer and text; "top_*" are shares of the heaviest lines, and where."""
    vertical, slash = line_sums(scores)
    total = vertical.sum(1)
    own = top_lines(vertical, slash, etas)
    drawn = own.random(generator, cells=True)
    both = HeadLines(torch.cat([own.vertical, drawn.vertical]), torch.cat([own.slash, drawn.slash]), own.queries)
    summed = (vertical * both.vertical).sum(2) + (slash * both.slash).sum(2)
    mass = (summed - crossings(scores, both.vertical, both.slash)) / total
    n = len(etas)
    found = {
        "mass": mass[:n],
        "line_sums": summed[:n] / total,
        "random_mass": mass[n:],
        "cells": own.density(),
        "vertical": own.vertical.sum(2) / own.counts(),
    }
    for name, kind in (("top_vertical", vertical), ("top_slash", slash)):
        top = kind.topk(min(SHOWN, kind.shape[1]), 1)
        found[name] = torch.stack([top.values / total[:, None], top.indices.float()])
    return {name: value.cpu() for name, value in found.items()}


def _head(layer: int, head: int, found: list[dict[str, Tensor]]) -> HeadWeights:
    made: dict[str, Any] = {
        name: means([one[name][:, head].tolist() for one in found]) for name in (*_NAMES, "vertical")
    }
    for name in ("top_vertical", "top_slash"):
        top, places = found[0][name][:, head].tolist()
        made[name] = tuple(Line(int(at), share) for share, at in zip(top, places, strict=True))
    return HeadWeights(layer=layer, head=head, **made)


def _both_kinds(heads: Sequence[HeadWeights]) -> tuple[int, int]:
    """The head whose lighter kind of line weighs most; the first position, where sinks are, does not count here."""

    def weight(h: HeadWeights) -> float:
        kinds = [[line.share for line in h.top_vertical if line.at > 0][:4], [line.share for line in h.top_slash[:4]]]
        return min(map(sum, kinds))

    best = max(heads, key=weight)
    return best.layer, best.head


def _pictured(setup: Setup, ids: Int[Tensor, " pos"], layer: int, head: int) -> LinePicture:
    """The map of a head of `layer` over the first tokens of `ids`."""
    ids = ids[:PICTURED]
    found: list[LinePicture] = []
    words = tuple(str(i if setup.tokenizer is None else setup.tokenizer.decode([i])) for i in ids.tolist())

    def picture(_: int, scores: Scores) -> None:
        lines = top_lines(*line_sums(scores), [DRAWN])
        rows = [line_sums(scores.part(i, i + 1))[0][head] for i in range(len(ids))]
        told = tuple(" ".join(str(round(1000 * p)) for p in row.tolist()) for row in rows)
        chosen = [tuple(kind[0, head].nonzero().flatten().tolist()) for kind in (lines.vertical, lines.slash)]
        found.append(LinePicture(layer, head, words, told, DRAWN, *chosen))

    with setup.edited(), scores_of(setup.target, picture, [layer]):
        setup.target.forward(ids[None])
    return found[0]
