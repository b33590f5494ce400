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
from torch import Tensor
from torch.nn.functional import cross_entropy

from experiments.drawn import draw
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.errors import SinkscopeError
from sinkscope.measure import Setup
from sinkscope.measure.attention_texts import records_of, texts_of
from sinkscope.measure.margin import interval_of
from sinkscope.models.target import Target
from sinkscope.results.style import BLUE, GREEN, ORANGE, panels
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import NEAR, BlockGrid, Copies, Lines
from sinkscope.sparse.choice import densities, draw_of, kept_columns, query_rows, sampled_rows
from sinkscope.sparse.lines import scores_of
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.sparse_prompts import SparsePrompts

ARMS = {"own lines": BLUE, "another text's lines": ORANGE, "first columns and nearest bands": GREEN}
"""What a text is read along, and its colour; all but the first are controls."""
MOST_LOGITS = 1 << 28
"""Numbers of the logits of a text: 1 GB in float32. Of a long text the last tokens count."""
LEAST = 4 * NEAR * 8
"""Tokens of a text; in a shorter one near keys are nearly all."""
Cells = dict[int, Tensor]
"""Share of the cells that each head computes, by layer."""


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
    setup = Setup.open(model, loading="whole")
    kinds = [record.kind for record in records_of(data)[:count]]
    rows = texts_of(setup, None, data, count, length, cut="end")
    if length < LEAST or len(rows) < 2 or min(map(len, rows)) < length:
        raise SinkscopeError(f"{data.name}: expected two texts or more of --length {length}, at least {LEAST} tokens")
    result = measured(setup.target, torch.stack(rows), kinds, sorted(alphas))
    settings = {"model": setup.target.name, "data": data.name, "count": count, "length": length, "seed": 0}
    write_record(out, "lines-loss", result, settings)
    draw(out, figure)


