"""Two samples for the choice of bands on a real model, and where the time of a prompt goes.

    python -m experiments.loopserve.arms MODEL [--dialogue-files FILE ...] [--page PAGE]

For each prompt: what columns and bands hold of the attention of queries that did not choose them, by head, where
alpha is 0.955: of 64 drawn queries, as in LoopServe, and of the last 64, as in MInference. Also (Fig. 9 b) the
processor time of the parts of LoopServe's attention with its default alpha in every third layer, that of dense
attention there, and that of the whole prompt with the model's own attention.

Texts are those of `experiments.loopserve.real`. Steps that are done are not done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from experiments.drawn import markdown, put_table
from experiments.gpu.steps import Steps
from experiments.loopserve.real import TEXTS, piece
from experiments.record import Row
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import BlockGrid, Copies
from sinkscope.sparse.choice import StoredRows, choose_bands, draw_of, kept_columns, sampled_rows, unsampled_queries
from sinkscope.sparse.lines import scores_of
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.sparse import line_attention, recovered

ALPHA = 0.955  # of both samples: the paper's
LAST = 16  # dense rows
EVERY = 3
HEAD = (
    "tokens",
    "text",
    "cells",
    "dense",
    "sample",
    "check",
    "search",
    "attention",
    "layer over dense",
    "prompt over dense",
)


@torch.no_grad()
def prompt(target: Target, ids: Tensor) -> Row:
    """What both samples hold, by layer and head; and in some layers the cells and seconds of stages at the default."""
    held: dict[str, list[float]] = {"drawn": [], "last": [], "drawn_cells": [], "last_cells": []}
    spent: dict[str, list[float]] = {"dense": [], "rows": [], "checked": [], "search": [], "attention": []}
    cells, beside = list[float](), list[float]()
    copies = Copies.of(ids[0].cpu(), ids.shape[1], ids.device)

    def timed(name: str, work: Any) -> Any:
        seconds, made = seconds_of(work)
        spent[name].append(seconds)
        return made

    def stages(scores: Scores, rows: Tensor) -> None:
        query, key = scores.query[None], scores.key[None]
        dense = partial(torch.nn.functional.scaled_dot_product_attention, query, key, key)
        timed("dense", partial(dense, is_causal=True, enable_gqa=True))
        own = timed("rows", partial(StoredRows, scores, rows))
        sparse = BlockGrid(scores.queries, scores.keys).sparse_queries(LAST)
        checked = partial(kept_columns, scores, sparse, LoopServe.begin, LoopServe.checked)
        always = timed("checked", checked)
        chosen = timed(
            "search", partial(choose_bands, own, LoopServe.alpha, always, LoopServe.dense_above, LAST, copies)
        )
        timed("attention", partial(line_attention, scores, scores.key, chosen))
        cells.append(float(chosen.attended().mean()))

    def measure(layer: int, scores: Scores) -> None:
        grid, seed = BlockGrid(scores.queries, scores.keys), draw_of(0, layer, scores.queries, scores.keys)
        sparse = grid.sparse_queries(LAST)
        rows = {"drawn": sampled_rows(grid, 64, seed, LAST), "last": torch.arange(sparse - 64, sparse)}
        others = unsampled_queries(sparse - 64, rows["drawn"][rows["drawn"] < sparse - 64], seed)
        for name, own in rows.items():
            chosen = choose_bands(
                StoredRows(scores, own), ALPHA, kept_columns(scores, sparse, 4, 0), float("inf"), LAST
            )
            held[name] += recovered(scores, chosen, others).tolist()
            held[f"{name}_cells"] += chosen.attended().tolist()
        if layer % EVERY == 0:
            stages(scores, sampled_rows(grid, LoopServe.sample, seed, LAST, copies))

    def see(layer: int, scores: Scores) -> None:
        beside.append(seconds_of(partial(measure, layer, scores))[0])

    with scores_of(target, see, list(range(target.n_layers))):
        seconds, _ = seconds_of(partial(target.base, input_ids=ids, use_cache=False))
    means = {name: fmean(values) for name, values in held.items()}
    return {"heads": held, "mean": means, "stages": spent, "cells": cells, "prompt": seconds - sum(beside)}


def over_dense(row: Row) -> tuple[float, float]:
    """Times of a layer (median over layers) and of a whole prompt under LoopServe, over those with dense attention."""
    ratios, more = list[float](), 0.0
    for dense, *ours in zip(*row["stages"].values(), strict=True):
        ratios.append(sum(ours) / dense)
        more += sum(ours) - dense
    return median(ratios), 1 + EVERY * more / row["prompt"]


def table(rows: Row) -> str:
    """Milliseconds of a layer, and what they come to in a prompt."""
    lines: list[list[str]] = []
    for name, row in rows.items():
        _, kind, length = name.split(", ")
        times = [f"{1e3 * median(seconds):.0f}" for seconds in row["stages"].values()]
        ratios = [f"{ratio:.2f}" for ratio in over_dense(row)]
        lines.append([length, kind, f"{fmean(row['cells']):.0%}", *times, *ratios])
    return markdown(HEAD, lines)


def main(
    model: str,
    *,
    lengths: Sequence[int] = (2048, 4096, 8192),
    kinds: Sequence[str] = tuple(TEXTS),
    dialogue_files: Sequence[Path] = (),
    page: Path | None = None,
    out: Path = Path("figures/loopserve_arms.json"),
) -> None:
    """Make what the module describes.

    Args:
        model: Name, folder or file.
        lengths: Lengths of the prompts.
        kinds: Kinds of text.
        dialogue_files: JSON lines of dialogues.
        page: Page whose table of stages is replaced.
    """
    torch.set_num_threads(1)
    steps = Steps("loopserve-arms", out, {"alpha": ALPHA}, "cpu", "float32")
    target = target_of(load(model))
    for length, kind in product(lengths, kinds):
        ids = piece(target, TEXTS[kind](dialogue_files), length, 1)
        steps.do(f"prompt, {kind}, {length}", partial(prompt, target, ids))
    if page is not None:
        put_table(page, "loopserve.arms", table(steps.rows))
    steps.end()


if __name__ == "__main__":
    run(main)
