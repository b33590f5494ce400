"""How experiments time: arms that take turns, ratios of the same round, medians with a bootstrap interval."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.record import Row

DRAWS = 4000


def clock(device: Any) -> float:
    """Seconds, when the device has done everything it was given.

    Args:
        device: A `torch.device`.
    """
    if device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)
    return time.perf_counter()


def seconds_of(work: Callable[[], Any], clock: Callable[[], float] = time.thread_time) -> tuple[float, Any]:
    """How long a function takes, and what it returns."""
    start = clock()
    result = work()
    return clock() - start, result


def memory(name: str) -> int | None:
    """A line of this process's memory ("VmRSS", "VmHWM") in bytes; None: there is none (not on Linux)."""
    file = Path("/proc/self/status")
    if file.exists():
        for line in file.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return 1024 * int(line.split()[1])
    return None


def memory_growth(work: Callable[[], Any]) -> tuple[int | None, Any]:
    """Bytes by which this process's peak exceeds during a function what it holds before, and what it returns."""
    before = memory("VmRSS")
    if before is not None:
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    result = work()
    peak = memory("VmHWM")
    if peak is None or before is None:
        return None, result
    return peak - before, result


def pairs_of(
    base: Callable[[], Any], other: Callable[[], Any], rounds: int, clock: Callable[[], float]
) -> list[tuple[float, float]]:
    """Seconds of both, in alternating order; once before, for kernels that are chosen or compiled at first use."""
    base()
    other()
    pairs: list[tuple[float, float]] = []
    for number in range(rounds):
        if number % 2:
            second, _ = seconds_of(other, clock)
            first, _ = seconds_of(base, clock)
        else:
            first, _ = seconds_of(base, clock)
            second, _ = seconds_of(other, clock)
        pairs.append((first, second))
    return pairs


def ratio(arm: Sequence[float], base: Sequence[float]) -> Row:
    """Median over rounds of arm / base, and its 95 % bootstrap interval."""
    pairs = []
    for a, b in zip(arm, base, strict=True):
        pairs.append(a / b)
    return {"median": statistics.median(pairs), "interval": interval(pairs), "pairs": pairs}


def interval(values: Sequence[float]) -> list[float]:
    """95 % of bootstrap medians."""
    draw = random.Random(0)
    medians: list[float] = []
    for _ in range(DRAWS):
        medians.append(statistics.median(draw.choices(values, k=len(values))))
    medians.sort()
    edge = DRAWS // 40
    return [medians[edge], medians[-edge - 1]]


def faster(pairs: Sequence[tuple[float, float]]) -> Row:
    """How many times faster the second of each pair is, and the median milliseconds of both."""
    ratios = []
    for base, other in pairs:
        ratios.append(base / other)
    return {
        "times_faster": statistics.median(ratios),
        "ms": 1e3 * statistics.median(other for _, other in pairs),
        "dense_ms": 1e3 * statistics.median(base for base, _ in pairs),
        "pairs": ratios,
    }
