"""What a scan says of a measurement in one line: what was found, what it has to beat, and whether it did."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Whether a number is beyond its control, by more than its margin."""

    SHOWN = "shown"
    NOT_SHOWN = "NOT SHOWN"
    NO_CONTROL = "no control"


@dataclass(frozen=True)
class Headline:
    """One finding of a measurement.

    Attributes:
        subject: What was measured.
        found: Its number, with its margin and unit.
        control: The number of the control that came nearest, and what the control is.
        verdict: Whether the finding is beyond its control.
    """

    subject: str
    found: str
    control: str
    verdict: Verdict


def verdict_of(value: float, control: float | None, margin: float | None = None) -> Verdict:
    """Return whether a number is larger than that of its control, by more than its margin."""
    if control is None:
        return Verdict.NO_CONTROL
    return Verdict.SHOWN if value - control > (margin or 0.0) else Verdict.NOT_SHOWN
