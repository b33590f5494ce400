"""The settings of the monitor's two rules: copies, which is the default, and the votes of LoopGuard's paper."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import Field, Strict, StrictFloat, StrictInt

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Natural, Share, Whole, between, checked, checked_value
from sinkscope.loops.text.signals import THETA_CR, THETA_TTR, WINDOW

Cut = Literal["auto", "exact", "all", "none"]
Voter = Literal["ttr", "cr", "p1"]
Gate = Literal["stall", "tail"]
CopyCount = Annotated[StrictInt | StrictFloat, Field(ge=2)]


@checked
class MonitorSettings:
    """Settings of the default rule, which looks for copies. `paper()` and `variant()` give the other rule's.

    Attributes:
        window: Number of tokens within which a loop that goes on is reported once (W).
        warmup: First step that may trigger.
        cooldown: Number of steps after a trigger in which no other may follow.
        tail_repeats: Number of copies in a repetition. Two copies may be a quotation. With fewer than three, some
            cycles are found later.
        tail_shortest: Minimum tokens of a repetition, at least 6.
        tail_longest: Largest period.
        tail_beyond: Number of tokens that a repetition needs beyond its first two copies. Short pieces, which honest
            texts repeat, then need more copies: a piece of one token 66, one of 64 tokens three.
        data_tokens: Number of tokens that equal copies need in all if they are data: tables, code, markup or logs.
        counter_copies: Number of copies of a repetition whose numbers change.
        counter_tokens: Minimum tokens of such a repetition.
        cut: Which repetitions trigger; the others are only reported. "auto": equal copies, and in prose also copies
            whose numbers change. "exact": equal copies alone. "all": numbers may change in code, markup and logs, too.
            "none": nothing triggers.
    """

    rule: ClassVar[str] = "repeats"

    window: Natural = WINDOW
    warmup: Whole = 0
    cooldown: Whole = 32
    tail_repeats: CopyCount = 3
    tail_shortest: Annotated[int, Strict(), Field(ge=6)] = 48
    tail_longest: Natural = 2048
    tail_beyond: Whole = 64
    data_tokens: Natural = 512
    counter_copies: Annotated[int, Strict(), Field(ge=2)] = 12
    counter_tokens: Natural = 256
    cut: Cut = "auto"

    @staticmethod
    def paper(**changed: Any) -> PaperSettings:
        """Return the monitor printed in the paper (Eq. 8 and 9, Table 3's full), with some fields changed."""
        return PaperSettings(**changed)

    @staticmethod
    def variant(name: str, **changed: Any) -> Settings:
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
        if name == "repeats":
            return MonitorSettings(**changed)
        return PaperSettings(**{**VARIANTS[name], **changed})


@checked
class PaperSettings:
    """Settings of the paper's rule, which votes. The defaults are the printed values.

    The paper states window, thresholds, streak, votes, stall, warm-up and cooldown, and leaves the others open.

    Attributes:
        window: Number of generated tokens that the signals cover (W).
        theta_ttr: The type-token ratio votes if it is below this value.
        theta_cr: The compression ratio votes if it is below this value.
        theta_conf: The streak counts steps whose largest probability exceeds this value.
        streak: The streak votes from this length on. Eq. 8 has >= 6; "exceeds 6" in appendix B.2 would be 7 here.
        votes: Number of `voters` that a warning needs (K). Without probabilities one voter is missing, and a warning
            needs at most as many votes as there are remaining voters.
        theta_nov: A step stalls if its novelty is below this value.
        stall: Number of consecutive stalled steps that open the stall gate.
        warmup: First step that may trigger (t_min).
        cooldown: Number of steps after a trigger in which no other may follow.
        voters: Signals that vote on a warning. If empty, the warning always holds.
        gates: Signs of persistence; a trigger needs one of them. If empty, a trigger needs none.
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
        rule: "signals": votes and gates; "always": a trigger every `every` steps outside warm-up and cooldown; "never":
            no trigger.
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
    warmup: Whole = 64
    cooldown: Whole = 32
    voters: tuple[Voter, ...] = get_args(Voter)
    gates: tuple[Gate, ...] = get_args(Gate)
    stride: Natural = 16
    novelty_n: Natural = 4
    novelty_span: Natural = 64
    tail_repeats: CopyCount = 3
    tail_shortest: Annotated[int, Strict(), Field(ge=6)] = 64
    tail_longest: Natural = 64
    tail_hold: Natural = 4
    rule: Literal["signals", "always", "never"] = "signals"
    every: Natural = 200

    def __post_init__(self) -> None:
        checked_value(between(int, None, len(self.voters)), self.votes, "votes", then=", the number of voters")
        checked_value(between(int, self.novelty_n, None), self.window, "window", then=", the value of novelty_n")


Settings = MonitorSettings | PaperSettings
VARIANTS: dict[str, dict[str, Any]] = {
    "repeats": {},
    "full": {},
    **{voter: {"voters": (voter,), "votes": 1, "gates": ()} for voter in get_args(Voter)},
    **{gate: {"voters": (), "votes": 0, "gates": (gate,)} for gate in get_args(Gate)},
    "always": {"rule": "always"},
    "none": {"rule": "never"},
}
