"""What the detector costs per token: time of forward passes and generation with `SinkDetector` over that without.

    python -m experiments.bench_detector [--model NAME|FOLDER] [--rounds 31] [--out figures/bench_detector.json]

Results are ratios of medians within one run in which both kinds of pass alternate, so machine and load matter little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from experiments.record import record
from experiments.repeated_token.detect import watched
from experiments.repeated_token.sink_detector import SinkDetector
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.measure import Setup
from sinkscope.opening.load import load


def ratio(run: Callable[[], object], watch: Callable[[], AbstractContextManager[Any]], rounds: int) -> dict[str, float]:
    """Median seconds with and without, taking turns, and their ratio."""
    seconds: dict[str, list[float]] = {"plain": [], "watched": []}
    run()
    kinds = [("plain", nullcontext), ("watched", watch)]
    for turn in range(rounds):
        for name, around in kinds if turn % 2 else kinds[::-1]:
            with around():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    plain, watched = (statistics.median(seconds[name]) for name in ("plain", "watched"))
    return {"plain_seconds": round(plain, 5), "watched_seconds": round(watched, 5), "ratio": round(watched / plain, 3)}


def main(*, model: str | None = None, rounds: int = 31, out: Path = Path("figures/bench_detector.json")) -> None:
    """Make what the module describes.

    Args:
        model: Short name, hub id or folder; default: the model in the package.
    """
    started = time.perf_counter()
    loaded = load(model, backend="hf")
    made = Setup.open(loaded)
    watch = watched(made)
    if watch is None:
        raise SystemExit(f"error: {made.target.name} has no sink, so there is nothing to watch")
    detector = SinkDetector(layer=watch.layer, neurons=watch.neurons, levels=watch.levels.tolist())
    ids = made.ids.to(loaded.device)
    with torch.no_grad():
        rows = {
            "prefill_4x64": ratio(lambda: loaded(ids), lambda: detector.on(loaded), rounds),
            "generate_32": ratio(
                lambda: loaded.generate(ids[:1], max_new_tokens=32, min_new_tokens=32, do_sample=False),
                lambda: detector.on(loaded),
                rounds,
            ),
        }
    text = record("bench-detector", rows, {"model": made.target.name, "rounds": rounds}, started=started)
    print(text)
    write_atomic(out, text)


if __name__ == "__main__":
    run(main)
