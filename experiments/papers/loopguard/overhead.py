"""What a token costs under a guard that raises no alarm, over plain generation (section 5.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from statistics import median
from typing import Any

import torch

from experiments.papers.loopguard.real import BUDGET, openings_of
from experiments.timing import interleaved, ratio, token_seconds
from sinkscope.loops.guard import LoopGuard
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement

GUARDS = {"plain": None, "plain again": None, "printed": LoopGuard.paper(BUDGET), "default": LoopGuard(BUDGET)}


@dataclass(frozen=True, kw_only=True)
class Cost(Row, table="arms", title="cost of a token", note="Medians over rounds of both in the same round."):
    """The cost of a token over that without a guard."""

    key: str
    ratio: Mean = column("over plain", "number", "Processor time of a token over that of plain generation.")
    low: Mean = column("from", "number", "Lower end of its 95 % interval over rounds.")
    high: Mean = column("to", "number", "Upper end.")
    alarms: Mean = column("alarms", "count", "Interventions in all rounds.")


@dataclass(frozen=True, kw_only=True)
class Overhead(Result):
    """Processor time of a token under guards over plain generation, in rounds that take turns.

    Attributes:
        milliseconds: Processor time of a token of plain generation, median over rounds.
    """

    arms: tuple[Cost, ...]
    milliseconds: float

    def conclusion(self) -> str:
        """Return the cost under both guards beside plain generation."""
        ends = [f"{row.text('ratio')} ({row.text('low')} to {row.text('high')})" for row in self.arms]
        return (
            f"A token of {self.milliseconds:.1f} ms costs {ends[1]} of itself under the printed guard and {ends[2]} "
            f"under the default; plain generation over itself, the control, {ends[0]}."
        )


def arm(setup: Setup, guard: LoopGuard | None, rounds: int, new: int) -> Callable[[], tuple[float, int]]:
    """Return what continues the next opening at each call: the seconds of a token, and the number of alarms."""
    texts, target = enumerate(cycle(openings_of("choose"))), setup.target

    def continue_next() -> tuple[float, int]:
        number, (_, text) = next(texts)
        setup.progress("rounds", number, rounds + 1)
        inputs: Any = target.tokenizer(text, return_tensors="pt", verbose=False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return token_seconds(target.hf, guard, {**inputs, "min_new_tokens": new}, new)

    return continue_next


@measurement(loading="whole")
def overhead(setup: Setup, *, rounds: Natural = 24, new: Natural = 64) -> Overhead:
    """Time drawn continuations of openings under no guard, no guard again, and both guards, in rotating order.

    Args:
        rounds: Openings that each arm continues, after one that warms up.
        new: New tokens.
    """
    arms = interleaved({name: arm(setup, guard, rounds, new) for name, guard in GUARDS.items()}, rounds)
    seconds = {name: [each for each, _ in made] for name, made in arms.items()}
    rows: list[Cost] = []
    for name in [*GUARDS][1:]:
        found = ratio(seconds[name], seconds["plain"])
        low, high = map(Mean, found["interval"])
        alarms = Mean(float(sum(count for _, count in arms[name])))
        rows.append(Cost(key=name, ratio=Mean(found["median"]), low=low, high=high, alarms=alarms))
    return Overhead(arms=tuple(rows), milliseconds=1000 * median(seconds["plain"]))
