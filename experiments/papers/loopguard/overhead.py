"""What a token costs under a guard that raises no alarm, over plain generation (section 5.4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import plotly.express as px
import torch

from experiments.papers.loopguard.caches import Method
from experiments.papers.loopguard.real import BUDGET, openings_of
from experiments.timing import interleaved, ratio, token_seconds
from sinkscope.loops.guard import LoopGuard
from sinkscope.measure import Mean, Natural, Result, Row, Setup, column, measurement
from sinkscope.results.style import figure_of

PLAIN, AGAIN, PRINTED, OURS = "plain", "plain again", "as printed", "default"
GUARDS = {PLAIN: None, AGAIN: None, PRINTED: LoopGuard.paper(BUDGET), OURS: LoopGuard(BUDGET)}


@dataclass(frozen=True, kw_only=True)
class Cost(Row, table="arms", title="cost of a token", note="Medians over rounds of both in the same round."):
    """The cost of a token over that without a guard."""

    key: Method
    ratio: Mean = column("over plain", "number", "Processor time of a token over that of plain generation.")
    low: Mean = column("from", "number", "Lower end of its 95 % interval over rounds.")
    high: Mean = column("to", "number", "Upper end.")
    alarms: Mean = column("alarms", "count", "Interventions in all rounds.")

    @property
    def is_control(self) -> bool:
        """Whether it is plain generation."""
        return self.key.name == AGAIN


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
        again, printed, ours = self.arms
        ends = [f"{row.text('ratio')} ({row.text('low')} to {row.text('high')})" for row in (printed, ours, again)]
        return (
            f"A token of {self.milliseconds:.1f} ms costs {ends[0]} of itself under the printed guard and {ends[1]} "
            f"under the default; plain generation over itself, the control, {ends[2]}."
        )

    def figure(self) -> Any:
        """Draw the ratios with their intervals."""
        ratios = [row.ratio.value for row in self.arms]
        above = [row.high.value - row.ratio.value for row in self.arms]
        below = [row.ratio.value - row.low.value for row in self.arms]
        names = [row.label for row in self.arms]
        fig = px.scatter(x=names, y=ratios, error_y=above, error_y_minus=below)
        fig.update_layout(xaxis_title="", yaxis_title="processor time over plain generation")
        return figure_of(fig, self, width=800, height=460)


def arm(model: Any, guard: LoopGuard | None, new: int) -> Callable[[], tuple[float, int]]:
    """Return what continues the next opening at each call: the seconds of a token, and the number of alarms."""
    texts = iter(openings_of("choose"))

    def continue_next() -> tuple[float, int]:
        inputs = model.tokenizer(next(texts)[1], return_tensors="pt", verbose=False)
        ids, seen = inputs["input_ids"], inputs["attention_mask"]
        torch.manual_seed(0)
        with torch.random.fork_rng():
            return token_seconds(
                model.hf, guard, {"input_ids": ids, "attention_mask": seen, "min_new_tokens": new}, new
            )

    return continue_next


@measurement(loading="whole")
def overhead(setup: Setup, *, rounds: Natural = 24, new: Natural = 64) -> Overhead:
    """Time drawn continuations of openings under no guard, no guard again, and both guards, in rotating order.

    Args:
        rounds: Openings that each arm continues, after one that warms up.
        new: New tokens.
    """
    arms = {name: arm(setup.target, guard, new) for name, guard in GUARDS.items()}
    measured = interleaved(arms, rounds)
    seconds = {name: [each for each, _ in made] for name, made in measured.items()}
    rows: list[Cost] = []
    for name in (AGAIN, PRINTED, OURS):
        found = ratio(seconds[name], seconds[PLAIN])
        low, high = map(Mean, found["interval"])
        alarms = sum(count for _, count in measured[name])
        row = Cost(key=Method(name), ratio=Mean(found["median"]), low=low, high=high, alarms=Mean(float(alarms)))
        rows.append(row)
    return Overhead(arms=tuple(rows), milliseconds=1000 * median(seconds[PLAIN]))
