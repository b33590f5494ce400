"""Columns and bands on a GPU: whole prompts, the choice, layers, and FlexAttention beside the kernel.

    python -m experiments.gpu.bands --only prompt choice flex --layers 8 --seconds 450 [--device cuda]

This call takes four to eight minutes, and measures what decides the defaults of a GPU. Steps run in order of
value, each is written as it ends, and none begins after `--seconds`; what is done is not done again. Times are medians
of runs between two events on the device, after a warm-up; a layer has `--heads` query heads of width 128 and a quarter
as many kv heads, in bfloat16, on random numbers. On a GPU, `tests/sparse/test_loopserve_triton.py` checks that what is
timed is right.

- `prompt`: a whole prompt of a model of a 7B shape with random weights and planted lines, with `--layers` layers.
- `choice`: the choice of columns and bands.
- `flex`: FlexAttention on the same columns and bands (`experiments.gpu.flex`) beside our kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments import planted_lines
from experiments.gpu.flex import flex_bands
from experiments.gpu.steps import Steps, model_of
from experiments.record import Row
from experiments.script import run
from experiments.timing import seconds_of
from sinkscope.sparse.attention import Scores, sample_queries
from sinkscope.sparse.bands import NEAR, TILE, BlockGrid, Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.serve import LoopServe


def drawn(heads: int, kv: int, queries: int, keys: int, width: int, dtype: str, device: str) -> Any:
    """Random scores and values, keys as a model gives them, not contiguous."""
    draw = partial(torch.randn, device=device, dtype=getattr(torch, dtype))
    query = draw(queries, heads, width).transpose(0, 1)
    key, value = (draw(keys, kv, width).transpose(0, 1) for _ in range(2))
    return Scores(query, key, 1.5 * width**-0.5), value


def bands_of(heads: int, queries: int, keys: int, share: float, device: str, seed: int = 0) -> Lines:
    """Random bands in runs of four and columns, about half of the share each; all bands if it is 1."""
    grid, generator = BlockGrid(queries, keys), torch.Generator().manual_seed(seed)
    bands = (torch.rand(heads, -(-grid.blocks // 4), generator=generator) < share / 2).repeat_interleave(4, 1)
    bands = bands[:, : grid.blocks] | (torch.arange(grid.blocks) < NEAR) | (share >= 1)
    columns = torch.rand(heads, keys, generator=generator) < (share / 2 if share < 1 else 0)
    columns[:, :4] = True
    return Lines(columns.to(device), bands.to(device), grid, 16)


def milliseconds(work: Callable[[], Any], device: str, rounds: int) -> float:
    """Median time of a run on the device."""
    times: list[float] = []
    for number in range(-2 if device != "cpu" else 0, rounds):
        if device == "cpu":
            seconds = seconds_of(work, time.perf_counter)[0]
        else:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            seconds = start.elapsed_time(end) / 1e3
        if number >= 0:
            times.append(1e3 * seconds)
    return statistics.median(times)


def chooser(scores: Scores, alpha: float) -> Callable[[], Lines]:
    """The whole choice from the scores of one layer."""
    settings: Row = {"begin": LoopServe.begin, "checked": LoopServe.checked, "dense_rows": LoopServe.dense_rows}
    return partial(select_bands, scores, alpha, sample=LoopServe.sample, **settings, dense_above=0.75)


@torch.no_grad()
def choice(device: str, heads: int, kv: int, n: int, rounds: int, dtype: str) -> Row:
    """The choice alone, on the device and on the host, and its parts."""
    from sinkscope.sparse import triton_sums

    scores, _ = drawn(heads, kv, n, n, 128, dtype, device)
    rows = sample_queries(BlockGrid(n, n).sparse_queries(16), 64, 0).to(device)
    time_of = partial(milliseconds, device=device, rounds=rounds)
    choose = chooser(scores, 0.95)
    found: Row = {"n": n, "kv_heads": kv, "ms": time_of(choose)}
    began = time.perf_counter()
    chosen = choose()
    found["host_ms"] = 1e3 * (time.perf_counter() - began)
    computed = triton_sums.ComputedRows(scores, rows)
    found["normalisers_ms"] = time_of(lambda: triton_sums.ComputedRows(scores, rows))
    found["sums_ms"] = time_of(lambda: computed.sums(chosen))
    return found


@torch.no_grad()
def flex(device: str, heads: int, kv: int, n: int, share: float, rounds: int, dtype: str) -> Row:
    """FlexAttention on columns and bands beside the Triton kernel, both with the lists that they need."""
    from torch.nn.attention.flex_attention import flex_attention

    from sinkscope.sparse import triton

    scores, value = drawn(heads, kv, n, n, 128, dtype, device)
    chosen = bands_of(heads, n, n, share, device)
    torch.compiler.reset()  # after eight sizes it would not compile any more
    compiled = torch.compile(flex_attention, dynamic=False) if device != "cpu" else flex_attention
    options: Row = {} if device == "cpu" else {"kernel_options": {"BLOCK_M": TILE, "BLOCK_N": TILE}}
    attend = partial(flex_bands, scores, value, chosen, compiled, **options)
    ours = partial(triton.attention_on, scores, value, chosen)
    plain = ours().transpose(0, 1).float()
    return {
        "n": n,
        "cells": float(chosen.attended().mean()),
        "difference": float((attend().float() - plain).norm() / plain.norm()),
        "ms": milliseconds(attend, device, rounds),
        "ours_ms": milliseconds(ours, device, rounds),
    }


@torch.no_grad()
def prompt(target: Any, ids: Tensor, alpha: float, device: str, rounds: int, dense: dict[int, float]) -> Row:
    """A whole prompt, along bands and with the model's own attention, which `dense` remembers by length."""
    own = partial(target.base, input_ids=ids, use_cache=False)
    events: list[Row] = []

    def sparse() -> None:
        with LoopServe(alpha=alpha, decode=False, shortest=0).on(target) as told:
            own()
        events[:] = [dict(event.data) for event in told.events if event.kind == "prefill"]

    if ids.shape[1] not in dense:
        dense[ids.shape[1]] = milliseconds(own, device, rounds)
    dense_ms, ms = dense[ids.shape[1]], milliseconds(sparse, device, rounds)
    attended = statistics.fmean(event.get("attended", 1.0) for event in events)
    held: list[float] = []
    for event in events:
        held += event.get("recovered", ())
    found: Row = {"n": ids.shape[1], "alpha": alpha, "layers": target.n_layers, "attended": attended}
    found |= {"held": statistics.fmean(held) if held else None, "ms": ms, "dense_ms": dense_ms}
    return found | {"times_faster": dense_ms / ms}


