"""What a check of a cache found, as the row of a table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sinkscope.results.mean import Mean
from sinkscope.results.table import Cell, Column, Row, column, detail, optional


class Check(StrEnum):
    """The promises of a cache, by the names of the functions that try them."""

    NO_ERROR = "it_raises_no_error_and_leaves_nothing_behind"
    CHANGES_NOTHING = "with_room_for_everything_it_changes_nothing"
    ROWS = "rows_are_what_they_are_alone"
    POSITIONS = "what_is_kept_stands_at_its_place"
    BUDGET = "the_budget_holds_in_tokens_and_bytes"
    SURVIVORS = "the_first_and_the_latest_tokens_survive"

    @property
    def words(self) -> str:
        """The promise in words."""
        return self.value.replace("_", " ")

    @property
    def short(self) -> str:
        """The promise in the words of a table."""
        match self:
            case Check.NO_ERROR:
                return "no error, nothing left"
            case Check.CHANGES_NOTHING:
                return "room for all: no change"
            case Check.ROWS:
                return "row in a batch = alone"
            case Check.POSITIONS:
                return "positions are kept"
            case Check.BUDGET:
                return "budget holds"
            case Check.SURVIVORS:
                return "first, latest tokens kept"


class CheckVerdict(StrEnum):
    """What is said of a promise."""

    PASSES = "passes"
    FAILS = "fails"
    DOES_NOT_APPLY = "does not apply"
    NOT_JUDGED = "not judged"  # an error that another check found keeps it from being judged


class Unit(StrEnum):
    """What a check measures."""

    ERRORS = "errors"
    LOGITS = "sd"  # the largest error of logits, in standard deviations of the right ones
    BYTES = "bytes"
    NATS = "nats"


@dataclass(frozen=True)
class Worst:
    """The measurement of a check that came nearest to its limit."""

    value: float
    limit: float
    unit: Unit

    @property
    def nearness(self) -> float:
        """How much of the limit it takes."""
        return self.value / self.limit if self.limit else self.value


@dataclass(frozen=True, kw_only=True)
class CheckedBehaviour(
    Row,
    table="checks",
    title="check",
    note="Worst: what came nearest to its limit, over all runs (prompts and orders of calls). Nothing left: no hook or "
    "state stays on the model. Positions: the logits are those of a pass in which a mask hides what was evicted. sd: "
    "largest error of logits, in standard deviations of the right ones; the limit is larger for a run in half "
    "precision. "
    "Budget: bytes in memory, at most twice those of the budget and the new tokens. nats: how much lower the "
    "loss would "
    "be if the first token were visible again. Evicted: the most tokens evicted in a run; 0: says nothing of eviction.",
):
    """What one promise is found to be, and what was tried.

    Attributes:
        key: The promise.
        verdict: Whether the cache passes, fails, the promise does not apply, or an error said earlier keeps it from
            being judged.
        expected: What is right.
        seen: What was seen of a failure, or why the promise does not apply or is not judged.
        reproduction: Lines of Python that show the failure on the smallest of the runs tried.
        longest: Tokens of the longest prompt.
        refused: What the cache refuses, in words.
    """

    key: Check
    expected: str = ""
    seen: str = ""
    reproduction: str = ""
    longest: int = 0
    refused: tuple[str, ...] = ()

    verdict: CheckVerdict = column("verdict", "word", "Passes, fails, does not apply, or not judged.")
    worst: Mean | None = optional("worst", "number", "The measurement that came nearest to its limit.")
    limit: Mean | None = optional("limit", "number", "The largest measurement with which the check passes.")
    unit: Unit | None = optional("in", "word", "What was measured, and in which unit.")
    runs: Mean | None = optional("runs", "count", "Uses of the cache that were tried: prompts and orders of calls.")
    evicted: Mean | None = optional("evicted", "count", "The most tokens that were evicted in one run.")
    reason: str | None = detail("reason", "word", "Why it fails, does not apply, or is not judged.")

    @property
    def label(self) -> str:
        """What it is called."""
        return self.key.short

    def cell(self, column: Column) -> Cell:
        """Return what a column shows: errors of logits have one digit, of any size."""
        value = getattr(self, column.key)
        if column.key in ("worst", "limit") and isinstance(value, Mean) and self.unit in (Unit.LOGITS, Unit.NATS):
            return Cell(f"{value.value:.1g}")
        if column.key in ("worst", "limit") and isinstance(value, Mean):
            return Cell(f"{value.value:,.0f}")
        return super().cell(column)
