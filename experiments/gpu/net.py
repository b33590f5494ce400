"""The net of drawn ways of using a model (`tests/ways`), drawn on the device by several processes.

    python -m experiments.gpu.net --seconds 300 [--processes 4] [--dtypes float32 bfloat16] [--device cuda] [--out FILE]

The truth is plain transformers on the same device and in the same dtype. Behind a block logits are equal bit for bit;
otherwise they agree within the rounding of the dtype. Half precision is drawn only where no cache is handed over.
Each process has a seed of its own; a step is what a dtype gave in all of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from experiments.gpu.steps import Steps
from experiments.record import Row
from experiments.script import run

ROOT = Path(__file__).parents[2]
LATE = 40  # seconds in which it is loaded, a draw may end, and a failure be made smaller


def drawn(dtype: str, seed: int, seconds: float, device: str) -> Row:
    """What one process drew: number of draws, kinds of failures as they are printed, and known causes."""
    words = ["--seconds", f"{seconds:.0f}", "--seed", str(seed), "--only", f"dtype={dtype}", f"device={device}"]
    command = [sys.executable, "-m", "tests.ways", *words]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said = process.communicate(timeout=seconds + LATE)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        said = process.communicate()[0]
    end = re.search(r"^(\d+) draws, (\d+) kinds of failures; known causes: (.*)$", said, re.MULTILINE)
    lines = [line for line in said.splitlines() if "] known: " not in line]
    if end is None:  # it was loading, or making a failure smaller
        return {"seed": seed, "draws": 0, "kinds": len(lines), "failures": lines[-20:], "ended": False}
    draws, kinds = int(end[1]), int(end[2])
    failures = lines[: len(lines) - 1 - kinds]
    return {"seed": seed, "draws": draws, "kinds": kinds, "failures": failures, "known": end[3], "ended": True}


def of_dtype(dtype: str, seeds: Sequence[int], seconds: float, device: str) -> Row:
    """What all processes drew; none may break a promise."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        rows = list(pool.map(lambda seed: drawn(dtype, seed, seconds, device), seeds))
    kinds = sum(row["kinds"] for row in rows)
    if not any(row["ended"] for row in rows) and not kinds:
        return {"error": f"no process came to an end in {seconds:.0f} s"}
    return {"draws": sum(row["draws"] for row in rows), "of": rows, "right": not kinds}


def main(
    *,
    seconds: float = 300.0,
    processes: int = 4,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    seed: int = 1,
    device: str = "cuda",
    out: Path = Path("figures/gpu_net.json"),
) -> None:
    """Make what the module describes.

    Args:
        seconds: Of everything; each dtype has its share.
        processes: That draw at the same time.
        seed: Of the first process; each other one has the next.
    """
    settings: Row = {"processes": processes, "seed": seed}
    steps = Steps("gpu-net", out, settings, device, "")
    begun = time.monotonic()
    for number, dtype in enumerate(dtypes):
        left = max(5.0, (begun + seconds - time.monotonic()) / (len(dtypes) - number) - LATE)
        seeds = range(seed + number * processes, seed + (number + 1) * processes)
        steps.do(dtype, partial(of_dtype, dtype, seeds, left, device))
    steps.end()


if __name__ == "__main__":
    run(main)
