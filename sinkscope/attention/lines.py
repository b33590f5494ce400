"""How few vertical and slash lines carry the attention, and how well important lines and tokens agree.

These are the observations of LoopServe (Li et al. 2025), section 3: how much attention the heaviest lines carry
(observation 1), and how well they agree between inputs, between segments, and between positions of the question (2 to
4).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.attention.texts import Input, Question, inputs, means, questions, shares
from sinkscope.errors import SinkscopeError
from sinkscope.interventions.decode import greedy
from sinkscope.lines.choice import HeadLines, top_lines
from sinkscope.lines.sums import Scores, crossings, line_sums, scores_of
from sinkscope.measure import Count, Hidden, Option, Positive, Progress, Result, Setup, measurement
from sinkscope.models.target import Target

T = TypeVar("T")
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
        at: Key position of a vertical line, or offset (query minus key position) of a slash line.
        share: The line's share of the head's attention.
    """

    at: int
    share: float


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Attention on the chosen lines, one number per eta.

    Attributes:
        mass: Share of the attention that lies on the chosen lines; cells at crossings count once.
        line_sums: Sum of the chosen lines' weights, in which cells at crossings count twice.
        random_mass: `mass` of random lines with the same total length of each kind as the chosen ones.
        cells: Share of all cells that the chosen lines cover.
    """

    mass: tuple[float, ...]
    line_sums: tuple[float, ...]
    random_mass: tuple[float, ...]
    cells: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class HeadWeights(Weights):
    """One query head; values are means over the texts.

    Attributes:
        layer: Layer of the head.
        head: Number of the head.
        vertical: Share of the chosen lines that are vertical, one number per eta.
        top_vertical: The heaviest vertical lines in the first text.
        top_slash: The heaviest slash lines in the first text.
    """

    layer: int
    head: int
    vertical: tuple[float, ...]
    top_vertical: tuple[Line, ...]
    top_slash: tuple[Line, ...]


@dataclass(frozen=True)
class LinePicture:
    """The attention map of one head over the first tokens of the first text, with its lines.

    A query's attention does not depend on later tokens, so the beginning of a text can be shown on its own.

    Attributes:
        layer: Layer of the head.
        head: Number of the head.
        words: The tokens as text.
        shares: One string per query: thousandths of its attention, one number per visible key.
        eta: Share of the lines of this map that are drawn.
        vertical: Key positions of the vertical lines.
        slash: Offsets of the slash lines.
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
    """Attention carried by the heaviest lines, mean over the heads.

    Attributes:
        etas: Shares of all lines that were chosen.
        inputs: The texts.
        heads: Every head that was measured, by layer.
        picture: The attention map of one head with its lines.
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
        """Index of the eta that tables show: the paper's, or the nearest."""
        return min(range(len(self.etas)), key=lambda i: abs(self.etas[i] - 0.1))

    def rows(self) -> list[dict[str, Any]]:
        """Up to 16 heads at eta 0.1 (or the nearest), sorted by attention on their lines, smallest first."""
        i = self.shown
        heads = sorted(self.heads, key=lambda h: h.mass[i])[:16]
        return [
            {"layer": h.layer, "head": h.head, "eta": self.etas[i], **{n: getattr(h, n)[i] for n in self.percent}}
            for h in heads
        ]

    def conclusion(self) -> str:
        """Attention on the heaviest lines, compared with random lines of the same length."""
        i = self.shown
        return (
            f"The heaviest {self.etas[i]:.0%} of all vertical and slash lines carry {self.mass[i]:.1%} of the "
            f"attention; they cover {self.cells[i]:.1%} of the cells, and random lines of the same total length carry "
            f"{self.random_mass[i]:.1%}."
        )

    def details(self) -> list[str]:
        """The texts, the sum over lines, and how many heads reach the share reported in the paper."""
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

    Attention is recomputed from queries and keys, some rows at a time, while the model runs normally. Memory grows
    linearly with the length. A second pass corrects for cells where chosen lines cross.

    Args:
        texts: Texts or lists of ids. By default pieces of ordinary text.
        data: File of prompts to use instead, in the published form of LongBench (samsum.jsonl), LongEval (topics or
            lines), RULER, SCBench or MT-bench; or JSON lines with a "prompt".
        count: Number of pieces of ordinary text, or of prompts from the file.
        length: Maximum tokens per text, at least 16; longer texts are shortened in the middle. By default the context,
            or 512 for ordinary text.
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
    target, wanted = setup.target, setup.target.chosen_layers(layers)
    if head is not None and not (head[0] in wanted and 0 <= head[1] < target.n_heads):
        raise SinkscopeError(
            f"head {head[0]}.{head[1]} is not measured: expected one of layers {wanted[0]} to {wanted[-1]}, heads 0 to "
            f"{target.n_heads - 1}"
        )
    rows = inputs(setup, texts, data, count, length)
    generator = torch.Generator().manual_seed(setup.seed)
    found = _by_layer(setup, rows, wanted, lambda scores: weighed(scores, chosen, generator))
    heads = tuple(_head(layer, h, found[layer]) for layer in wanted for h in range(target.n_heads))
    mean: dict[str, Any] = {name: means([getattr(h, name) for h in heads]) for name in _NAMES}
    return LineWeights(
        **mean,
        etas=chosen,
        inputs=tuple(one for one, _ in rows),
        heads=heads,
        picture=_pictured(setup, rows[0][1], *(head or _both_kinds(heads))),
    )


