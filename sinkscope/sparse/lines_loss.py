"""What it costs to read texts along lines of their own, beside lines of another text and fixed ones of as many cells.

1. Each text is read along its own columns and bands, which `LoopServe` chooses while it reads, for every alpha.
2. Another text, of the same kind if there is one, is read by the model's own attention. Of each head's columns and
   bands there, as many are taken as reach the number of cells that the head had in step 1.
3. The text is read along these lines, and along its first columns and nearest bands of as many cells.
4. The loss of each is compared with that of the model's own attention, text by text.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import PositiveShare, checked_value
from sinkscope.measure import Natural, Number, Result, Setup, measurement
from sinkscope.measure.attention_texts import check_data, records_of, texts_of
from sinkscope.measure.margin import interval_of
from sinkscope.models.target import Target
from sinkscope.results.notation import count_of, word_list
from sinkscope.results.style import BLUE, GREEN, ORANGE, figure_of, panels
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import NEAR, Bands, BlockGrid, Copies
from sinkscope.sparse.choice import densities, draw_of, kept_columns, query_rows, sampled_rows
from sinkscope.sparse.head_lines import HeadLines
from sinkscope.sparse.lines import scores_of
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.sparse_prompts import SparsePrompts

ALPHAS = (0.9, 0.95, LoopServe().alpha)
ARMS = ("own lines", "another text's lines", "first columns and nearest bands")
"""What a text is read along; all but the first are controls."""
MOST_LOGITS = 1 << 28
"""Numbers of the logits of a text: 1 GB in float32. Of a long text the last tokens count."""
AT_ONCE = 256  # positions whose loss is computed at a time
WORST = 100  # one token of so many is among those that lost most
DISTANCES = ((1, 64), (65, 256), (257, None))
"""How far back the pair of a token and the one before it may have stood: near keys, then up to where copies begin."""
Shares = dict[int, Float[Tensor, " head"]]
"""Share of the cells that each head computes, by layer."""
Choose = Callable[[Scores, int, Copies | None], HeadLines | Bands]


@dataclass(frozen=True)
class LostOn:
    """Where the pair of a token and the one before it last stood in the text.

    Attributes:
        back: Tokens back.
        worst: Share of such tokens among the hundredth that lost most along own lines of the smallest alpha.
        tokens: Their share among all tokens.
    """

    back: str
    worst: float
    tokens: float


@dataclass(frozen=True, kw_only=True)
class LinesLoss(Result):
    """Loss of texts that are read along their own lines, and along others of as many cells.

    Attributes:
        alphas: Shares of the sampled attention that the own lines of each head hold.
        kinds: The kind of each text; empty if the file names none.
        tokens: Length of every text.
        counted: Number of tokens whose loss counts, at the end of every text.
        layers: The layers that were read along lines; the others, as those with a sliding window, keep their attention.
        full: Loss under the model's own attention, in nats a token.
        loss: Loss along own lines, along those of another text, and along first columns and nearest bands.
        cells: Share of the cells of these layers that each of them computes.
        lost_on: What the tokens repeat that lost most.
    """

    page = "measure/lines"
    table_of = "lost_on"
    percent = ("cells", "worst", "tokens")
    glossary: ClassVar[dict[str, str]] = {
        "alpha": "Share of the sampled attention that the own lines of each head hold.",
        "lines": "What the texts were read along.",
        "kind": "Kind of the texts; the first rows are of all.",
        "added": "Loss beyond that of the model's own attention, in nats a token, mean over texts.",
        "more": "Loss beyond that along own lines, mean of paired differences.",
        "margin": "Half of the 95 % interval of `added`, and for controls of `more`, over texts.",
    }

    alphas: tuple[float, ...]
    kinds: tuple[str, ...]
    tokens: int
    counted: int
    layers: tuple[int, ...]
    full: Float[np.ndarray, " text"]
    loss: Float[np.ndarray, "alpha lines text"]
    cells: Float[np.ndarray, "alpha lines text"]
    lost_on: tuple[LostOn, ...]

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for every alpha and what was read along: of all texts, then of each kind."""
        rows: list[dict[str, Any]] = []
        for kind in ("", *dict.fromkeys(kind for kind in self.kinds if kind)):
            for alpha, value in enumerate(self.alphas):
                rows += [{"alpha": value, "kind": kind or "all", **self.row(alpha, arm, kind)} for arm in range(3)]
        return rows

    def row(self, alpha: int, arm: int, kind: str = "") -> dict[str, Any]:
        """Return what texts of a kind lose along lines, and how sure that is; all texts without a kind."""
        own = np.array([not kind or each == kind for each in self.kinds])
        added = (self.loss[alpha, arm] - self.full)[own]
        more = (self.loss[alpha, arm] - self.loss[alpha, 0])[own]
        interval = interval_of(more if arm else added)
        return {
            "lines": ARMS[arm],
            "cells": float(self.cells[alpha, arm][own].mean()),
            "added": float(added.mean()),
            "more": float(more.mean()) if arm else None,
            "margin": None if interval is None else interval.margin,
        }

    @property
    def strongest(self) -> dict[str, Any]:
        """The control that loses least at the smallest alpha."""
        return min((self.row(0, arm) for arm in (1, 2)), key=lambda row: row["added"])

    def conclusion(self) -> str:
        """Return what own lines of the smallest alpha cost, beside the control that costs least."""
        own, control = self.row(0, 0), self.strongest
        beside = f"{control['more']:.3f}{_within(control['margin'])} more"
        if control["margin"] is None or control["more"] <= control["margin"]:
            beside = f"no more: {control['more']:+.3f}{_within(control['margin'])}"
        return (
            f"Own lines of alpha {self.alphas[0]:g} cost {own['added']:.3f}{_within(own['margin'])} nats for "
            f"{own['cells']:.0%} of the cells; {control['lines']}, the strongest control, {beside}."
        )

    def details(self) -> list[str]:
        """Return the texts, the other alphas, and what the tokens repeat that lost most."""
        lines = [
            f"{count_of(len(self.full), 'text')} of {self.tokens:,} tokens, of which the last {self.counted:,} count; "
            f"{count_of(len(self.layers), 'layer')} read along lines."
        ]
        for alpha in range(1, len(self.alphas)):
            own = self.row(alpha, 0)
            others = [f"{row['lines']} {row['more']:+.4f}" for row in (self.row(alpha, 1), self.row(alpha, 2))]
            lines.append(
                f"Alpha {self.alphas[alpha]:g}: {own['added']:+.4f}{_within(own['margin'], 4)} nats for "
                f"{own['cells']:.0%} of the cells; beyond that {word_list(others)}."
            )
        most = max(self.lost_on, key=lambda lost: lost.worst - lost.tokens)
        lines.append(
            f"Of the hundredth of tokens that lose most at alpha {self.alphas[0]:g}, {most.worst:.0%} repeat a pair "
            f"from {most.back} tokens back (of all tokens {most.tokens:.0%})."
        )
        return lines

    def numbers(self) -> list[Number]:
        """Return what own lines cost at each alpha, beside the control that costs least."""
        numbers: list[Number] = []
        for alpha, value in enumerate(self.alphas):
            own = self.row(alpha, 0)
            control = min((self.row(alpha, arm) for arm in (1, 2)), key=lambda row: row["added"])
            label = f"nats lost along own lines of alpha {value:g}"
            samples = {f"text {text}": float(lost) for text, lost in enumerate(self.loss[alpha, 0] - self.full)}
            numbers.append(
                Number(f"loss.{value:g}", label, own["added"], control["added"], own["margin"], False,
                       control["lines"], samples)
            )  # fmt: skip
        return numbers


