"""Time of a turn of a real model by length of context and answer: full attention, LoopServe, its halves, SnapKV, AdaKV.

    python -m experiments.loopserve.latency MODEL [--contexts 2048 4096 8192] [--rounds 2] [--page PAGE]

After Figs. 5 a, 9 a and 13 of Li et al. 2025 (LoopServe). Each arm reads a piece of prose and then the same given
tokens one by one, and every call is timed: the prompt is the time to the first token, and answers of 40, 80 and 120
tokens are the beginnings of one run. The work of a policy on the cache after the prompt belongs to the first step.
Arms are interleaved in rotating order; a ratio is the median over rounds of full over arm in the same round. Time is
the processor time of the one thread that does all the work. Bytes of keys and values are those of `run.usage`. Prompts
are read along bands at any length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import thread_time

import torch
from torch import Tensor
from transformers import DynamicCache

from experiments.drawn import markdown, put_table
from experiments.gpu.steps import Steps
from experiments.loopserve.real import piece, prose
from experiments.record import Row, value_of_each
from experiments.script import run as run_script
from experiments.timing import interleaved, seconds_of
from sinkscope.hooks.edit.base import Intervention, under
from sinkscope.kv import AdaKV, SnapKV
from sinkscope.models.target import Target
from sinkscope.opening.live import target_of
from sinkscope.opening.load import load
from sinkscope.sparse.serve import LoopServe

OUTPUTS = (40, 80, 120)  # the paper's (section A.13)
HEAD = ("context", "method", "prompt", "a token", f"prompt and {OUTPUTS[-1]} tokens", "ms a token", "MiB of the cache")


def arms(budget: int) -> dict[str, Intervention | None]:
    """At the settings of the paper's table 7 where `budget` is 1,024."""
    return {
        "full": None,
        "loopserve": LoopServe(budget=budget, shortest=0),
        "loopserve-p": LoopServe(budget=budget, shortest=0, decode=False),
        "loopserve-d": LoopServe(budget=budget, shortest=0, prefill=False),
        "snapkv": SnapKV(budget=budget),
        "adakv": AdaKV(budget=budget),
    }


@torch.no_grad()
def turn(
    target: Target, edit: Intervention | None, ids: Tensor, context: int, clock: Callable[[], float] = thread_time
) -> Row:
    """Read `context` tokens at once and the others one by one.

    Returns:
        "seconds" of every call, the prompt first; the "bytes" of the cache; "read" tokens per decoding step; and of the
        prompt "cells", share attended to (None: plain attention).
    """
    cache = DynamicCache(config=target.hf.config)
    seconds = list[float]()
    with under(edit, target) as run:
        for begin, end in [(0, context), *((i, i + 1) for i in range(context, ids.shape[1]))]:
            call = partial(target.hf, input_ids=ids[:, begin:end], past_key_values=cache, use_cache=True)
            seconds.append(round(seconds_of(partial(call, logits_to_keep=1), clock)[0], 7))
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers if isinstance(layer.keys, Tensor))
        found: Row = {"bytes": held, "read": None, "cells": None}
        if run is not None:
            for used in run.usage:
                found |= {"bytes": used.physical_bytes, "read": fmean(used.mean_read)}
            events = [event.data for event in run.events if event.kind == "prefill" and "attended" in event.data]
            if events:
                found["cells"] = fmean(value_of_each(events, "attended"))
    return {"seconds": seconds, **found}


def measured(target: Target, edits: dict[str, Intervention | None], ids: Tensor, context: int, rounds: int) -> Row:
    """All arms at one context: times and how many times faster than full in the same round, medians over rounds."""
    told = interleaved({name: partial(turn, target, edits[name], ids, context) for name in edits}, rounds)
    rows: Row = {}
    for name, runs in told.items():
        row: Row = {name: runs[-1][name] for name in ("bytes", "cells", "read")}
        parts = {"prompt": slice(1), "token": slice(1, None)} | {str(n): slice(1 + n) for n in OUTPUTS}
        for part, calls in parts.items():
            own = [sum(each["seconds"][calls]) for each in runs]
            full = [sum(each["seconds"][calls]) for each in told["full"]]
            row[part] = {"seconds": median(own), "times": median(a / b for a, b in zip(full, own, strict=True))}
        row["token"]["seconds"] /= ids.shape[1] - context
        rows[name] = row
    return rows


def table(rows: Row) -> str:
    """A line for each context and arm: how many times faster than full, milliseconds of a token, and bytes."""
    lines: list[list[str]] = []
    for name, arms in rows.items():
        for arm, row in arms.items():
            if isinstance(row, dict):  # not the seconds of the step
                times = [f"{row[part]['times']:.2f}" for part in ("prompt", "token", str(OUTPUTS[-1]))]
                token = f"{1e3 * row['token']['seconds']:.0f}"
                lines.append([name.rpartition(", ")[2], f"`{arm}`", *times, token, f"{row['bytes'] / 2**20:.0f}"])
    return markdown(HEAD, lines)


def main(
    model: str,
    *,
    contexts: Sequence[int] = (2048, 4096, 8192),
    rounds: int = 2,
    budget: int = 1024,
    page: Path | None = None,
    out: Path = Path("figures/loopserve_latency.json"),
) -> None:
    """Make what the module describes.

    Args:
        model: Name, folder or file.
        contexts: Tokens of the prompt and of the longest answer together.
        budget: Of what a decoding step reads, or of the cache.
        page: Page whose table is replaced.
    """
    torch.set_num_threads(1)
    steps = Steps("loopserve-latency", out, {"rounds": rounds, "budget": budget}, "cpu", "float32")
    target = target_of(load(model))
    for context in contexts:
        ids = piece(target, prose(()), context, 1)
        own = partial(measured, target, arms(budget), ids, context - OUTPUTS[-1], rounds)
        steps.do(f"{Path(model).stem}, {context}", own)
    if page is not None:
        put_table(page, "loopserve.latency", table(steps.rows))
    steps.end()


if __name__ == "__main__":
    run_script(main)
