"""The time of one layer by its tokens: dense attention, the choice of bands, and attention on bands.

    python -m experiments.loopserve.layer --page docs/serve.md

The layer has 9 heads of width 64 with 3 kv heads. Queries, keys and values are random numbers; bands are drawn, so that
each head computes about `--shares` of the cells. Times are medians of processor time over `--rounds`, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from experiments.drawn import markdown, put_table
from experiments.record import Row, record
from experiments.script import run
from experiments.timing import interleaved, seconds_of
from sinkscope.files.output import write_atomic
from sinkscope.lines.attention import Scores
from sinkscope.lines.bands import NEAR, Bands, BlockGrid
from sinkscope.lines.choice import select_bands
from sinkscope.lines.sparse import band_attention

HEADS, KV_HEADS, WIDTH = 9, 3, 64


def drawn(grid: BlockGrid, share: float) -> Bands:
    """Random bands that hold about this share of the cells."""
    bands = torch.rand(HEADS, grid.blocks) < share
    bands[:, :NEAR] = True
    return Bands(torch.zeros(HEADS, grid.keys, dtype=torch.bool), bands, grid)


def measured(tokens: int, shares: Sequence[float], rounds: int) -> Row:
    """All times at one length, in milliseconds."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(heads, tokens, WIDTH) for heads in (HEADS, KV_HEADS, KV_HEADS))
    parts = query[None], key[None], value[None]
    scores, grid = Scores(query, key, WIDTH**-0.5), BlockGrid(tokens, tokens)
    arms: dict[str, Callable[[], Any]] = {
        "dense": partial(scaled_dot_product_attention, *parts, is_causal=True, enable_gqa=True),
        "choice": partial(select_bands, scores, 0.995),
    }
    attended: Row = {}
    for share in shares:
        bands = drawn(grid, share)
        attended[f"{share:.0%}"] = float(bands.attended().mean())
        arms[f"{share:.0%}"] = partial(band_attention, scores, value, bands)
    timed = {name: partial(lambda work: seconds_of(work)[0], work) for name, work in arms.items()}
    times = {name: 1e3 * statistics.median(seconds) for name, seconds in interleaved(timed, rounds).items()}
    return {"tokens": tokens, "attended": attended, "ms": times}


def table(rows: Sequence[Row]) -> str:
    """Milliseconds, with the share of cells that was computed."""
    shares = list(rows[0]["attended"])
    lines: list[list[str]] = []
    for row in rows:
        cells = [f"{row['tokens']:,}", f"{row['ms']['dense']:.0f}", f"{row['ms']['choice']:.0f}"]
        for share in shares:
            cells.append(f"{row['ms'][share]:.0f} ({row['attended'][share]:.0%})")
        lines.append(cells)
    return markdown(["tokens", "dense", "choice", *(f"about {share} of the cells" for share in shares)], lines)


def main(
    *,
    lengths: Sequence[int] = (2048, 4096, 8192),
    shares: Sequence[float] = (0.15, 0.33, 0.5),
    rounds: int = 3,
    page: Path | None = None,
    out: Path = Path("figures/loopserve_layer.json"),
) -> None:
    """Make what the module describes.

    Args:
        shares: Shares of the cells.
        page: Page whose table is replaced.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows = [measured(tokens, shares, rounds) for tokens in lengths]
    settings = {"rounds": rounds, "heads": HEADS, "kv_heads": KV_HEADS, "width": WIDTH}
    write_atomic(out, record("loopserve-layer", rows, settings, started=started))
    if page is not None:
        put_table(page, "loopserve.layer", table(rows))


if __name__ == "__main__":
    run(main)
