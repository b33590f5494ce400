"""The online monitor of one row: it takes one token at a time and says whether to intervene at once.

By default it looks for copies (`copies`). With `PaperSettings()` it is the monitor of LoopGuard, section 5.2 and
appendix B.2 (`votes`). Time and memory per token do not grow with the length of the row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from math import inf
from typing import Any

from sinkscope.loops.text.copies import MonitorSettings, WordsOf
from sinkscope.loops.text.signals import IDS, Step, checked_id
from sinkscope.loops.text.votes import PaperSettings

Settings = MonitorSettings | PaperSettings
"""The settings of a monitor say which rule it has."""


MARKED_EVERY, MARKS = 1024, 4
"""The monitor of a row that looped is copied every 1024 tokens, and the last 4 copies stay: less is read again."""


class Monitor:
    """The monitor of one row: call `update` with every generated token, and with no padding behind the end.

    `last` is the last `Step`. A new turn of a conversation needs a new monitor.

    Args:
        settings: Settings of one of the two rules; by default `MonitorSettings()`.
        words_of: Gives the words of the last tokens (`CopyRule`). Without it, data is not told from prose, and
            repetitions whose numbers change are not found. The paper's rule does not need it.
        asked: Number of copies that the prompt asks for, which are no loop.
        asked_items: Number of items of a list that the prompt may ask for, which are no loop either, but are reported;
            by default the prompt is unknown, and may ask for any number.

    Attributes:
        rule: The rule and what it remembers of the row.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        words_of: WordsOf | None = None,
        asked: int = 0,
        asked_items: float = inf,
    ) -> None:
        self.settings = settings or MonitorSettings()
        self.last = Step()
        self.rule = self.settings.new_rule(words_of, asked, asked_items)
        self._rests_until = 0

    def __repr__(self) -> str:
        """Return the rule, and how many tokens it has read."""
        return f"Monitor({type(self.settings).__name__}, step={self.last.step}, trigger={self.last.trigger})"

    def update(self, token: int, p_max: float | None = None) -> Step:
        """Process the next token, and decide whether to intervene: Trigger(t), Eq. 9.

        Args:
            token: Id of the token.
            p_max: Largest probability of the distribution that follows it, p_max(t) = max_v Pr(y_{t+1} = v | y_{1:t});
                None if unknown. Only the paper's rule uses it.

        Returns:
            The signals and whether to intervene.

        Raises:
            SinkscopeError: The token is no id.
        """
        if type(token) is not int or not 0 <= token < IDS:  # every token comes here, and is nearly always one
            token = checked_id(token)
        step = self.last.step + 1
        decision = self.rule.add(token, p_max)
        may_trigger = step >= max(self.settings.warmup, self._rests_until)
        self.last = decision._replace(step=step, trigger=decision.trigger and may_trigger)
        if self.last.trigger:
            self._rests_until = step + self.settings.cooldown + 1
        return self.last


class WatchedRow:
    """One row and its monitor, since its last prompt.

    Args:
        monitor: Makes its monitor.
        prompt: Number of real tokens before its first generated token.
        prompt_ids: The ids of the latest of them that are known.

    Attributes:
        monitor: Its monitor.
        ids: Its latest ids, up to the newest that the monitor has seen.
        steering: How a guard steers it since it looped.
        stops: Whether a guard lets it end.
        ended: Whether it has: later tokens are padding.
    """

    def __init__(self, monitor: Callable[[], Monitor], prompt: int = 0, prompt_ids: Sequence[int] = ()) -> None:
        self.monitor = monitor()
        self._marks = [monitor()]
        self.prompt = prompt
        self.ids = list(prompt_ids)
        self._prompt_ids = len(self.ids)
        self.steering: Any = None  # `guard.steer.Steering`
        self.stops = self.ended = False

    @property
    def written(self) -> int:
        """Number of its generated tokens that the monitor has seen."""
        return len(self.ids) - self._prompt_ids

    @property
    def length(self) -> int:
        """Number of its tokens."""
        return self.prompt + self.written

    def add(self, token: int, p_max: float | None) -> bool:
        """Pass the next token, and the largest probability of the one after it, to the monitor; whether it triggers."""
        self.ids.append(token)
        return self._read(token, p_max)

    def take_back(self, count: int) -> None:
        """Forget the last `count` tokens, as if they had never arrived: an earlier monitor reads those after it."""
        del self.ids[len(self.ids) - count :]
        if self.steering is not None:
            self.steering.copies.take_back(len(self.ids))
        while self._marks[-1].last.step > self.written:
            self._marks.pop()
        looped = self.monitor.rule.looped
        self.monitor = deepcopy(self._marks[-1])
        self.monitor.rule.looped = looped  # first, because what copies are is asked once, when they first count
        for token in self.ids[self._prompt_ids + self.monitor.last.step :]:
            self._read(token, 0.0)

    def _read(self, token: int, p_max: float | None) -> bool:
        """Pass a token to the monitor, and mark it now and then if the row looped; whether it triggers."""
        decision = self.monitor.update(token, p_max)
        is_late = self.written < decision.step + MARKS * MARKED_EVERY
        if self.steering is not None and is_late and decision.step % MARKED_EVERY == 0:
            self._marks.append(deepcopy(self.monitor))
            del self._marks[1:-MARKS]
        return decision.trigger
