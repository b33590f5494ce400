"""From which share of the cells, and from which length on, bands win on a CPU.

    python -m experiments.loopserve.cpu [--lengths 8192 16384] [--threads 2] [--page figures/loopserve.md]

One layer of 8 heads of 64 numbers and 2 heads of keys, drawn at random: the whole choice of LoopServe (its result is
not used, because it depends on a text), and attention on drawn bands, of which there are more and more. Each is timed
right beside PyTorch's own attention, and medians of these ratios are told: of processor time of all threads, which
other work on the machine changes less, and of the time that passed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from experiments.drawn import markdown, put_table
from experiments.gpu.steps import Steps
from experiments.record import Row
from experiments.script import run
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import NEAR, Bands, BlockGrid
from sinkscope.sparse.choice import bands_from, sampled_rows
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.sparse import band_attention

PARTS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)  # of the bands
CLOCKS: dict[str, Callable[[], float]] = {"processor": time.process_time, "passed": time.perf_counter}
HEAD = ("tokens", "choice", *(f"{part:.0%} of bands" for part in PARTS), "even at", "with the choice")


@torch.no_grad()
def layer(length: int, rounds: int, threads: int) -> Row:
    """Times of the choice and of bands over those of PyTorch's attention, by clock; and shares of the cells."""
    torch.set_num_threads(threads)
    draw = torch.Generator().manual_seed(length)
    query, key = torch.randn(8, length, 64, generator=draw), torch.randn(2, length, 64, generator=draw)
    scores, grid, last = Scores(query, key, 0.125), BlockGrid(length, length), LoopServe.dense_rows
    attention = partial(torch.nn.functional.scaled_dot_product_attention, query[None], key[None], key[None])
    dense = partial(attention, is_causal=True, enable_gqa=True, scale=0.125)
    rows = sampled_rows(grid, LoopServe.sample, 0, last)
    settings = LoopServe.alpha, LoopServe.begin, LoopServe.checked, last, 1.0, None
    work: dict[str, Callable[[], Any]] = {"choice": partial(bands_from, scores, rows, *settings)}
    cells: list[float] = []
    for part in PARTS:
        bands = torch.rand(1, grid.blocks, generator=draw).expand(8, -1) < part
        bands[:, :NEAR] = True
        chosen = Bands(torch.zeros(8, length, dtype=torch.bool), bands.contiguous(), grid, last)
        cells.append(float(chosen.attended().mean()))
        work[f"{part}"] = partial(band_attention, scores, key, chosen)
    dense()
    found: Row = {"threads": threads, "cells": cells}
    ratios: dict[str, list[list[float]]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, own in work.items():
            ratios[name].append([])
            spent = both_clocks(own), both_clocks(dense)
            ratios[name][-1] += [ours / theirs for ours, theirs in zip(*spent, strict=True)]
    for number, name in enumerate(CLOCKS):
        times = {part: median(row[number] for row in rows) for part, rows in ratios.items()}
        chosen_in = times.pop("choice")
        attended = list(times.values())
        found[name] = {"choice": chosen_in, "times": attended, "even": share_at(1, attended, cells)}
        found[name]["even_with_choice"] = share_at(1 - chosen_in, attended, cells)
    return found


def both_clocks(work: Callable[[], Any]) -> list[float]:
    """Seconds of a function by each clock."""
    starts = [clock() for clock in CLOCKS.values()]
    work()
    return [clock() - start for clock, start in zip(CLOCKS.values(), starts, strict=True)]


def share_at(time: float, times: Sequence[float], cells: Sequence[float]) -> float:
    """The share of the cells that takes so long, between those measured; 0 if none does."""
    if time < times[0]:
        return 0.0
    return float(np.interp(time, times, cells))


def table(rows: Row) -> str:
    """A line for each length: processor times."""
    lines: list[list[str]] = []
    for name, row in rows.items():
        told = row["processor"]
        pairs = zip(told["times"], row["cells"], strict=True)
        shown = [f"{time:.2f} ({share:.0%})" for time, share in pairs]
        even = [f"{told[key]:.0%}" for key in ("even", "even_with_choice")]
        lines.append([name, f"{told['choice']:.2f}", *shown, *even])
    return markdown(HEAD, lines)


def main(
    *,
    lengths: Sequence[int] = (8192, 16384),
    threads: int = 2,
    rounds: int = 5,
    page: Path | None = None,
    out: Path = Path("figures/loopserve_cpu.json"),
) -> None:
    """Make what the module describes.

    Args:
        lengths: Tokens of the prompt.
        threads: Of PyTorch.
        rounds: Pairs of times of which the median is taken.
        page: Page whose table is replaced.
    """
    steps = Steps("loopserve-cpu", out, {"threads": threads, "rounds": rounds}, "cpu", "float32")
    for length in lengths:
        steps.do(f"{length}", partial(layer, length, rounds, threads))
    print(table(steps.rows))
    if page is not None:
        put_table(page, "loopserve.cpu", table(steps.rows))
    steps.end()


if __name__ == "__main__":
    run(main)