def _within(margin: float | None, digits: int = 3) -> str:
    """A margin behind its number."""
    return "" if margin is None else f" ± {margin:.{digits}f}"


def draw(result: LinesLoss) -> go.Figure:
    """Draw loss by share of cells, and by kind of text at the smallest alpha."""
    fig = panels(("Loss by cells", f"Alpha {result.alphas[0]:g}, by kind of text"), spacing=0.12)
    for arm, color in enumerate((BLUE, ORANGE, GREEN)):
        every = [result.row(alpha, arm) for alpha in range(len(result.alphas))]
        bars = {"array": [_interval(result, alpha, arm) for alpha in range(len(result.alphas))], "thickness": 1}
        cells, added = [row["cells"] for row in every], [row["added"] for row in every]
        fig.add_scatter(x=cells, y=added, error_y=bars, name=ARMS[arm], marker={"color": color}, row=1, col=1)
        kinds = list(dict.fromkeys(kind or "all" for kind in result.kinds))
        named = ["" if kind == "all" else kind for kind in kinds]
        margins = [_interval(result, 0, arm, kind) for kind in named]
        bars = None if np.isnan(margins).all() else {"array": margins, "thickness": 1}
        added = [result.row(0, arm, kind)["added"] for kind in named]
        fig.add_bar(
            x=list(map(html.escape, kinds)),
            y=added,
            error_y=bars,
            marker={"color": color},
            showlegend=False,
            row=1,
            col=2,
        )
    fig.update_xaxes(title_text="share of the cells", tickformat=".0%", rangemode="tozero", row=1, col=1)
    fig.update_yaxes(title_text="nats a token beyond full attention", row=1, col=1)
    return figure_of(fig, result, width=1000, height=520, legend=-0.2, bottom=110)