def _by_layer(
    setup: Setup, rows: Sequence[tuple[Input, Tensor]], layers: list[int], measure: Callable[[Scores], T]
) -> dict[int, list[T]]:
    """What `measure` says of each layer, text by text."""
    found: dict[int, list[T]] = {layer: [] for layer in layers}

    def see(layer: int, scores: Scores) -> None:
        found[layer].append(measure(scores))
        setup.progress("layers", sum(map(len, found.values())), len(layers) * len(rows))

    with setup.edited(), scores_of(setup.target, see, layers):
        for _, ids in rows:
            setup.target.forward(ids[None])
    return found


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


OVERLAP_ETAS = (0.1, 0.2, 0.3)
LOW = 0.5  # the paper: "for most heads, the overlap remains below 0.5"
BUDGETS = (0.05, 0.1, 0.15)
POSITIONS = {"begin": "beginning", "middle": "middle", "end": "end"}
BLOCKS = 8  # blocks of the prompt's end that are shown
_SHARED = ("inputs", "inputs_paper", "inputs_random", "segments", "segments_relative", "segments_random")


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Agreement of the chosen lines, one number per eta.

    Attributes:
        inputs: Number of lines chosen in both of two texts divided by the number chosen in either (observation 2); mean
            over pairs of different texts.
        inputs_paper: The same, with each text also paired with itself, as in the paper's average.
        inputs_random: `inputs` for the same number of random lines of each kind.
        segments: Number of lines chosen in both halves of a text divided by the number chosen in the second
            (observation 3), mean over texts; vertical lines are key positions of the text.
        segments_relative: The same within each half: the second half's sums leave out keys of the first, and its
            vertical lines are counted from its beginning.
        segments_random: `segments` for the same number of random lines of each kind.
    """

    inputs: tuple[float, ...]
    inputs_paper: tuple[float, ...]
    inputs_random: tuple[float, ...]
    segments: tuple[float, ...]
    segments_relative: tuple[float, ...]
    segments_random: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class HeadOverlap(Overlap):
    """One query head.

    Attributes:
        layer: Layer of the head.
        head: Number of the head.
    """

    layer: int
    head: int


@dataclass(frozen=True)
class PositionOverlap:
    """Position of the question, and the share of the answer's important tokens that the last window finds.

    Attributes:
        position: "begin", "middle" or "end".
        overlap: One number per budget, mean over the prompts.
    """

    position: str
    overlap: tuple[float, ...]


@dataclass(frozen=True)
class BlockOverlap:
    """One block of queries used as selector, with the question at the end; means over the prompts that have the block.

    Attributes:
        block: Number of the block; -1 is the last block of the prompt, 0 the first of the answer.
        overlap: Share of the whole answer's important tokens that the block finds, per budget.
        apart: The same with the block's own queries left out of the answer; None for an answer of one block.
        prompts: Number of prompts that have the block.
    """

    block: int
    overlap: tuple[float, ...]
    apart: tuple[float, ...] | None
    prompts: int


@dataclass(frozen=True)
class Distance:
    """Important tokens shared by two blocks of an answer, mean over all pairs at this distance.

    Attributes:
        blocks: The distance in blocks.
        overlap: One number per budget.
        pairs: Number of pairs.
    """

    blocks: int
    overlap: tuple[float, ...]
    pairs: int


@dataclass(frozen=True)
class TokenOverlap:
    """Observation 4 and the data of Fig. 4.

    Attributes:
        budgets: Shares of the prompt's tokens that count as important.
        window: Number of queries in the last window, and in a block.
        prompts: Number of prompts.
        answer_tokens: Mean length of the answers.
        random: Expected overlap of randomly drawn tokens with the important ones, per budget.
        positions: Results by position of the question.
        blocks: Data of Fig. 4 a.
        distances: Data of Fig. 4 b.
    """

    budgets: tuple[float, ...]
    window: int
    prompts: int
    answer_tokens: float
    random: tuple[float, ...]
    positions: tuple[PositionOverlap, ...]
    blocks: tuple[BlockOverlap, ...]
    distances: tuple[Distance, ...]

    def lines(self) -> list[str]:
        """The results in one or two lines."""
        i = min(range(len(self.budgets)), key=lambda k: abs(self.budgets[k] - 0.1))
        shown = ", ".join(
            f"{p.overlap[i]:.1%} with the question at its {POSITIONS[p.position]}" for p in self.positions
        )
        found = [
            f"Of the {self.budgets[i]:.0%} of a prompt that its answer attends to most, the last {self.window} queries "
            f"find {shown} (random {self.random[i]:.1%}; {self.prompts} prompts)."
        ]
        if self.distances:
            near, far = self.distances[0], self.distances[-1]
            tail = "" if far is near else f", {far.blocks} apart {far.overlap[i]:.1%}"
            found.append(f"Blocks of {self.window} queries of an answer share {near.overlap[i]:.1%} one apart{tail}.")
        return found


@dataclass(frozen=True, kw_only=True)
class LineOverlap(Overlap, Result):
    """Agreement of the heaviest lines, mean over the heads.

    Attributes:
        etas: Shares of all lines that were chosen.
        texts: The texts.
        heads: Every head that was measured, by layer.
        tokens: Observation 4. None if it was not requested, or if the texts have no questions.
    """

    page: ClassVar[str] = "measure/overlap"
    percent: ClassVar[tuple[str, ...]] = _SHARED
    columns: ClassVar[tuple[str, ...]] = ("head", "inputs", "inputs_random", *_SHARED[3:], "inputs_paper", "eta")

    etas: tuple[float, ...]
    texts: tuple[Input, ...]
    heads: tuple[HeadOverlap, ...]
    tokens: TokenOverlap | None

    def rows(self) -> list[dict[str, Any]]:
        """Up to 16 heads at the first eta, sorted by agreement between inputs, highest first."""
        heads = sorted(self.heads, key=lambda h: -h.inputs[0])[:16]
        return [
            {"layer": h.layer, "head": h.head, "eta": self.etas[0], **{name: getattr(h, name)[0] for name in _SHARED}}
            for h in heads
        ]

    def conclusion(self) -> str:
        """Agreement of lines between inputs and between halves, compared with random lines."""
        return (
            f"Of the heaviest {self.etas[0]:.0%} of the lines, {self.inputs[0]:.1%} are the same in two inputs (random "
            f"lines {self.inputs_random[0]:.1%}) and {self.segments[0]:.1%} of a text's second half are those of its "
            f"first (random {self.segments_random[0]:.1%})."
        )

    def details(self) -> list[str]:
        """The same for every eta, and the important tokens."""
        m = self.model
        lines = [f"{m.name} ({m.family}, {m.n_layers} layers), {len(self.texts)} texts, {len(self.heads)} heads"]
        for i, eta in enumerate(self.etas):
            low = sum(h.inputs[i] < LOW for h in self.heads)
            lines.append(
                f"eta {eta:g}: between inputs {self.inputs[i]:.1%} (i = j included, as in the paper, "
                f"{self.inputs_paper[i]:.1%}; random lines {self.inputs_random[i]:.1%}), below {LOW:.0%} in {low} of "
                f"{len(self.heads)} heads; from first to second half {self.segments[i]:.1%}, within each half "
                f"{self.segments_relative[i]:.1%} (random {self.segments_random[i]:.1%})."
            )
        return [*lines, *([] if self.tokens is None else self.tokens.lines())]


@measurement(
    group="Dialogues",
    figure="sinkscope.figures.attention:draw_overlap",
    command="overlap",
    loading="whole",
    quick={"count": 2, "length": 48, "layers": [1], "max_new_tokens": 6, "window": 3},
    scan={
        "order": 72,
        "seconds": [1.3, 8.0],
        "quick": {"count": 3, "length": 192, "max_new_tokens": 12},
        "full": {"length": 384},
        "numbers": {"heaviest lines shared by two texts": ["inputs.0", "inputs_random.0"]},
    },
)
def line_overlap(
    setup: Setup,
    texts: Hidden = None,
    *,
    data: str | Path | None = None,
    count: Annotated[int, Option(min=2)] = 6,
    length: int | None = None,
    etas: Sequence[float] = OVERLAP_ETAS,
    layers: Sequence[int] | None = None,
    max_new_tokens: Count = 48,
    budgets: Sequence[float] = BUDGETS,
    window: Positive = 16,
) -> LineOverlap:
    """Measure how well the heaviest lines agree between texts and halves, and important tokens between windows.

    The second part compares the tokens that the end of a prompt attends to with those that its answer attends to, for
    questions at the beginning, in the middle and at the end.

    Args:
        texts: At least two texts or lists of ids. By default pieces of ordinary text.
        data: File of prompts to use instead, in the published form of LongBench (samsum.jsonl), LongEval (topics or
            lines), RULER, SCBench or MT-bench; or JSON lines with a "prompt".
        count: Number of pieces of ordinary text, or of prompts from the file.
        length: Maximum tokens per text, at least 16; longer texts are shortened in the middle. By default the context,
            or 512 for ordinary text.
        etas: Share of all lines to choose.
        layers: Layer to measure. By default all are measured.
        max_new_tokens: Maximum tokens per answer; 0 skips the questions. Texts given from Python have no questions.
        budgets: Share of a prompt's tokens that counts as important.
        window: Number of queries in an observation window, and in a block.

    Raises:
        UnsupportedError: A model whose queries and keys are not accessible (a TransformerBridge, Falcon).
        SinkscopeError: Bad input; the message is one line and says what to do.

    Example:
        sinkscope overlap --model llama-3.1-8b --data samsum.jsonl
    """
    chosen, parts = shares(etas), shares(budgets, "--budget")
    setup.record(etas=chosen, budgets=parts)
    wanted = setup.target.chosen_layers(layers)
    rows = inputs(setup, texts, data, count, length)
    if len(rows) < 2:
        raise SinkscopeError("one text cannot be compared with another: expected two or more")
    asked = questions(setup, data, count, length, max_new_tokens) if texts is None and max_new_tokens else []
    shortest = min((len(question.placed("end")) for question in asked), default=window)
    if window > shortest:
        raise SinkscopeError(f"--window {window}: expected at most {shortest}, the tokens of the shortest prompt")
    generator = torch.Generator().manual_seed(setup.seed)
    found = _by_layer(setup, rows, wanted, lambda scores: _chosen_in(scores, chosen, generator))
    heads = tuple(head for layer in wanted for head in _overlaps(layer, found[layer]))
    tokens = token_overlap(setup.target, asked, wanted, max_new_tokens, parts, window, setup.progress)
    numbers = {name: torch.tensor([getattr(h, name) for h in heads]) for name in _SHARED}
    mean: dict[str, Any] = {name: tuple(values.double().mean(0).tolist()) for name, values in numbers.items()}
    return LineOverlap(
        **mean,
        etas=chosen,
        texts=tuple(one for one, _ in rows),
        heads=heads,
        tokens=tokens,
    )


@dataclass(frozen=True, eq=False)
class _Chosen:
    """One layer and text: the chosen lines, as many random ones, and what the segments share."""

    own: HeadLines
    random: HeadLines
    segments: dict[str, Float[Tensor, "choice head"]]


def _chosen_in(scores: Scores, etas: Sequence[float], generator: torch.Generator) -> _Chosen:
    keys = scores.key.shape[1]
    half = keys // 2
    own = top_lines(*line_sums(scores), etas)
    first = top_lines(*line_sums(scores.part(0, half)), etas)
    second = top_lines(*line_sums(scores.part(half, keys)), etas, keys - half)
    vertical, slash = line_sums(scores.part(half, keys), since=half)
    inside = top_lines(vertical[:, half:], slash[:, : keys - half], etas)
    segments = {
        "segments": covered(first, second),
        "segments_relative": covered(first, inside),
        "segments_random": covered(first.random(generator, cells=False), second.random(generator, cells=False)),
    }
    drawn = own.random(generator, cells=False)
    own, drawn = (HeadLines(lines.vertical.cpu(), lines.slash.cpu(), keys) for lines in (own, drawn))
    return _Chosen(own, drawn, {name: value.cpu() for name, value in segments.items()})


def jaccard(a: HeadLines, b: HeadLines) -> Float[Tensor, "choice head"]:
    """Number of lines in both over number of lines in either."""
    both = _common(a, b)
    return both / (a.counts() + b.counts() - both).clamp(min=1)


def covered(a: HeadLines, b: HeadLines) -> Float[Tensor, "choice head"]:
    """Number of lines in both over number of lines of `b`."""
    return _common(a, b) / b.counts().clamp(min=1)


def _common(a: HeadLines, b: HeadLines) -> Tensor:
    keys = min(a.vertical.shape[2], b.vertical.shape[2])  # lines that only one text can have are not shared
    vertical, slash = a.vertical[..., :keys] & b.vertical[..., :keys], a.slash[..., :keys] & b.slash[..., :keys]
    return vertical.sum(2) + slash.sum(2)


def _overlaps(layer: int, chosen: list[_Chosen]) -> list[HeadOverlap]:
    pairs = [(a, b) for i, a in enumerate(chosen) for b in chosen[:i]]
    apart = torch.stack([jaccard(a.own, b.own) for a, b in pairs]).double().mean(0)
    drawn = torch.stack([jaccard(a.random, b.random) for a, b in pairs]).double().mean(0)
    count = len(chosen)
    found = {"inputs": apart, "inputs_paper": (apart * (count - 1) + 1) / count, "inputs_random": drawn}
    for name in _SHARED[3:]:
        found[name] = torch.stack([one.segments[name] for one in chosen]).double().mean(0)
    return [
        HeadOverlap(layer=layer, head=head, **{name: tuple(found[name][:, head].tolist()) for name in _SHARED})
        for head in range(apart.shape[1])
    ]


def token_overlap(
    target: Target,
    asked: Sequence[Question],
    layers: list[int],
    new: int,
    budgets: Sequence[float],
    window: int,
    progress: Progress,
) -> TokenOverlap | None:
    """Answer every prompt greedily with its question at three positions, and compare which tokens queries attend to.

    A token's importance is the attention that it receives from the selected queries, summed over these queries and over
    all heads and layers (section 3.2).

    Args:
        target: The model.
        asked: The prompts; the result is None if there are none.
        layers: Layers whose attention counts.
        new: Maximum tokens per answer.
        budgets: Shares of the prompt's tokens that count as important.
        window: Number of queries in a window and in a block.
        progress: Called after every answer.
    """
    if not asked:
        return None
    found: dict[str, list[list[float]]] = {where: [] for where in POSITIONS}
    blocks: dict[int, list[tuple[list[float], list[float]]]] = {}
    apart: dict[int, list[list[float]]] = {}
    random: list[list[float]] = []
    lengths: list[int] = []
    for question, where in product(asked, POSITIONS):
        ids = question.placed(where)
        answer = greedy(target, torch.tensor([ids]), new)[0]
        n, whole = len(ids), torch.tensor([*ids, *answer])
        places = [*range(-1, -1 - min(BLOCKS, n // window), -1), *range(len(answer) // window)]
        places = places if where == "end" else []
        ranges = [(max(0, n - window), n), (n, len(whole)), *((n + b * window, n + (b + 1) * window) for b in places)]
        last, output, *rest = _importance(target, whole, n, layers, ranges)
        truth = _top(output, budgets)
        found[where].append(_shared(_top(last, budgets), truth))
        random.append((truth.sum(1) / n).tolist())
        lengths.append(len(answer))
        tops = {place: _top(part, budgets) for place, part in zip(places, rest, strict=True)}
        for (place, top), part in zip(tops.items(), rest, strict=True):
            alone: list[float] = []  # its own queries are all that an answer of one block has
            if place < 0 or len(answer) != window:
                alone = _shared(top, truth if place < 0 else _top(output - part, budgets))
            blocks.setdefault(place, []).append((_shared(top, truth), alone))
            for other in range(place):
                apart.setdefault(place - other, []).append(_shared(tops[other], top))
        progress("answers", len(lengths), len(asked) * len(POSITIONS))
    return TokenOverlap(
        tuple(budgets),
        window,
        len(asked),
        sum(lengths) / len(lengths),
        means(random),
        tuple(PositionOverlap(where, means(values)) for where, values in found.items()),
        tuple(
            BlockOverlap(
                place,
                means([whole for whole, _ in blocks[place]]),
                means([alone for _, alone in blocks[place] if alone]) or None,
                len(blocks[place]),
            )
            for place in sorted(blocks)
        ),
        tuple(Distance(far, means(apart[far]), len(apart[far])) for far in sorted(apart)),
    )


def _importance(
    target: Target, ids: Tensor, prompt: int, layers: list[int], ranges: Sequence[tuple[int, int]]
) -> list[Float[Tensor, " key"]]:
    """Attention that each of the first `prompt` tokens receives from the queries of each range, over all heads."""
    found = [torch.zeros(prompt) for _ in ranges]

    def add(_: int, scores: Scores) -> None:
        for total, (start, stop) in zip(found, ranges, strict=True):
            got = line_sums(scores.part(start, stop))[0].sum(0).cpu()[:prompt]
            total[: len(got)] += got

    with scores_of(target, add, layers):
        target.forward(ids[None])
    return found


def _top(importance: Float[Tensor, " key"], budgets: Sequence[float]) -> Bool[Tensor, "budget key"]:
    chosen = torch.zeros(len(budgets), len(importance), dtype=torch.bool)
    for row, budget in zip(chosen, budgets, strict=True):
        row[importance.topk(max(1, round(budget * len(importance)))).indices] = True
    return chosen


def _shared(a: Bool[Tensor, "budget key"], b: Bool[Tensor, "budget key"]) -> list[float]:
    return ((a & b).sum(1) / b.sum(1)).tolist()
