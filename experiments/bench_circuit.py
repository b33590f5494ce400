"""How long `circuit` takes beside `find-sinks`, on the bundled model and on every kind of planted model of the tests.

    python -m experiments.bench_circuit --out figures/bench_circuit.json [--rounds 3] [--only KIND ...]

Both run on a model in memory, in turn; the first round only warms up. The ratio of a kind is that of the shortest
processor times, which other programs disturb least.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sinkscope as ss
from experiments.record import Row, deliver, record
from experiments.script import run
from sinkscope.errors import UnsupportedError
from tests.organisms.hard import HARD, hard
from tests.organisms.planted_places import PLACES, places

BUNDLED = "bundled"
KINDS = (BUNDLED, *HARD, *PLACES)


def arguments(kind: str, folder: Path) -> tuple[Any, Row]:
    """A model in memory, and the options with which both commands get it."""
    if kind == BUNDLED:
        return ss.load(), {}
    if kind in HARD:
        made: Any = hard(kind, next(iter(HARD[kind])), 0)
    else:
        made = places(kind, next(iter(PLACES[kind])))
    text = folder / "text.txt"
    text.write_text(made.text(), encoding="utf-8")
    return made.model, {"tokenizer": made.tokenizer, "text": text, "max_repeats": 64}


def compared(kind: str, rounds: int) -> Row:
    """The processor time of both commands, and how many times that of `find-sinks` `circuit` takes."""
    measurements: dict[str, Callable[..., Any]] = {"find_sinks": ss.find_sinks, "circuit": ss.circuit}
    seconds: dict[str, list[float]] = {name: [] for name in measurements}
    with tempfile.TemporaryDirectory() as folder:
        model, options = arguments(kind, Path(folder))
        for _ in range(rounds + 1):
            for name, measurement in measurements.items():
                start = time.process_time()
                measurement(model, **options)
                seconds[name].append(time.process_time() - start)
    shortest = {name: min(times[1:]) for name, times in seconds.items()}
    return {"kind": kind, **shortest, "ratio": shortest["circuit"] / shortest["find_sinks"]}


def main(*, rounds: int = 3, only: Sequence[str] = KINDS, out: Path | None = None) -> None:
    """Make what the module describes."""
    started = time.perf_counter()
    rows: list[Row] = []
    refused: list[str] = []
    for kind in only:
        print(f"{kind} ...", file=sys.stderr, flush=True)
        try:
            rows.append(compared(kind, rounds))
        except UnsupportedError:
            refused.append(kind)
    ratios = [row["ratio"] for row in rows]
    result = {
        "median_ratio": statistics.median(ratios),
        "largest_ratio": max(ratios),
        "kinds": rows,
        "refused": refused,
    }
    text = record("bench-circuit", result, {"rounds": rounds}, started=started)
    deliver(text, out)


if __name__ == "__main__":
    run(main)
