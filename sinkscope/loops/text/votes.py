"""The monitor's rule as LoopGuard prints it, section 5.2, appendix B.2: votes and gates over a window (Eqs. 8, 9)."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field, Strict

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural, Share, Whole, check_fields
from sinkscope.loops.text.copies import CopyCount, WordsOf
from sinkscope.loops.text.repetition import TailRepetition
from sinkscope.loops.text.signals import (
    THETA_CR,
    THETA_TTR,
    WINDOW,
    Step,
    WindowNovelty,
    compression_ratio,
    type_token_ratio,
)


@dataclass(frozen=True)
class PaperSettings:
    """Settings of the paper's rule, which takes votes. The defaults are the printed values.

    The paper states window, thresholds, streak, votes, stall, warm-up and cooldown, and leaves the others open.

    Attributes:
        window: Number of generated tokens that the signals cover (W).
        theta_ttr: The type-token ratio votes if it is below this value.
        theta_cr: The compression ratio votes if it is below this value.
        theta_conf: The streak counts steps whose largest probability exceeds this value.
        streak: The streak votes from this length on. Eq. 8 has >= 6; "exceeds 6" in appendix B.2 would be 7 here.
        votes: Number of the three signals that a warning needs (K), at most 2 without probabilities.
        theta_nov: A step stalls if its novelty is below this value.
        stall: Number of consecutive stalled steps that open the stall gate.
        warmup: First step that may trigger (t_min).
        cooldown: Number of steps after a trigger in which no other may follow.
        stride: Number of steps between computations of the compression ratio, which is held in between. With 16 steps
            it costs 1/16, and a vote comes at most 15 tokens late.
        novelty_n: Length of the n-grams whose novelty counts. Single tokens are never new in a table of numbers; 4 is
            the length that seq-rep-4 and no-repeat-4-gram use.
        novelty_span: Number of tokens over which novelty is averaged. With 64 and the paper's 0.02, one new n-gram is
            tolerated; a single changed token creates four new ones, so a list that counts up never stalls.
        tail_repeats: Number of copies in a tail repetition.
        tail_shortest: Minimum tokens of a tail repetition, so that a short ruler is not one; at least 6.
        tail_longest: Largest period of a tail repetition ("short-period"), a quarter of the window.
        tail_hold: Number of consecutive steps with a tail repetition that open the tail gate, as for a stall.
    """

    rule: ClassVar[str] = "signals"

    window: Annotated[int, Strict(), Field(ge=2)] = WINDOW
    theta_ttr: Share = THETA_TTR
    theta_cr: Share = THETA_CR
    theta_conf: Share = 0.9
    streak: Natural = 6
    votes: Annotated[int, Strict(), Field(ge=1, le=3)] = 2
    theta_nov: Share = 0.02
    stall: Natural = 4
    warmup: Whole = 64
    cooldown: Whole = 32
    stride: Natural = 16
    novelty_n: Natural = 4
    novelty_span: Natural = 64
    tail_repeats: CopyCount = 3
    tail_shortest: Annotated[int, Strict(), Field(ge=6)] = 64
    tail_longest: Natural = 64
    tail_hold: Natural = 4

    def __post_init__(self) -> None:
        check_fields(self)
        if self.window < self.novelty_n:
            least = f"expected greater than or equal to {self.novelty_n}, the value of novelty_n"
            raise SinkscopeError(f"window is {self.window}: {least}")

    def new_rule(self, words_of: WordsOf | None = None, asked: int = 0, asked_items: float = 0) -> VoteRule:
        """Return the rule for one row, which needs no words."""
        return VoteRule(self)


class VoteRule:
    """Counts votes for a warning and asks for persistence; `add` takes every token.

    Args:
        settings: Settings of the rule.

    Attributes:
        looped: Not used by this rule: it needs no copies.
    """

    def __init__(self, settings: PaperSettings) -> None:
        s = self.settings = settings
        self.looped = False
        self._window = deque[int](maxlen=s.window)
        self._novelty = WindowNovelty(s.window, s.novelty_n, s.novelty_span)
        self._tail = TailRepetition(s.tail_longest, s.tail_repeats, s.tail_shortest)
        self._step = 0
        self._cr = math.nan
        self._confident_steps = 0
        self._stalled_steps = 0
        self._tail_steps = 0

    def add(self, token: int, p_max: float | None = None) -> Step:
        """Take the next token and the largest probability after it."""
        s = self.settings
        self._step += 1
        self._window.append(token)
        tail, ttr = self._tail.add(token), type_token_ratio(self._window)
        if self._step % s.stride == 0:
            self._cr = compression_ratio(self._window)
        is_sure = p_max is not None and p_max > s.theta_conf
        self._confident_steps = self._confident_steps + 1 if is_sure else 0
        self._tail_steps = 0 if tail is None else self._tail_steps + 1
        self._stalled_steps = self._stalled_steps + 1 if self._novelty.add(token) < s.theta_nov else 0
        votes = {"ttr": ttr < s.theta_ttr, "cr": self._cr < s.theta_cr, "p1": self._confident_steps >= s.streak}
        gates = {"stall": self._stalled_steps >= s.stall, "tail": self._tail_steps >= s.tail_hold}
        return Step(0, ttr, self._cr, tail, self.decide(votes, gates, p_max is not None))

    def decide(self, votes: dict[str, bool], gates: dict[str, bool], has_p_max: bool) -> bool:
        """Return whether enough signals warn, Warn(t) >= K (Eq. 8), and Stall(t) or TailRep(t) holds (Eq. 9).

        Args:
            votes: The signals of a warning: "ttr", "cr" and "p1".
            gates: The signs of persistence: "stall" and "tail".
            has_p_max: Whether there are probabilities; without them "p1" is missing, and two votes are enough.
        """
        needed = self.settings.votes
        if not has_p_max:
            needed = min(needed, len(votes) - 1)
        return sum(votes.values()) >= needed and any(gates.values())
