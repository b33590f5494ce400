"""What it costs to read texts along lines of their own, beside lines of another text and fixed ones of as many cells.

    python -m experiments.papers.loopserve.lines_loss MODEL --dialogue-files FILE ... --out FILE

1. Each text is read along its own columns and bands, which `LoopServe` chooses while it reads, for every alpha.
2. The next text of the same kind is read along the heaviest of its own lines, for each head as few as reach the number
   of cells that the head had in step 1.
3. The text is read along these lines, and along the first columns and the nearest bands, also of as many cells.
4. The loss of each is compared with that of the model's own attention, text by text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments.papers.loopserve.texts import TEXTS, piece
from experiments.record import Row, write_record
from experiments.script import run
from sinkscope.models.target import Target
from sinkscope.opening.load import load, target_of
from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.bands import NEAR, Lines
from sinkscope.sparse.choice import StoredRows, densities, kept_columns
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.sparse_prompts import SparsePrompts

ARMS = ("own lines", "another text's lines", "first columns and nearest bands")
"""What a text is read along, in this order; all but the first are controls."""
Chosen = dict[int, Lines]
"""Lines by layer."""


def main(
    model: str,
    *,
    out: Path,
    dialogue_files: Sequence[Path],
    count: int = 3,
    length: int = 1024,
    alphas: Sequence[float] = (0.9, 0.99),
) -> None:
    """Measure the loss along lines.

    Args:
        model: Name, folder or file.
        out: The JSON.
        dialogue_files: JSON lines of dialogues.
        count: Number of texts of each kind; with 1, the other text is of the next kind.
        length: Tokens of each text.
        alphas: Shares of the sampled attention that own lines hold, below 1.
    """
    target = target_of(load(model))
    texts = [piece(target, kind, dialogue_files, length, at)[0] for kind, at in product(TEXTS, range(count))]
    result = measured(target, torch.stack(texts), count, alphas)
    write_record(out, "lines-loss", result, {"count": count, "length": length})


def measured(target: Target, texts: Tensor, count: int, alphas: Sequence[float]) -> Row:
    """The loss of texts, `count` of each kind, and the share of cells, by alpha, lines and text."""
    loss, cells = np.zeros((2, len(alphas), len(ARMS), len(texts)))
    own: Chosen = {}
    others = texts.unflatten(0, (-1, count)).roll(-1, int(count > 1)).flatten(0, 1)
    for alpha, text in np.ndindex(len(alphas), len(texts)):
        served = LoopServe(alpha=alphas[alpha], decode=False, shortest=0)
        loss[alpha, 0, text], own = along(target, texts[text], served.lines)
        _, lent = along(target, others[text], partial(heaviest, own, served))
        loss[alpha, 1, text], _ = along(target, texts[text], lambda _, layer, of=lent: of[layer])
        loss[alpha, 2, text], near = along(target, texts[text], partial(nearest, own, served))
        for arm, lines in enumerate((own, lent, near)):
            cells[alpha, arm, text] = np.mean([each.attended().mean().item() for each in lines.values()])
    full = [loss_of(target, ids) for ids in texts]
    return {"alphas": list(alphas), "layers": list(own), "full": full, "loss": loss, "cells": cells}


class Along(SparsePrompts):
    """Reads prompts along lines that a function of scores and layer chooses, and keeps these."""

    def __init__(self, choose: Any) -> None:
        self.choose = choose
        self.found: Chosen = {}

    def lines(self, scores: Scores, layer: int) -> Lines:
        """What the function chooses."""
        return self.found.setdefault(layer, self.choose(scores, layer))


@torch.no_grad()
def loss_of(target: Target, ids: Tensor) -> float:
    """The loss of a text, mean over tokens."""
    return float(target.hf(input_ids=ids[None], labels=ids[None], use_cache=False).loss)


def along(target: Target, ids: Tensor, choose: Any) -> tuple[float, Chosen]:
    """The loss of a text along the lines that a function of scores and layer chooses, and these."""
    prompts = Along(choose)
    with prompts.on(target):
        return loss_of(target, ids), prompts.found


@torch.no_grad()
def heaviest(own: Chosen, served: LoopServe, scores: Scores, layer: int) -> Lines:
    """Choose columns and bands like `LoopServe`, for each head as few as have at least as many cells as own lines."""
    chosen = replace(own[layer], columns=own[layer].columns & False, offsets=own[layer].offsets & False)
    queries = chosen.grid.sparse_queries(served.dense_rows)
    sample = StoredRows(scores, sample_queries(queries, served.sample, served.seed_of(scores, layer)))
    always = kept_columns(scores, queries, served.begin, served.checked)
    for _ in range(2):  # at first by all of a line's cells, then by those that the other kind leaves to it
        chosen = as_many(torch.cat(densities(sample, chosen, always), 1), own[layer])
    return chosen


def nearest(own: Chosen, served: LoopServe, scores: Scores, layer: int) -> Lines:
    """Choose the first columns and, for each head, as few of the nearest bands as have as many cells as own lines."""
    keys = scores.keys
    worth = -torch.arange(-keys, own[layer].grid.blocks, dtype=torch.float32)
    worth[:keys] = -torch.inf
    worth[: served.begin] = torch.inf
    worth[keys : keys + NEAR] = torch.inf
    return as_many(worth.expand(scores.heads, -1), own[layer])


def as_many(worth: Tensor, own: Lines) -> Lines:
    """Take the lines that are worth most, columns before bands in `worth`, as few as have at least as many cells."""
    rank = worth.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    cells = own.attended()

    def best(number: Tensor) -> Lines:
        columns, bands = (rank < number).split([own.grid.keys, own.grid.blocks], 1)
        return replace(own, columns=columns, offsets=bands)

    low = worth.isposinf().sum(1, keepdim=True)  # what is always chosen
    high = torch.full_like(low, worth.shape[1])
    while bool((low < high).any()):
        middle = (low + high) // 2
        enough = (best(middle).attended() >= cells)[:, None]
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    return best(low)


if __name__ == "__main__":
    run(main)
