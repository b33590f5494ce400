"""What a token costs real models under a guard that raises no alarm, over plain `generate`.

    python -m experiments.loopguard.overhead --real FOLDER [--out figures/loopguard_overhead.json]

FOLDER holds the files of the models. Both arms continue the same opening, sampled with the same seed, in rounds whose
order rotates; plain over plain shows the noise. Time is the processor time of the one thread that works.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from experiments.loopguard.real_openings import openings_of
from experiments.record import Row, write_record
from experiments.script import run
from experiments.timing import interleaved, ratio, token_seconds
from sinkscope.loops.guard import LoopGuard
from sinkscope.opening.load import load

NEW = 64


def arm(model: Any, guard: LoopGuard | None) -> Callable[[], tuple[float, int]]:
    """Continue the openings one after another: seconds of a token, and the number of alarms."""
    texts = iter(openings_of("choose"))

    def continue_next() -> tuple[float, int]:
        inputs = model.tokenizer(next(texts)[1], return_tensors="pt")
        torch.manual_seed(0)
        return token_seconds(model, guard, {**inputs, "min_new_tokens": NEW}, NEW)

    return continue_next


def overhead(model: Any, rounds: int) -> Row:
    """The guard over plain `generate`, and plain over plain."""
    arms = {"plain": arm(model, None), "plain again": arm(model, None), "guard": arm(model, LoopGuard())}
    seconds: dict[str, list[float]] = {}
    alarms = 0
    for name, made in interleaved(arms, rounds).items():
        seconds[name] = [each for each, _ in made]
        alarms += sum(count for _, count in made)
    rows: Row = {"milliseconds": 1000 * statistics.median(seconds["plain"]), "alarms": alarms}
    for name in ("plain again", "guard"):
        rows[name] = ratio(seconds[name], seconds["plain"])
    return rows


def main(*, real: Path, rounds: int = 24, out: Path = Path("figures/loopguard_overhead.json")) -> None:
    """Make what the module describes.

    Args:
        real: Folder of the files of the models.
        rounds: Openings that each arm continues, after one to warm up.
        out: The JSON.
    """
    torch.set_num_threads(1)
    result: Row = {}
    for file in sorted(real.glob("*.gguf")):
        result[file.stem.split("-")[0]] = overhead(load(str(file)), rounds)
    write_record(out, "loopguard-overhead", result, {"new": NEW, "rounds": rounds})


if __name__ == "__main__":
    run(main)