def measured(target: Target, rows: Tensor, kinds: Sequence[str], alphas: Sequence[float]) -> Row:
    """The loss of texts of equal length, and the share of cells, by alpha, lines and text."""
    length = rows.shape[1]
    counted = min(length - 1, max(1, MOST_LOGITS // int(target.config.vocab_size)))
    loss, cells = np.zeros((2, len(alphas), len(ARMS), len(rows)))
    own: Cells = {}
    for alpha, text in np.ndindex(len(alphas), len(rows)):
        served = LoopServe(alpha=alphas[alpha], decode=False, shortest=0)
        loss[alpha, 0, text], own = along(target, rows[text], counted, served.lines)
        other = lines_of(target, rows[partner(text, kinds)], own, served)
        near = {layer: near_bands(BlockGrid(length, length), each, served) for layer, each in own.items()}
        read = [own]
        for arm, chosen in enumerate((other, near), 1):
            loss[alpha, arm, text], shares = along(
                target, rows[text], counted, lambda _, layer, __, of=chosen: of[layer]
            )
            read.append(shares)
        cells[alpha, :, text] = [float(torch.stack([*shares.values()]).double().mean()) for shares in read]
    full = [loss_of(target, ids, counted) for ids in rows]
    found = {"alphas": list(alphas), "kinds": list(kinds), "tokens": length, "counted": counted, "layers": list(own)}
    return {**found, "full": full, "loss": loss, "cells": cells}


@dataclass(frozen=True, kw_only=True)
class Along(SparsePrompts):
    """Reads prompts along lines that a function chooses for each layer."""

    choose: Any

    def lines(self, scores: Scores, layer: int, copies: Copies | None = None) -> Lines:
        """What the function chooses."""
        return self.choose(scores, layer, copies)


def loss_of(target: Target, ids: Tensor, counted: int) -> float:
    """The loss of the last counted tokens of a text."""
    first = len(ids) - counted
    logits = target.logits_at(ids[None], torch.arange(first - 1, len(ids) - 1))[0].float()
    return float(cross_entropy(logits, ids[first:].to(logits.device), reduction="none").double().mean())


def along(target: Target, ids: Tensor, counted: int, choose: Any) -> tuple[float, Cells]:
    """The loss of a text along chosen lines, and the share of the cells of each head by layer."""
    cells: Cells = {}

    def chosen(scores: Scores, layer: int, copies: Copies | None) -> Lines:
        lines = choose(scores, layer, copies)
        cells[layer] = lines.attended().cpu()
        return lines

    with Along(choose=chosen).on(target):
        return loss_of(target, ids, counted), cells


def lines_of(target: Target, ids: Tensor, wanted: Cells, served: LoopServe) -> dict[int, Lines]:
    """The heaviest lines of a text that the model reads with its own attention, of as many cells as wanted."""
    found: dict[int, Lines] = {}
    copies = Copies.of(ids, len(ids), target.device)

    def see(layer: int, scores: Scores) -> None:
        found[layer] = bands_of_cells(scores, layer, wanted[layer].to(scores.key.device), served, copies)

    with scores_of(target, see, list(wanted)):
        loss_of(target, ids, 1)
    return found


def partner(text: int, kinds: Sequence[str]) -> int:
    """Return the next text of the same kind, in a circle; or the next one, if its kind has no other."""
    after = [*range(text + 1, len(kinds)), *range(text)]
    return next((other for other in after if kinds[other] == kinds[text]), after[0])


@torch.no_grad()
def bands_of_cells(scores: Scores, layer: int, cells: Tensor, served: LoopServe, copies: Copies) -> Lines:
    """Choose columns and bands like `LoopServe`, for each head as few as have at least so many cells."""
    grid, dense_rows = BlockGrid(scores.queries, scores.keys), served.dense_rows
    drawn = draw_of(served.seed, layer, scores.queries, scores.keys)
    sample = query_rows(scores, sampled_rows(grid, served.sample, drawn, dense_rows, copies))
    always = kept_columns(scores, grid.sparse_queries(dense_rows), served.begin, served.checked)
    rank = torch.zeros(scores.heads, grid.keys + grid.blocks, device=cells.device)

    def heaviest(number: Tensor) -> Lines:
        columns, offsets = (rank < number).split([grid.keys, grid.blocks], 1)
        return Lines(columns, offsets, grid, dense_rows)

    chosen = heaviest(torch.zeros_like(rank[:, :1]))
    for _ in range(2):  # at first by all of a line's cells, then by those that the other kind leaves to it
        density = torch.cat(densities(sample, chosen, always), 1)
        rank = density.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        chosen = heaviest(fewest(density.isinf().sum(1, keepdim=True), rank.shape[1], heaviest, cells))
    return chosen


def near_bands(grid: BlockGrid, cells: Tensor, served: LoopServe) -> Lines:
    """Take the first columns and the nearest bands of each head, as few as have at least so many cells."""

    def lines(first: Tensor, nearest: Tensor) -> Lines:
        return Lines(torch.arange(grid.keys) < first, torch.arange(grid.blocks) < nearest, grid, served.dense_rows)

    begin = torch.full((len(cells), 1), served.begin)
    reached = fewest(torch.full_like(begin, NEAR), grid.blocks, lambda nearest: lines(begin, nearest), cells)
    nearest = (reached - 1).clamp(min=NEAR)  # columns fill what is less than a band
    return lines(fewest(begin, grid.keys, lambda first: lines(first, nearest), cells), nearest)


def fewest(least: Tensor, most: int, lines: Callable[[Tensor], Lines], cells: Tensor) -> Tensor:
    """Search for the smallest number of lines of each head, from `least` to `most`, that compute so many cells."""
    low, high = least, torch.full_like(least, most)
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = (lines(middle).attended() >= cells)[:, None]
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return low


def figure(data: Row) -> Any:
    """Loss beyond full attention by the share of cells, for each alpha."""
    result, fig = data["result"], panels(("Loss by cells",))
    for arm, (name, color) in enumerate(ARMS.items()):
        change = np.array(result["loss"])[:, arm] - np.array(result["full"])
        bars = {"array": [getattr(interval_of(one), "margin", np.nan) for one in change], "thickness": 1}
        cells = np.array(result["cells"])[:, arm].mean(-1)
        fig.add_scatter(x=cells, y=change.mean(-1), error_y=bars, name=name, marker={"color": color})
    fig.update_xaxes(title_text="share of the cells", tickformat=".0%", rangemode="tozero")
    fig.update_yaxes(title_text="nats a token beyond full attention")
    return fig.update_layout(width=760, height=480)


if __name__ == "__main__":
    run(main)
