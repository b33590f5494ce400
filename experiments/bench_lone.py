"""Compilers for lone slash lines: numba against C, torch's inductor, and PyTorch line by line, in one process.

    python -m experiments.bench_lone [--lengths 2048 4096 8192 16384] [--rounds 5] [--out figures/bench_lone.json]

The task is sparse attention of two heads, d_head 64, on single offsets that hold about 10 % of the cells, so nearly all
work is on lone lines. Time is CPU time of one thread. The arms of a round run one after the other, and the result is
the median of their ratios to C; above 1, C is faster. `first_seconds`, the time of the first call minus that of the
second, is the time of compilation.

- `numba`: what `sinkscope.lines.lone` uses;
- `c`: `lone.c` in this folder, compiled by the machine's own compiler with -O3 and -march=native;
- `inductor`: `torch.compile` of the same two sums written with indices;
- `pytorch`: one line after the other.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from experiments.bench_loopserve import D_HEAD, scattered, seconds
from experiments.record import Row, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.lines import lone, sparse
from sinkscope.lines.lone import LoneLoops, lone_loops

HEADS, DENSITY, SLOW = 2, 0.1, 4096  # arms other than numba and C stop at this length
_FLAGS = ["-O3", "-march=native", "-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"]


def by_c() -> LoneLoops:
    """The two loops of lone.c."""
    compiler = next(path for name in ("cc", "gcc", "clang") if (path := shutil.which(name)))
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, "lone.so")
        sizes = [f"-DWIDTH={D_HEAD}", f"-DVALUES={D_HEAD}"]
        source = str(Path(__file__).with_name("lone.c"))
        subprocess.run([compiler, *_FLAGS, "-shared", "-fPIC", *sizes, source, "-o", str(made)], check=True)
        library = ctypes.CDLL(str(made))

    def at(*tensors: Tensor) -> list[Any]:
        rows = []
        for tensor in tensors:
            rows.append(ctypes.c_void_p(tensor.data_ptr()))
        return rows

    def scores(query: Tensor, key: Tensor, opened: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
        numbers = []
        for n in (len(offsets), start, len(query)):
            numbers.append(ctypes.c_int64(n))
        library.lone_scores(*at(query, key, opened, offsets), *numbers, *at(out), ctypes.c_int64(out.stride(0)))

    def sums(probs: Tensor, value: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
        numbers = []
        for n in (len(offsets), start, len(probs)):
            numbers.append(ctypes.c_int64(n))
        library.lone_sums(*at(probs, value, offsets), *numbers, *at(out), ctypes.c_int64(probs.stride(0)))

    return LoneLoops(scores, sums)


def by_inductor() -> LoneLoops:
    """The two sums, compiled by torch."""

    def dots(query: Tensor, key: Tensor, opened: Tensor, offsets: Tensor, start: int) -> Tensor:
        at = start + torch.arange(len(query))[:, None] - offsets
        safe = at.clamp(min=0)
        found = (query[:, None] * key[safe]).sum(-1)
        return torch.where((at >= 0) & opened[safe], found, -torch.inf)

    def weighted(probs: Tensor, value: Tensor, offsets: Tensor, start: int) -> Tensor:
        at = start + torch.arange(len(probs))[:, None] - offsets
        return (torch.where(at >= 0, probs, 0)[:, :, None] * value[at.clamp(min=0)]).sum(1)

    dots, weighted = (torch.compile(fn, dynamic=True, fullgraph=True) for fn in (dots, weighted))

    def scores(query: Tensor, key: Tensor, opened: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
        out[:, : len(offsets)] = dots(query, key, opened, offsets, start)

    def sums(probs: Tensor, value: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
        out += weighted(probs[:, : len(offsets)], value, offsets, start)

    return LoneLoops(scores, sums)


def _scores(query: Tensor, key: Tensor, opened: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
    for line, offset in enumerate(offsets.tolist()):
        begin = max(0, offset - start)  # rows before it have no such key
        at = slice(start + begin - offset, start + len(query) - offset)
        products = (query[begin:] * key[at]).sum(1)
        out[:begin, line] = -torch.inf
        out[begin:, line] = products.masked_fill_(~opened[at], -torch.inf)


def _sums(probs: Tensor, value: Tensor, offsets: Tensor, start: int, out: Tensor) -> None:
    for line, offset in enumerate(offsets.tolist()):
        begin = max(0, offset - start)
        at = slice(start + begin - offset, start + len(probs) - offset)
        out[begin:].addcmul_(probs[begin:, line, None], value[at])


def measured(lengths: list[int], rounds: int) -> list[Row]:
    """One row for each length and arm."""
    numba = lone_loops(D_HEAD, D_HEAD)
    arms = {"c": by_c(), "numba": numba, "inductor": by_inductor(), "pytorch": LoneLoops(_scores, _sums)}
    first: dict[str, float] = {}
    rows: list[Row] = []
    for n in lengths:
        generator = torch.Generator().manual_seed(n)
        query, key, value = (torch.randn(HEADS, n, D_HEAD, generator=generator) for _ in range(3))
        lines = scattered("slash", HEADS, n, DENSITY, generator)
        outputs: dict[str, Tensor] = {}
        took: dict[str, list[float]] = {name: [] for name in arms if n <= SLOW or name in ("c", "numba")}

        def run(name: str) -> Callable[[], Any]:
            def call() -> Any:
                with patch.object(lone, "lone_loops", lambda *_: arms[name]):
                    return sparse.sparse_attention(query, key, value, lines, dense_above=9.0)  # noqa: B023

            return call

        for name in took:
            start = time.perf_counter()
            outputs[name] = run(name)()[0]
            once = time.perf_counter() - start
            start = time.perf_counter()
            run(name)()
            first.setdefault(name, once - (time.perf_counter() - start))
        for _ in range(rounds):
            for name, times in took.items():
                times.append(seconds(run(name))[0])
        for name, times in took.items():
            ratios = []
            for mine, c in zip(times, took["c"], strict=True):
                ratios.append(mine / c)
            rows.append(
                {
                    "n": n,
                    "arm": name,
                    "over_c": median(ratios),
                    "pairs": ratios,
                    "first_seconds": first[name],
                    "largest_difference": float((outputs[name] - outputs["c"]).abs().max()),
                }
            )
            print(f"{n} {name}: {rows[-1]['over_c']:.2f} times C, compiled in {first[name]:.1f} s", flush=True)
    return rows


def main(
    *, lengths: Sequence[int] = (2048, 4096, 8192, 16384), rounds: int = 5, out: Path = Path("figures/bench_lone.json")
) -> None:
    """Make what the module describes."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    rows = measured(lengths, rounds)
    settings = {"lengths": lengths, "rounds": rounds}
    write_atomic(out, record("bench-lone", {"rows": rows}, settings | {"threads": 1}, started=started))


if __name__ == "__main__":
    run(main)
