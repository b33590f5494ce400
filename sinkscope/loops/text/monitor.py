"""The online monitor of one row: it takes one token at a time and says whether to intervene at once.

By default it acts as soon as something has occurred three times. `MonitorSettings.paper()` is the monitor of LoopGuard,
section 5.2 and appendix B.2. Time and memory per token do not grow with the length of the row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args

from pydantic import Field, Strict, StrictFloat, StrictInt

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural, Share, Whole, between, checked, checked_value
from sinkscope.loops.text.counters import CounterRepetition
from sinkscope.loops.text.repetition import TailRepetition
from sinkscope.loops.text.signals import (
    THETA_CR,
    THETA_TTR,
    WINDOW,
    Tail,
    WindowNovelty,
    checked_id,
    compression_ratio,
    type_token_ratio,
)

Voter = Literal["ttr", "cr", "p1"]
Gate = Literal["stall", "tail"]
PLAIN_TOKENS = 384
CopyCount = Annotated[StrictInt | StrictFloat, Field(ge=2)]


@checked
class MonitorSettings:
    """Every parameter of the monitor. The defaults suit most users; `paper()` gives the printed values.

    The paper states window, thresholds, streak, votes, stall, warm-up and cooldown of rule "signals" and leaves the
    others open. Rule "repeats" uses only window, cooldown, warmup and the names that begin with "tail".

    Attributes:
        window: Number of generated tokens that the windowed signals cover (W).
        theta_ttr: The type-token ratio votes if it is below this value.
        theta_cr: The compression ratio votes if it is below this value.
        theta_conf: The streak counts steps whose largest probability exceeds this value.
        streak: The streak votes from this length on. Eq. 8 has >= 6; "exceeds 6" in appendix B.2 would be 7 here.
        votes: Number of `voters` that a warning needs (K). Without probabilities one voter is missing, and a warning
            needs at most as many votes as there are remaining voters.
        theta_nov: A step stalls if its novelty is below this value.
        stall: Number of consecutive stalled steps that open the stall gate.
        warmup: First step that may trigger (t_min); 64 in the paper.
        cooldown: Number of steps after a trigger in which no other may follow.
        voters: Signals that vote on a warning. If empty, the warning always holds.
        gates: Signs of persistence; a trigger needs one of them. If empty, a trigger needs none.
        stride: Number of steps between computations of the compression ratio, which is held in between. With 16 steps
            it costs 1/16, and a vote comes at most 15 tokens late.
        novelty_n: Length of the n-grams whose novelty counts. Single tokens are never new in a table of numbers; 4 is
            the length that seq-rep-4 and no-repeat-4-gram use.
        novelty_span: Number of tokens over which novelty is averaged. With 64 and the paper's 0.02, one new n-gram is
            tolerated; a single changed token creates four new ones, so a list that counts up never stalls.
        tail_repeats: Number of copies in a tail repetition. Two copies may be a quotation. With fewer than three, some
            cycles are found later.
        tail_shortest: Minimum tokens of a tail repetition, so that a short ruler is not one; at least 6. `paper()`
            has 64.
        tail_longest: Largest period of a tail repetition. `paper()` has 64 ("short-period"), a quarter of the window.
        tail_beyond: Number of tokens that a repetition needs beyond its first two copies under rule "repeats". Short
            pieces, which honest texts repeat, then need more copies: a piece of one token 66, one of 64 tokens three.
        counter_copies: Number of copies of a repetition whose numbers change, under rule "repeats".
        counter_tokens: Minimum tokens of such a repetition.
        tail_hold: Number of consecutive steps with a tail repetition that open the tail gate. `paper()` has 4, as for a
            stall.
        rule: "repeats": a tail repetition of any period triggers by itself; "signals": votes and gates, the paper's
            rule; "always": a trigger every `every` steps outside warm-up and cooldown; "never": no trigger.
        every: Steps between triggers of "always". One in 200 gives 12 in 2,500 tokens, close to Table 3 (12.5).
    """

    window: Annotated[int, Strict(), Field(ge=2)] = WINDOW
    theta_ttr: Share = THETA_TTR
    theta_cr: Share = THETA_CR
    theta_conf: Share = 0.9
    streak: Natural = 6
    votes: Whole = 2
    theta_nov: Share = 0.02
    stall: Natural = 4
    warmup: Whole = 0
    cooldown: Whole = 32
    voters: tuple[Voter, ...] = get_args(Voter)
    gates: tuple[Gate, ...] = get_args(Gate)
    stride: Natural = 16
    novelty_n: Natural = 4
    novelty_span: Natural = 64
    tail_repeats: CopyCount = 3
    tail_shortest: Annotated[int, Strict(), Field(ge=6)] = 48
    tail_longest: Natural = 2048
    tail_beyond: Whole = 64
    counter_copies: Annotated[int, Strict(), Field(ge=2)] = 12
    counter_tokens: Natural = 256
    tail_hold: Natural = 1
    rule: Literal["repeats", "signals", "always", "never"] = "repeats"
    every: Natural = 200

    def __post_init__(self) -> None:
        checked_value(between(int, None, len(self.voters)), self.votes, "votes", then=", the number of voters")
        checked_value(between(int, self.novelty_n, None), self.window, "window", then=", the value of novelty_n")

    @classmethod
    def paper(cls, **changed: Any) -> MonitorSettings:
        """Return the monitor printed in the paper (Eq. 8 and 9, Table 3's full), with some fields changed."""
        return cls.variant("full", **changed)

    @classmethod
    def variant(cls, name: str, **changed: Any) -> MonitorSettings:
        """Return settings by name: the default, the paper's, a single signal alone, or one of the controls.

        Args:
            name: "repeats": the default. The others modify the paper's monitor, "full": "p1" (Table 3's single-signal),
                "ttr", "cr": only that vote, without a gate; "stall", "tail": only that gate, without a vote; "always"
                and "none" of Table 3.
            changed: Further fields to set.

        Raises:
            SinkscopeError: The variant or field does not exist, or a value is invalid.
        """
        if name not in VARIANTS:
            raise SinkscopeError(f"unknown variant {name!r}: there are {', '.join(VARIANTS)}")
        return cls(**{**VARIANTS[name], **changed})


_PAPER = {
    "rule": "signals",
    "warmup": 64,
    "tail_shortest": 64,
    "tail_longest": 64,
    "tail_hold": 4,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "repeats": {},
    "full": _PAPER,
    **{voter: {**_PAPER, "voters": (voter,), "votes": 1, "gates": ()} for voter in get_args(Voter)},
    **{gate: {**_PAPER, "voters": (), "votes": 0, "gates": (gate,)} for gate in get_args(Gate)},
    "always": {**_PAPER, "rule": "always"},
    "none": {**_PAPER, "rule": "never"},
}


class Step(NamedTuple):
    """The monitor's state and decision after a token.

    Attributes:
        step: Number of tokens so far, including this one (t).
        ttr: Type-token ratio of the window.
        cr: Compression ratio of the window when it was last computed; NaN before the first time, and under rule
            "repeats", which does not need it.
        tail: Repetition that reaches this token, if there is one; its positions count from the first token (0).
        trigger: Whether to intervene now.
    """

    step: int = 0
    ttr: float = math.nan
    cr: float = math.nan
    tail: Tail | None = None
    trigger: bool = False


class Monitor:
    """The monitor of one row: call `update` with every generated token, and `end` when the row is finished.

    `last` is the last `Step`. A new turn of a conversation needs a new monitor.

    Args:
        settings: Settings of the monitor.
        is_plain: Says whether tokens, two copies of a repetition and a little more, are numbers and signs alone. Rule
            "repeats" then waits for 384 of them, because rows of a table may be equal. By default no tokens are.
        is_number: Says whether the token that is added is a number or a part of one. By default no token is, and
            repetitions whose numbers change are not found.
        asked: Number of copies that the prompt asks for, which are no loop.

    Attributes:
        looped: Whether a guard has acted on the row, which then needs none beyond the copies.
    """

    def __init__(
        self,
        settings: MonitorSettings | None = None,
        is_plain: Callable[[list[int]], bool] | None = None,
        is_number: Callable[[int], bool] | None = None,
        asked: int = 0,
    ) -> None:
        s = self.settings = settings or MonitorSettings()
        self.is_plain = is_plain
        self.is_number = is_number
        self.asked = asked
        self.looped = False
        self.last = Step()
        self.ended = False
        self._window = deque[int](maxlen=s.window)
        self._novelty = WindowNovelty(s.window, s.novelty_n, s.novelty_span)
        self._tail = TailRepetition(s.tail_longest, s.tail_repeats, s.tail_shortest)
        self._counter = CounterRepetition(s.tail_longest, s.counter_copies, s.counter_tokens)
        self._confident_steps = 0
        self._stalled_steps = 0
        self._tail_steps = 0
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
                None if unknown.

        Returns:
            The signals and whether to intervene; after `end`, the last step again without a trigger.

        Raises:
            SinkscopeError: The token is no id, or only probabilities vote, and none was given.
        """
        if self.ended:
            return self.last
        token = checked_id(token)
        self._window.append(token)
        s, step, cr = self.settings, self.last.step + 1, self.last.cr
        tail = self._tail.add(token)
        if s.rule == "repeats":
            tail = self._accepted(tail, token, step)
        ttr = type_token_ratio(self._window)
        self._tail_steps = 0 if tail is None else self._tail_steps + 1
        due = self._tail_steps >= s.tail_hold
        if s.rule != "repeats":
            if step % s.stride == 0:
                cr = compression_ratio(self._window)
            persists = self._persists(token, due)
            due = self._warns(p_max, ttr, cr) and persists
        if s.rule in ("always", "never"):
            due = s.rule == "always" and step % s.every == 0
        trigger = due and step >= max(s.warmup, self._rests_until)
        if trigger:
            self._rests_until = step + s.cooldown + 1
        self.last = Step(step, ttr, cr, tail, trigger)
        return self.last

    def _accepted(self, tail: Tail | None, token: int, step: int) -> Tail | None:
        """The exact repetition, or that of a counter, unless it may be honest: short, plain, or asked for."""
        counter: Tail | None = None
        if self.is_number is not None:
            counter = self._counter.add(token, self.is_number(token))
        if tail is not None:
            covered = step - tail.start
            beyond = 2 * tail.period + self.settings.tail_beyond
            is_short = covered < max(PLAIN_TOKENS, 3 * tail.period)  # for equal rows of a table
            if (covered < beyond and not self.looped) or (is_short and self._is_plain(tail)):
                tail = None
        if tail is None and counter is not None and not self._is_plain(counter):  # tables count, too
            tail = counter
        if tail is not None and tail.repeats <= self.asked:
            return None
        return tail

    def _is_plain(self, tail: Tail) -> bool:
        """Whether the last two copies of a repetition are numbers and signs alone."""
        return self.is_plain is not None and self.is_plain(self._tail.last(2 * tail.period + 2))

    def _warns(self, p_max: float | None, ttr: float, cr: float) -> bool:
        """Whether enough signals vote, Warn(t) >= K (Eq. 8); without probabilities one voter is missing."""
        s = self.settings
        sure = p_max is not None and p_max > s.theta_conf
        self._confident_steps = self._confident_steps + 1 if sure else 0
        signals = {"ttr": ttr < s.theta_ttr, "cr": cr < s.theta_cr, "p1": self._confident_steps >= s.streak}
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

    def _persists(self, token: int, tail_rep: bool) -> bool:
        """Whether Stall(t) or TailRep(t) holds, or no gate is asked for (Eq. 9)."""
        s = self.settings
        novelty = self._novelty.add(token)
        self._stalled_steps = self._stalled_steps + 1 if novelty < s.theta_nov else 0
        gates = {"stall": self._stalled_steps >= s.stall, "tail": tail_rep}
        return not s.gates or any(gates[gate] for gate in s.gates)
