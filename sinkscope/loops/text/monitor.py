"""The online monitor of one row: it takes one token at a time and says whether to intervene at once.

By default it looks for copies (`copies`). With `MonitorSettings.paper()` it is the monitor of LoopGuard, section 5.2
and appendix B.2 (`votes`). Time and memory per token do not grow with the length of the row.
"""

from __future__ import annotations

import math
from collections import deque
from copy import copy
from typing import Any, NamedTuple

from sinkscope.loops.text.copies import CopyRule, WordsOf
from sinkscope.loops.text.counters import CounterRepetition
from sinkscope.loops.text.repetition import TailRepetition
from sinkscope.loops.text.settings import VARIANTS, MonitorSettings, PaperSettings, Settings
from sinkscope.loops.text.signals import Tail, WindowNovelty, checked_id
from sinkscope.loops.text.votes import VoteRule

__all__ = ["VARIANTS", "Monitor", "MonitorSettings", "PaperSettings", "Settings", "Step"]


class Step(NamedTuple):
    """The monitor's state and decision after a token.

    Attributes:
        step: Number of tokens so far, including this one (t).
        ttr: Type-token ratio of the window; NaN under the default rule, which does not need it.
        cr: Compression ratio of the window when it was last computed; NaN before the first time, and under the default
            rule.
        tail: Repetition that reaches this token, if there is one; its positions count from the first token (0).
        trigger: Whether to intervene now.
        suspect: Whether the repetition may be honest, so that it is only reported.
    """

    step: int = 0
    ttr: float = math.nan
    cr: float = math.nan
    tail: Tail | None = None
    trigger: bool = False
    suspect: bool = False


class Monitor:
    """The monitor of one row: call `update` with every generated token, and `end` when the row is finished.

    `last` is the last `Step`. A new turn of a conversation needs a new monitor.

    Args:
        settings: Settings of one of the two rules.
        words_of: Gives the words of the last tokens (`CopyRule`). Without it, data is not told from prose, and
            repetitions whose numbers change are not found. The paper's rule does not need it.
        asked: Number of copies that the prompt asks for, which are no loop.
    """

    def __init__(self, settings: Settings | None = None, words_of: WordsOf | None = None, asked: int = 0) -> None:
        self.settings = settings or MonitorSettings()
        self.last = Step()
        self.ended = False
        self._rests_until = 0
        self._votes: VoteRule | None = None
        self._copies = CopyRule(MonitorSettings(), words_of, asked)
        if isinstance(self.settings, PaperSettings):
            self._votes = VoteRule(self.settings)
        else:
            self._copies = CopyRule(self.settings, words_of, asked)

    @property
    def looped(self) -> bool:
        """Whether a guard has acted on the row, which then needs no tokens beyond the copies."""
        return self._copies.looped

    @looped.setter
    def looped(self, looped: bool) -> None:
        self._copies.looped = looped

    def is_number(self, token: int) -> bool:
        """Return whether a token is a number or a part of one."""
        return self._copies.is_number(token)

    def copy(self) -> Monitor:
        """Return a monitor that goes on from here by itself."""
        return _copied(self)

    def end(self) -> None:
        """Mark the row as finished: later tokens for it are padding and are ignored."""
        self.ended = True
        self.last = self.last._replace(trigger=False)

    def update(self, token: int, p_max: float | None = None) -> Step:
        """Process the next token, and decide whether to intervene: Trigger(t), Eq. 9.

        Args:
            token: Id of the token.
            p_max: Largest probability of the distribution that follows it, p_max(t) = max_v Pr(y_{t+1} = v | y_{1:t});
                None if unknown. Only the paper's rule uses it.

        Returns:
            The signals and whether to intervene; after `end`, the last step again without a trigger.

        Raises:
            SinkscopeError: The token is no id, or only probabilities vote, and none was given.
        """
        if self.ended:
            return self.last
        token, step = checked_id(token), self.last.step + 1
        may_trigger = step >= max(self.settings.warmup, self._rests_until)
        if self._votes is not None:
            ttr, cr, tail, due = self._votes.add(token, p_max)
            self.last = Step(step, ttr, cr, tail, due and may_trigger)
        else:
            found = self._copies.add(token)
            self.last = Step(step)
            if found is not None:
                self.last = Step(step, tail=found.tail, trigger=found.cut and may_trigger, suspect=not found.cut)
        if self.last.trigger:
            self._rests_until = step + self.settings.cooldown + 1
        return self.last


def _copied(one: Any) -> Any:
    """A copy with tokens of its own; what it was made with is shared."""
    other = copy(one)
    for name, value in vars(one).items():
        if isinstance(value, list | dict | deque):
            setattr(other, name, copy(value))
        elif isinstance(value, CopyRule | VoteRule | TailRepetition | CounterRepetition | WindowNovelty):
            setattr(other, name, _copied(value))
    return other
