"""The monitor's rule as LoopGuard prints it, section 5.2, appendix B.2: votes and gates over a window (Eqs. 8, 9)."""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.loops.text.repetition import TailRepetition
from sinkscope.loops.text.settings import PaperSettings
from sinkscope.loops.text.signals import Tail, WindowNovelty, compression_ratio, type_token_ratio


class Signals(NamedTuple):
    """The signals after a token: type-token ratio, compression ratio, tail repetition, and whether they say "loop"."""

    ttr: float
    cr: float
    tail: Tail | None
    due: bool


class VoteRule:
    """Votes on a warning and asks for persistence; `add` takes every token.

    Args:
        settings: Settings of the rule.
    """

    def __init__(self, settings: PaperSettings) -> None:
        s = self.settings = settings
        self._window = deque[int](maxlen=s.window)
        self._novelty = WindowNovelty(s.window, s.novelty_n, s.novelty_span)
        self._tail = TailRepetition(s.tail_longest, s.tail_repeats, s.tail_shortest)
        self._step = 0
        self._cr = math.nan
        self._confident_steps = 0
        self._stalled_steps = 0
        self._tail_steps = 0

    def add(self, token: int, p_max: float | None) -> Signals:
        """Take the next token and the largest probability after it.

        Raises:
            SinkscopeError: Only probabilities vote, and none was given.
        """
        s = self.settings
        self._step += 1
        self._window.append(token)
        tail, ttr = self._tail.add(token), type_token_ratio(self._window)
        if self._step % s.stride == 0:
            self._cr = compression_ratio(self._window)
        self._tail_steps = 0 if tail is None else self._tail_steps + 1
        persists = self._persists(token)
        due = self._warns(p_max, ttr) and persists
        if s.rule != "signals":
            due = s.rule == "always" and self._step % s.every == 0
        return Signals(ttr, self._cr, tail, due)

    def _warns(self, p_max: float | None, ttr: float) -> bool:
        """Whether enough signals vote, Warn(t) >= K (Eq. 8); without probabilities one voter is missing."""
        s = self.settings
        sure = p_max is not None and p_max > s.theta_conf
        self._confident_steps = self._confident_steps + 1 if sure else 0
        signals = {"ttr": ttr < s.theta_ttr, "cr": self._cr < s.theta_cr, "p1": self._confident_steps >= s.streak}
        needed = s.votes
        if p_max is None and "p1" in s.voters:
            needed = min(s.votes, len(s.voters) - 1)
            if not needed and s.votes:
                raise SinkscopeError(
                    "only the top-1 streak (p1) votes, and no probability came: pass p_max, or take another variant"
                )
        votes = 0
        for voter in s.voters:
            votes += signals[voter]
        return votes >= needed

    def _persists(self, token: int) -> bool:
        """Whether Stall(t) or TailRep(t) holds, or no gate is asked for (Eq. 9)."""
        s = self.settings
        novelty = self._novelty.add(token)
        self._stalled_steps = self._stalled_steps + 1 if novelty < s.theta_nov else 0
        gates = {"stall": self._stalled_steps >= s.stall, "tail": self._tail_steps >= s.tail_hold}
        return not s.gates or any(gates[gate] for gate in s.gates)