def _interval(result: LinesLoss, alpha: int, arm: int, kind: str = "") -> float:
    """Half of the interval of what texts lose; not a number where there is none."""
    own = np.array([not kind or each == kind for each in result.kinds])
    interval = interval_of((result.loss[alpha, arm] - result.full)[own])
    return float("nan") if interval is None else interval.margin


@measurement(figure=draw, loading="whole", check=check_data)
def lines_loss(
    setup: Setup,
    texts: Any = None,
    *,
    data: str | Path | None = None,
    count: Natural = 4,
    length: int = 512,
    alphas: Sequence[float] = ALPHAS,
) -> LinesLoss:
    """Measure the loss of texts along their own lines, beside lines of another text and fixed ones of equal cells.

    Own lines are those of LoopServe: columns and bands that hold a share of the attention of sampled queries. Each
    control has, in every head, at least as many cells. A head that is computed densely is dense in all.

    Args:
        texts: Several texts or lists of ids. By default pieces of ordinary text.
        data: File of JSON lines, each with a "text" and, if it is known, a "kind", to use instead.
        count: Number of pieces of ordinary text, or of lines of the file; at least 2.
        length: Tokens of each text, from its beginning; at least 256.
        alphas: Shares of the sampled attention that own lines hold, below 1.

    Raises:
        UnsupportedError: A model whose queries and keys are not accessible, or that never attends to all tokens.
        SinkscopeError: Bad input; the message is one line and says what to do.
    """
    shares = tuple(sorted({float(alpha) for alpha in alphas}))
    for alpha in shares or (None,):
        checked_value(PositiveShare, alpha, "--alphas ", strict=True)
    setup.record(alphas=shares)
    rows = equal_rows(setup, texts, data, count, length)
    kinds = tuple(record.kind for record in records_of(data)[:count]) if data is not None else ("",) * len(rows)
    served = [LoopServe(alpha=alpha, decode=False, shortest=0, seed=setup.seed) for alpha in shares]
    reading = Reading(setup, rows, counted_of(setup.target, length))
    own = [[reading.own(text, method) for method in served] for text in range(len(rows))]
    full = np.zeros(len(rows))
    loss, cells = np.zeros((2, len(shares), len(ARMS), len(rows)))
    dense: dict[int, Float[Tensor, " token"]] = {}
    for text, other in enumerate(partners(kinds)):
        dense[other], choices = reading.others(other, [attended for _, attended in own[text]], served)
        for alpha, (losses, wanted) in enumerate(own[text]):
            loss[alpha, 0, text], cells[alpha, 0, text] = float(losses.mean()), mean_share(wanted)
            near = {layer: near_bands(reading.grid, each, served[alpha]) for layer, each in wanted.items()}
            for arm, chosen in ((1, choices[alpha]), (2, near)):
                losses, attended = reading.along(text, lambda scores, layer, copies, of=chosen: of[layer])
                loss[alpha, arm, text], cells[alpha, arm, text] = float(losses.mean()), mean_share(attended)
    lost: list[Float[Tensor, " token"]] = []
    for text, ((losses, _), *_) in enumerate(own):
        intact = dense[text] if text in dense else reading.full(text)
        full[text] = float(intact.mean())
        lost.append(losses - intact)
    return LinesLoss(
        alphas=shares,
        kinds=kinds,
        tokens=length,
        counted=reading.counted,
        layers=tuple(own[0][0][1]),
        full=full,
        loss=loss,
        cells=cells,
        lost_on=lost_on(rows, lost),
    )


