"""Speed of prompts under LoopServe, and of new turns, over the same model alone.

    python -m experiments.bench_loopserve [--lengths 2048 4096 8192 16384 32768] [--rounds 3] [--parts model turns]
        [--out figures/bench_loopserve.json] [--page PAGE]

Everything is CPU time of one thread, pairs are interleaved, and what counts is the median of their ratios; above 8,192
there is one round.

- `model`: a forward pass. `half`: `lines-512` of `planted_lines` (what the first layer writes drowns the lines of the
  second, whose attention needs most cells). `lines`: the same with writes a tenth as large, so that both layers are on
  lines. `flat`: the control, queries are zero, so that attention is flat and every head has to be dense. All at the
  default's alpha, `lines` also at 0.995.
- `turns`: the time of a new turn on a context that was read before, under `LoopServe` and `LoopServe(shortest=0)`, over
  that of the model alone, for the same three models. The first has to stay within 5 % of the model alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.drawn import markdown, put_table
from experiments.planted_lines import made, text
from experiments.record import Row, earlier, record, value_of_each
from experiments.script import run
from experiments.timing import interleaved, ratio, seconds_of
from sinkscope.files.output import write_atomic
from sinkscope.lines.serve import LoopServe
from sinkscope.results.console import note

REPEATED = 8192  # the last length with several rounds
LENGTHS = [2048, 4096, 8192, 16384, 32768]
PARTS = ("model", "turns")
CONTEXTS = (2400, 6000)
TURNS = (48, 200, 400, 1200)
DEFAULT = LoopServe().alpha
MARKED = 0.02  # of the tokens


@torch.no_grad()
def model_of(name: str) -> Any:
    """One of the three models."""
    model = made("lines-512", 0, 0.1 if name == "lines" else 1.0).hf
    if name == "flat":
        for block in model.model.layers:
            block.self_attn.q_proj.weight.zero_()
    return model


@torch.no_grad()
def turn(model: Any, cache: DynamicCache, ids: Tensor) -> float:
    """Seconds of a turn, after which the cache is cut back."""
    seconds, _ = seconds_of(partial(model, input_ids=ids, past_key_values=cache, logits_to_keep=1))
    cache.crop(-ids.shape[1])
    return seconds


@torch.no_grad()
def turns(_lengths: list[int], rounds: int) -> list[Row]:
    """A new turn under LoopServe over the same turn of the model alone."""
    rows: list[Row] = []
    arms = {"ours": LoopServe(decode=False), "always": LoopServe(decode=False, shortest=0)}
    for name in ("lines", "half", "flat"):
        models = {}
        for each in ("alone", *arms):
            models[each] = model_of(name)
        for context in CONTEXTS:
            ids = text(context + max(TURNS), MARKED)
            with ExitStack() as stack:
                caches: Row = {}
                for arm, model in models.items():
                    if arm in arms:
                        stack.enter_context(arms[arm].on(model))
                    caches[arm] = DynamicCache(config=model.config)
                    model(input_ids=ids[:, :context], past_key_values=caches[arm], logits_to_keep=1)
                for new in TURNS:
                    part = ids[:, context : context + new]
                    turns = {arm: partial(turn, models[arm], caches[arm], part) for arm in models}
                    spent = interleaved(turns, rounds)
                    over = {arm: ratio(spent[arm], spent["alone"])["median"] for arm in arms}
                    rows.append({"model": name, "context": context, "new": new, "over_alone": over})
                    note(f"{name}, {new} on {context}: {over}")
    return rows


@torch.no_grad()
def whole_model(lengths: list[int], rounds: int) -> list[Row]:
    """Forward passes under LoopServe and without."""
    rows: list[Row] = []
    for name in ("lines", "half", "flat"):
        model = model_of(name)
        for n in lengths if name == "lines" else [n for n in lengths if n <= 2 * REPEATED]:
            ids = text(n, MARKED)

            def forward(ids: Tensor = ids, model: Any = model) -> Any:
                return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits

            for alpha in (DEFAULT, 0.995) if name == "lines" else (DEFAULT,):
                pairs = []
                events = []
                for _ in range(rounds if n <= REPEATED else 1):
                    base, _ = seconds_of(forward)
                    with LoopServe(alpha=alpha, decode=False).on(model) as run:
                        spent, _ = seconds_of(forward)
                        events = run.events
                    pairs.append(base / spent)
                data = []
                for event in events:
                    if event.kind == "prefill":
                        data.append(event.data)
                counts = value_of_each(data, "cells")
                rows.append(
                    {
                        "model": name,
                        "n": n,
                        "alpha": alpha,
                        "times_faster": median(pairs),
                        "pairs": pairs,
                        "cells": sum(counts) / len(data),
                    }
                )
                note(f"{name} {n}, alpha {alpha}: {median(pairs):.2f} times faster in all")
    return rows


def turns_table(rows: list[Row]) -> str:
    """Times of new turns over those of the model alone; in brackets where lines are chosen whatever that costs."""
    cells: dict[tuple[str, int], list[str]] = {}
    slowest = 0.0
    for row in rows:
        over = row["over_alone"]
        slowest = max(slowest, over["ours"])
        place = cells.setdefault((row["model"], row["context"]), [f"`{row['model']}`", f"{row['context']:,}"])
        place.append(f"{over['ours']:.2f} ({over['always']:.2f})")
    table = markdown(["attention", "context", *(f"{new:,}" for new in TURNS)], list(cells.values()))
    return f"{table}\n\nThe slowest turn takes {slowest:.2f} times as long as the model alone."


def main(
    *,
    lengths: Sequence[int] = LENGTHS,
    rounds: int = 3,
    parts: Sequence[Literal[*PARTS]] = PARTS,
    out: Path = Path("figures/bench_loopserve.json"),
    page: Path | None = None,
) -> None:
    """Make what the module describes.

    Args:
        page: Replace the table of turns in this page.
    """
    torch.set_num_threads(1)
    started = time.perf_counter()
    result: Row = {part: [] for part in PARTS} | earlier(out)
    made_by = {"model": whole_model, "turns": turns}
    for part in parts:
        result[part] = made_by[part](lengths, rounds)
    settings = {"lengths": lengths, "rounds": rounds, "parts": parts, "threads": 1}
    if page is not None:
        put_table(page, "bench_loopserve", turns_table(result["turns"]))
    write_atomic(out, record("bench-loopserve", result, settings, started=started))


if __name__ == "__main__":
    run(main)
