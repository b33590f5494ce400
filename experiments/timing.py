"""How experiments time: arms that take turns, ratios of the same round, medians with a bootstrap interval."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeVar

import numpy as np
from scipy.stats import bootstrap

from experiments.record import Row

DRAWS = 4000
Measured = TypeVar("Measured")


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


def token_seconds(model: Any, edit: Any, inputs: Row, new: int) -> tuple[float, int]:
    """Seconds of a token that a model samples under an edit, and the number of events; of the thread's own time."""
    with nullcontext() if edit is None else edit.on(model) as run:
        write = partial(model.generate, **inputs, max_new_tokens=new, do_sample=True, pad_token_id=0)
        seconds, output = seconds_of(write)
    events = 0 if run is None else len(run.events)
    return seconds / (output.shape[1] - inputs["input_ids"].shape[1]), events


def interleaved(arms: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """What each arm measures, round by round, in rotating order.

    A round before them warms up: kernels are chosen or compiled at first use, and files are read.
    """
    names = list(arms)
    measured: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(-1, rounds):
        turned = number % len(names)
        for name in names[turned:] + names[:turned]:
            value = arms[name]()
            if number >= 0:
                measured[name].append(value)
    return measured


def ratio(arm: Sequence[float], base: Sequence[float]) -> Row:
    """Median over rounds of arm / base, and its 95 % bootstrap interval."""
    pairs = [a / b for a, b in zip(arm, base, strict=True)]
    return {"median": statistics.median(pairs), "interval": interval(pairs), "pairs": pairs}


def interval(values: Sequence[float]) -> list[float]:
    """95 % of bootstrap medians."""
    drawn = bootstrap((values,), np.median, n_resamples=DRAWS, method="percentile", rng=0).confidence_interval
    return [float(drawn.low), float(drawn.high)]