def equal_rows(setup: Setup, texts: Any, data: Any, count: int, length: int) -> Int[Tensor, "text pos"]:
    """Return texts of equal length, so that lines of one are lines of another.

    Raises:
        SinkscopeError: There are fewer than two, or one is shorter.
    """
    if isinstance(texts, str):
        raise SinkscopeError("a single text was given: expected several, because the lines of another are a control")
    least = 4 * NEAR * 8
    if length < least:
        raise SinkscopeError(f"--length {length}: expected at least {least}, or near keys are nearly all")
    rows = texts_of(setup, texts, data, count, length, cut="end")
    shortest = min(map(len, rows))
    if shortest < length or len(rows) < 2:
        raise SinkscopeError(
            f"{count_of(len(rows), 'text')} of at least {shortest} tokens: expected two or more of --length {length}"
        )
    return torch.stack(rows)


def partners(kinds: Sequence[str]) -> list[int]:
    """Return for each text the next one of its kind, in a circle; or the next one, if its kind has no other."""
    chosen: list[int] = []
    for text, kind in enumerate(kinds):
        after = [*range(text + 1, len(kinds)), *range(text)]
        chosen.append(next((other for other in after if kinds[other] == kind), after[0]))
    return chosen


def counted_of(target: Target, length: int) -> int:
    """Return the number of tokens, at the end of a text, whose logits memory allows."""
    return min(length - 1, max(1, MOST_LOGITS // int(target.config.vocab_size)))


@dataclass(frozen=True, kw_only=True)
class Along(SparsePrompts):
    """Reads prompts along lines that a function chooses for each layer."""

    choose: Choose

    def lines(self, scores: Scores, layer: int, copies: Copies | None = None) -> HeadLines | Bands:
        """Return what the function chooses."""
        return self.choose(scores, layer, copies)


class Reading:
    """Texts of equal length that are read along lines, and the loss of each token.

    Attributes:
        counted: Number of tokens, at the end of each text, whose loss is measured.
        grid: Tiles and blocks of a text.
    """

    def __init__(self, setup: Setup, rows: Int[Tensor, "text pos"], counted: int) -> None:
        self._setup, self._target, self._rows, self.counted = setup, setup.target, rows, counted
        self.grid = BlockGrid(rows.shape[1], rows.shape[1])
        self._passes = 0

    def own(self, text: int, served: LoopServe) -> tuple[Float[Tensor, " token"], Shares]:
        """Read a text along its own lines."""
        return self.along(text, served.lines)

    def along(self, text: int, choose: Choose) -> tuple[Float[Tensor, " token"], Shares]:
        """Return the loss of each counted token along chosen lines, and the cells of each head by layer."""
        cells: Shares = {}

        def chosen(scores: Scores, layer: int, copies: Copies | None) -> HeadLines | Bands:
            lines = choose(scores, layer, copies)
            cells[layer] = lines.attended().cpu()
            return lines

        with Along(choose=chosen).on(self._target):
            return self.full(text), cells

    def full(self, text: int) -> Float[Tensor, " token"]:
        """Return the loss of each counted token, as the model is."""
        ids, length = self._rows[text : text + 1], self._rows.shape[1]
        logits = self._target.logits_at(ids, torch.arange(length - 1 - self.counted, length - 1))[0]
        following = ids[0, length - self.counted :].to(logits.device)
        parts: list[Tensor] = []
        for some, after in zip(logits.split(AT_ONCE), following.split(AT_ONCE), strict=True):
            parts.append(cross_entropy(some.float(), after, reduction="none").cpu())
        self._passes += 1
        self._setup.progress("passes", self._passes, 0)
        return torch.cat(parts).double()

    def others(
        self, text: int, wanted: Sequence[Shares], served: Sequence[LoopServe]
    ) -> tuple[Float[Tensor, " token"], list[dict[int, Bands]]]:
        """Read a text as the model is; return its losses, and its lines of as many cells as wanted, for each alpha."""
        ids = self._rows[text]
        copies = Copies.of(ids, len(ids), self._target.device)
        by_alpha: list[dict[int, Bands]] = [{} for _ in wanted]

        def see(layer: int, scores: Scores) -> None:
            for lines, cells, method in zip(by_alpha, wanted, served, strict=True):
                lines[layer] = bands_of_cells(scores, layer, cells[layer].to(scores.key.device), method, copies)

        with scores_of(self._target, see, list(wanted[0])):
            return self.full(text), by_alpha


@torch.no_grad()
def bands_of_cells(
    scores: Scores, layer: int, cells: Float[Tensor, " head"], served: LoopServe, copies: Copies
) -> Bands:
    """Choose columns and bands like `LoopServe`, for each head as few as have at least so many cells."""
    grid = BlockGrid(scores.queries, scores.keys)
    drawn = draw_of(served.seed, layer, scores.queries, scores.keys)
    rows = sampled_rows(grid, served.sample, drawn, served.dense_rows, copies)
    sample = query_rows(scores, rows)
    always = kept_columns(scores, grid.sparse_queries(served.dense_rows), served.begin, served.checked)
    chosen: Bands | None = None
    for _ in range(2):  # at first by all of a line's cells, then by those that the other kind leaves to it
        by_column, by_band = densities(sample, chosen, always)
        rank = torch.cat([by_column, by_band], 1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)

        def heaviest(number: Int[Tensor, "head 1"], rank: Tensor = rank) -> Bands:
            columns, bands = (rank < number).split([grid.keys, grid.blocks], 1)
            return Bands(columns, bands, grid, served.dense_rows)

        fixed = by_column.isinf().sum(1, keepdim=True) + by_band.isinf().sum(1, keepdim=True)
        chosen = heaviest(fewest(fixed, rank.shape[1], heaviest, cells))
    assert chosen is not None
    return chosen


def near_bands(grid: BlockGrid, cells: Float[Tensor, " head"], served: LoopServe) -> Bands:
    """Take the first columns and the nearest bands of each head, as few as have at least so many cells."""
    key, band = torch.arange(grid.keys), torch.arange(grid.blocks)

    def lines(first: Int[Tensor, "head 1"], nearest: Int[Tensor, "head 1"]) -> Bands:
        return Bands(key < first, band < nearest, grid, served.dense_rows)

    begin = torch.full((len(cells), 1), served.begin)
    reached = fewest(torch.full_like(begin, NEAR), grid.blocks, lambda nearest: lines(begin, nearest), cells)
    nearest = torch.where(reached > NEAR, reached - 1, reached)  # columns fill what is less than a band
    return lines(fewest(begin, grid.keys, lambda first: lines(first, nearest), cells), nearest)


def fewest(
    least: Int[Tensor, "head 1"], most: int, lines: Callable[[Tensor], Bands], cells: Float[Tensor, " head"]
) -> Int[Tensor, "head 1"]:
    """Search for the smallest number of lines of each head, from `least` to `most`, that compute so many cells."""
    low, high = least, torch.full_like(least, most)
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = (lines(middle).attended() >= cells)[:, None]
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return low


def mean_share(cells: Shares) -> float:
    """Return the mean over heads and layers."""
    return float(torch.stack(list(cells.values())).double().mean())


def lost_on(rows: Int[Tensor, "text pos"], lost: Sequence[Float[Tensor, " token"]]) -> tuple[LostOn, ...]:
    """Compare the tokens that lost most with all tokens by where their pair last stood."""
    back = torch.cat([pair_distances(row)[-len(part) :] for row, part in zip(rows, lost, strict=True)])
    worst = back[torch.cat(list(lost)).topk(max(1, len(back) // WORST)).indices]
    records: list[LostOn] = []
    for low, high in DISTANCES:
        within = [(some >= low) & (some <= (high or len(back))) for some in (worst, back)]
        shares = [float(part.double().mean()) for part in within]
        records.append(LostOn(f"{low:,} to {high:,}" if high else f"{low:,} or more", *shares))
    return tuple(records)


def pair_distances(ids: Int[Tensor, " pos"]) -> Int[Tensor, " pos"]:
    """Return for each token how far back it last followed the same token; 0 if it never did."""
    last: dict[tuple[int, int], int] = {}
    distances = torch.zeros_like(ids)
    tokens = ids.tolist()
    for at, pair in enumerate(pairwise(tokens), 1):
        distances[at] = at - last.get(pair, at)
        last[pair] = at
    return distances