def main(
    *,
    lengths: Sequence[int] = (16384, 65536, 32768, 8192, 131072),
    prompts: Sequence[int] = (32768, 65536, 16384, 131072, 8192),
    alphas: Sequence[float] = (LoopServe.alpha, 0.9),
    only: Sequence[str] = (),
    heads: int = 32,
    layers: int = 4,
    shape: str = "lines-7b",
    rounds: int = 10,
    seconds: float = 200.0,
    device: str = "cuda",
    dtype: str = "bfloat16",
    out: Path = Path("figures/gpu_bands.json"),
) -> None:
    """Make what the module describes.

    Args:
        lengths: Of one layer.
        prompts: Of whole prompts.
        alphas: Of whole prompts.
        only: Kinds of steps: prompt, choice, flex; default: all.
        layers: Of the whole prompts' model.
        seconds: No step begins after so many.
    """
    settings: Row = {"heads": heads, "layers": layers, "shape": shape, "rounds": rounds, "dtype": dtype}
    steps = Steps("gpu-bands", out, settings, device, dtype, seconds)

    planned: dict[str, Callable[[], Row]] = {}
    if not only or "prompt" in only:
        hidden, mlp, _, query_heads, kv = planted_lines.SHAPES[shape]
        planted_lines.SHAPES["measured"] = (hidden, mlp, layers, query_heads, kv)
        target = model_of(None, "measured", device, dtype)
        ids = planted_lines.text(max(prompts)).to(target.device)
        dense_times: dict[int, float] = {}
        for n, alpha in product(prompts, alphas):
            work = partial(prompt, target, ids[:, :n], alpha, device, min(3, rounds), dense_times)
            planned[f"prompt of {n}, alpha {alpha}"] = work
    quarter = max(1, heads // 4)
    for n in lengths:
        planned[f"choice at {n}"] = partial(choice, device, heads, quarter, n, rounds, dtype)
    for share, n in product((0.1, 0.3), lengths):
        planned[f"flex at {n}, {share}"] = partial(flex, device, heads, quarter, n, share, max(3, rounds // 2), dtype)
    for name, work in planned.items():
        if not only or name.split()[0] in only:
            steps.do(name, work)
    steps.end()


if __name__ == "__main__":
    run(main)
