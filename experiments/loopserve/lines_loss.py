"""What it costs to read texts along lines of their own, beside lines of another text and fixed ones of as many cells.

    python -m experiments.loopserve.lines_loss MODEL --data texts.jsonl --out figures/lines_loss_smollm2.json

1. Each text is read along its own columns and bands, which `LoopServe` chooses while it reads, for every alpha.
2. Another text, of the same kind if there is one, is read by the model's own attention. Of each head's columns and
   bands there, as many are taken as reach the number of cells that the head had in step 1.
3. The text is read along these lines, and along its first columns and nearest bands of as many cells.
4. The loss of each is compared with that of the model's own attention, text by text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.drawn import draw, markdown
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.measure.attention_texts import records_of, texts_of
from sinkscope.measure.margin import interval_of
from sinkscope.results.style import BLUE, GREEN, ORANGE, panels
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import NEAR, BlockGrid, Copies, Lines
from sinkscope.sparse.choice import densities, draw_of, kept_columns, query_rows, sampled_rows
from sinkscope.sparse.lines import scores_of
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.sparse_prompts import SparsePrompts

ARMS = ("own lines", "another text's lines", "first columns and nearest bands")
"""What a text is read along; all but the first are controls."""
MOST_LOGITS = 1 << 28
"""Numbers of the logits of a text: 1 GB in float32. Of a long text the last tokens count."""
LEAST = 4 * NEAR * 8
"""Tokens of a text; in a shorter one near keys are nearly all."""
Cells = dict[int, Float[Tensor, " head"]]
"""Share of the cells that each head computes, by layer."""
Choose = Callable[[Scores, int, Copies | None], Lines]


def main(
    model: str,
    *,
    data: Path,
    out: Path,
    count: int = 12,
    length: int = 1024,
    alphas: Sequence[float] = (0.9, 0.95, 0.99),
) -> None:
    """Measure the loss along lines, and write and draw it.

    Args:
        model: a folder, .gguf file, short name or hub id.
        data: JSON lines, each with a "text" and a "kind".
        out: the JSON.
        count: number of texts, from the beginning of the file; at least 2.
        length: tokens of each text, from its beginning.
        alphas: shares of the sampled attention that own lines hold, below 1.
    """
    if length < LEAST:
        raise SinkscopeError(f"--length {length}: expected at least {LEAST}, or near keys are nearly all")
    setup = Setup.open(model, loading="whole")
    kinds = [record.kind for record in records_of(data)[:count]]
    rows = texts_of(setup, None, data, count, length, cut="end")
    if len(rows) < 2 or min(map(len, rows)) < length:
        raise SinkscopeError(f"{data.name}: expected two texts or more of at least --length {length} tokens each")
    result = measured(setup, torch.stack(rows), kinds, sorted(alphas))
    settings = {"model": setup.target.name, "data": data.name, "count": count, "length": length, "seed": 0}
    write_record(out, "lines-loss", result, settings)
    draw(out, figure)
    print(table(result))


def measured(setup: Setup, rows: Int[Tensor, "text pos"], kinds: Sequence[str], alphas: Sequence[float]) -> Row:
    """The loss of texts of equal length, and the share of cells, by alpha, lines and text."""
    served = [LoopServe(alpha=alpha, decode=False, shortest=0, seed=setup.seed) for alpha in alphas]
    counted = min(rows.shape[1] - 1, max(1, MOST_LOGITS // int(setup.target.config.vocab_size)))
    reading = Reading(setup, rows, counted)
    own = [[reading.along(text, method.lines) for method in served] for text in range(len(rows))]
    full = np.array([reading.full(text) for text in range(len(rows))])
    loss, cells = np.zeros((2, len(alphas), len(ARMS), len(rows)))
    for text, other in enumerate(partners(kinds)):
        borrowed = reading.lines_of(other, [wanted for _, wanted in own[text]], served)
        for alpha, (own_loss, wanted) in enumerate(own[text]):
            near = {layer: near_bands(reading.grid, each, served[alpha]) for layer, each in wanted.items()}
            loss[alpha, 0, text], cells[alpha, 0, text] = own_loss, mean_share(wanted)
            for arm, chosen in ((1, borrowed[alpha]), (2, near)):
                value, attended = reading.along(text, lambda scores, layer, copies, of=chosen: of[layer])
                loss[alpha, arm, text], cells[alpha, arm, text] = value, mean_share(attended)
        setup.progress("texts", text + 1, len(rows))
    return {
        "alphas": list(alphas), "kinds": list(kinds), "tokens": rows.shape[1], "counted": counted,
        "layers": list(own[0][0][1]), "full": full, "loss": loss, "cells": cells,
    }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Along(SparsePrompts):
    """Reads prompts along lines that a function chooses for each layer."""

    choose: Choose

    def lines(self, scores: Scores, layer: int, copies: Copies | None = None) -> Lines:
        """What the function chooses."""
        return self.choose(scores, layer, copies)


class Reading:
    """Texts of equal length that are read along lines, and their loss over the last counted tokens."""

    def __init__(self, setup: Setup, rows: Int[Tensor, "text pos"], counted: int) -> None:
        self.target, self.rows, self.counted = setup.target, rows, counted
        self.grid = BlockGrid(rows.shape[1], rows.shape[1])

    def full(self, text: int) -> float:
        """The loss of a text, as the model is."""
        ids, length = self.rows[text : text + 1], self.rows.shape[1]
        logits = self.target.logits_at(ids, torch.arange(length - 1 - self.counted, length - 1))[0]
        following = ids[0, length - self.counted :].to(logits.device)
        return float(cross_entropy(logits.float(), following, reduction="none").double().mean())

    def along(self, text: int, choose: Choose) -> tuple[float, Cells]:
        """The loss of a text along chosen lines, and the cells of each head by layer."""
        cells: Cells = {}

        def chosen(scores: Scores, layer: int, copies: Copies | None) -> Lines:
            lines = choose(scores, layer, copies)
            cells[layer] = lines.attended().cpu()
            return lines

        with Along(choose=chosen).on(self.target):
            return self.full(text), cells

    def lines_of(self, text: int, wanted: Sequence[Cells], served: Sequence[LoopServe]) -> list[dict[int, Lines]]:
        """The heaviest lines of a text that the model reads with its own attention, of as many cells as wanted."""
        ids, by_alpha = self.rows[text], [dict[int, Lines]() for _ in wanted]
        copies = Copies.of(ids, len(ids), self.target.device)

        def see(layer: int, scores: Scores) -> None:
            for lines, cells, method in zip(by_alpha, wanted, served, strict=True):
                lines[layer] = bands_of_cells(scores, layer, cells[layer].to(scores.key.device), method, copies)

        with scores_of(self.target, see, list(wanted[0])):
            self.full(text)
        return by_alpha


def partners(kinds: Sequence[str]) -> list[int]:
    """Return for each text the next one of its kind, in a circle; or the next one, if its kind has no other."""
    chosen: list[int] = []
    for text, kind in enumerate(kinds):
        after = [*range(text + 1, len(kinds)), *range(text)]
        chosen.append(next((other for other in after if kinds[other] == kind), after[0]))
    return chosen


@torch.no_grad()
def bands_of_cells(
    scores: Scores, layer: int, cells: Float[Tensor, " head"], served: LoopServe, copies: Copies
) -> Lines:
    """Choose columns and bands like `LoopServe`, for each head as few as have at least so many cells."""
    grid = BlockGrid(scores.queries, scores.keys)
    drawn = draw_of(served.seed, layer, scores.queries, scores.keys)
    rows = sampled_rows(grid, served.sample, drawn, served.dense_rows, copies)
    sample = query_rows(scores, rows)
    always = kept_columns(scores, grid.sparse_queries(served.dense_rows), served.begin, served.checked)
    chosen: Lines | None = None
    for _ in range(2):  # at first by all of a line's cells, then by those that the other kind leaves to it
        by_column, by_band = densities(sample, chosen, always)
        rank = torch.cat([by_column, by_band], 1).argsort(dim=1, descending=True, stable=True).argsort(dim=1)

        def heaviest(number: Int[Tensor, "head 1"], rank: Tensor = rank) -> Lines:
            columns, bands = (rank < number).split([grid.keys, grid.blocks], 1)
            return Lines(columns, bands, grid, served.dense_rows)

        fixed = by_column.isinf().sum(1, keepdim=True) + by_band.isinf().sum(1, keepdim=True)
        chosen = heaviest(fewest(fixed, rank.shape[1], heaviest, cells))
    assert chosen is not None
    return chosen


def near_bands(grid: BlockGrid, cells: Float[Tensor, " head"], served: LoopServe) -> Lines:
    """Take the first columns and the nearest bands of each head, as few as have at least so many cells."""
    key, band = torch.arange(grid.keys), torch.arange(grid.blocks)

    def lines(first: Int[Tensor, "head 1"], nearest: Int[Tensor, "head 1"]) -> Lines:
        return Lines(key < first, band < nearest, grid, served.dense_rows)

    begin = torch.full((len(cells), 1), served.begin)
    reached = fewest(torch.full_like(begin, NEAR), grid.blocks, lambda nearest: lines(begin, nearest), cells)
    nearest = torch.where(reached > NEAR, reached - 1, reached)  # columns fill what is less than a band
    return lines(fewest(begin, grid.keys, lambda first: lines(first, nearest), cells), nearest)


def fewest(
    least: Int[Tensor, "head 1"], most: int, lines: Callable[[Tensor], Lines], cells: Float[Tensor, " head"]
) -> Int[Tensor, "head 1"]:
    """Search for the smallest number of lines of each head, from `least` to `most`, that compute so many cells."""
    low, high = least, torch.full_like(least, most)
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = (lines(middle).attended() >= cells)[:, None]
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return low


def mean_share(cells: Cells) -> float:
    """The mean over heads and layers."""
    return float(torch.stack(list(cells.values())).double().mean())


def added(result: Row, alpha: int, arm: int) -> tuple[float, float, float | None]:
    """Cells, loss beyond full attention, of a control beyond own lines, and the margin of this over texts."""
    loss = np.array(result["loss"])
    change = loss[alpha, arm] - (loss[alpha, 0] if arm else np.array(result["full"]))
    interval = interval_of(change)
    return float(np.mean(result["cells"][alpha][arm])), float(change.mean()), interval and interval.margin


def table(result: Row) -> str:
    """A row for each alpha: cells, what own lines cost in nats a token, and what each control costs beyond that."""
    lines: list[Sequence[str]] = []
    for alpha, value in enumerate(result["alphas"]):
        row = [f"{value:g}", f"{added(result, alpha, 0)[0]:.0%}"]
        for arm in range(len(ARMS)):
            _, nats, margin = added(result, alpha, arm)
            row.append(f"{nats:.4f}" + ("" if margin is None else f" ± {margin:.4f}"))
        lines.append(row)
    return markdown(("alpha", "cells", ARMS[0], *(f"{arm}, beyond own" for arm in ARMS[1:])), lines)


def figure(data: Row) -> Any:
    """Loss beyond full attention by the share of cells, for each alpha."""
    result, fig = data["result"], panels(("Loss by cells",))
    loss = np.array(result["loss"])
    for arm, color in enumerate((BLUE, ORANGE, GREEN)):
        change = loss[:, arm] - np.array(result["full"])
        bars = [getattr(interval_of(one), "margin", np.nan) for one in change]
        cells = np.array(result["cells"])[:, arm].mean(-1)
        error = {"array": bars, "thickness": 1}
        fig.add_scatter(x=cells, y=change.mean(-1), error_y=error, name=ARMS[arm], marker={"color": color})
    fig.update_xaxes(title_text="share of the cells", tickformat=".0%", rangemode="tozero")
    fig.update_yaxes(title_text="nats a token beyond full attention")
    return fig.update_layout(width=760, height=480)


if __name__ == "__main__":
    run(main)
