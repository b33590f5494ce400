"""The variants of LoopGuard's Table 3: the paper's guard with another monitor.

    sinkscope bench --task loops --methods full,experiments.papers.loopguard.variants:p1:256

- p1 (Table 3's single-signal): one vote alone, without a gate.
- always: an act every 200 tokens; at every step outside the cooldown it would be 77 acts in 2,500 tokens, and Table 3
  has 12.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from sinkscope.files.records import Natural
from sinkscope.loops.guard import LoopGuard
from sinkscope.loops.text.copies import WordsOf
from sinkscope.loops.text.monitor import PaperSettings
from sinkscope.loops.text.votes import VoteRule


@dataclass(frozen=True)
class OneSignal(PaperSettings):
    """Settings of a rule that decides by one of the paper's signals, or by a clock.

    Attributes:
        signal: The signal.
        every: Steps between triggers of the clock.
    """

    signal: Literal["p1", "tail", "clock"] = "p1"
    every: Natural = 200

    def new_rule(self, words_of: WordsOf | None = None, asked: int = 0, asked_items: float = 0) -> VoteRule:
        """Return the rule."""
        return OneSignalRule(self)


class OneSignalRule(VoteRule):
    """The paper's rule with one signal."""

    settings: OneSignal

    def decide(self, votes: dict[str, bool], gates: dict[str, bool], has_p_max: bool) -> bool:
        """Return the signal."""
        return (votes | gates | {"clock": self._step % self.settings.every == 0})[self.settings.signal]


Timed = partial(OneSignal, signal="clock")
MONITORS: dict[str, OneSignal] = {"p1": OneSignal(), "always": Timed()}


def guard_of(variant: str, budget: Natural = 1024) -> LoopGuard:
    """Make the paper's guard with another monitor."""
    return LoopGuard.paper(budget, monitor=MONITORS[variant])


p1, always = partial(guard_of, "p1"), partial(guard_of, "always")
