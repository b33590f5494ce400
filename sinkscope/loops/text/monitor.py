"""The online monitor of one row: it takes one token at a time and says whether to intervene at once.

By default it looks for copies (`copies`). With `PaperSettings()` it is the monitor of LoopGuard, section 5.2 and
appendix B.2 (`votes`). Time and memory per token do not grow with the length of the row.
"""

from __future__ import annotations

from sinkscope.loops.text.copies import MonitorSettings, WordsOf
from sinkscope.loops.text.signals import IDS, Step, checked_id
from sinkscope.loops.text.votes import PaperSettings

Settings = MonitorSettings | PaperSettings
"""The settings of a monitor say which rule it has."""


class Monitor:
    """The monitor of one row: call `update` with every generated token, and `end` when the row is finished.

    `last` is the last `Step`. A new turn of a conversation needs a new monitor.

    Args:
        settings: Settings of one of the two rules; by default `MonitorSettings()`.
        words_of: Gives the words of the last tokens (`CopyRule`). Without it, data is not told from prose, and
            repetitions whose numbers change are not found. The paper's rule does not need it.
        asked: Number of copies that the prompt asks for, which are no loop.

    Attributes:
        rule: The rule and what it remembers of the row.
    """

    def __init__(self, settings: Settings | None = None, words_of: WordsOf | None = None, asked: int = 0) -> None:
        self.settings = settings or MonitorSettings()
        self.last = Step()
        self.ended = False
        self.rule = self.settings.new_rule(words_of, asked)
        self._rests_until = 0

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
            SinkscopeError: The token is no id.
        """
        if self.ended:
            return self.last
        if type(token) is not int or not 0 <= token < IDS:
            token = checked_id(token)
        step = self.last.step + 1
        decision = self.rule.add(token, p_max)
        may_trigger = step >= max(self.settings.warmup, self._rests_until)
        self.last = decision._replace(step=step, trigger=decision.trigger and may_trigger)
        if self.last.trigger:
            self._rests_until = step + self.settings.cooldown + 1
        return self.last
