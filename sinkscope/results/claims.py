"""Claims are records: what an edit leaves of an outcome, beside its contrasts. All wording is made from them here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sinkscope.results.notation import word_form
from sinkscope.results.parts import POSITION, Parts, Tokens, in_words, kind_of, removed

NEEDED = 0.5
"""Share of an effect that an edit must take away (or bring) more than every contrast, to be needed (or sufficient)."""
NOTHING = 0.2
"""An edit that leaves as much as one of its contrasts, within this share, shows nothing."""
NAMED = 4  # parts that a sentence names
Verdict = Literal["needed", "sufficient", "not shown", "undecided"]
ContrastKind = Literal["intact", "random", "one copy", "other tokens", "other"]


@dataclass(frozen=True)
class Contrast:
    """The outcome under another edit of the same cases.

    Attributes:
        kind: "intact": no edit; "random": as many random parts of the same kind; "one copy": one copy behind other
            tokens at the same position; "other tokens": other tokens there; "other": what `name` says.
        value: The outcome: of several draws the one nearest to the claim's.
        draws: Number of edits that were drawn.
        name: What stands in a sentence. Empty: the kind says it.
    """

    kind: ContrastKind
    value: float
    draws: int = 1
    name: str = ""

    def in_words(self, subject: Parts) -> str:
        """What the contrast is, in a sentence about a subject."""
        if self.name:
            return self.name
        if self.kind == "random":
            return f"random {kind_of(subject)}"
        return self.kind


@dataclass(frozen=True)
class Search:
    """What was searched before a claim was made, or before it was said that there is none.

    Attributes:
        what: What was tried, in a few words.
        tried: How many.
        most: The largest effect of all that were tried, before any threshold. None: it was not a search for a largest.
        best: Where the largest was.
    """

    what: str
    tried: int
    most: float | None = None
    best: str = ""

    def __str__(self) -> str:
        most = ""
        if self.most is not None and self.most > 0:
            most = f"; the most: {self.best + ' ' if self.best else ''}{self.most:.0%}"
        return f"{self.tried:,} {self.what} tried{most}"


@dataclass(frozen=True)
class Outcome:
    """What is measured of a place.

    Attributes:
        kind: "spike": the projection of the residual stream on the direction of the spike; "attention": what heads give
            to the place; "norm": the norm; or the label of another measurement.
        layers: The layers after which it is read.
        heads: The heads whose attention it is, as they are named.
        unit: What 1 is: "intact": the value without an edit; "cases": all cases.
    """

    kind: str
    layers: tuple[int, ...] = ()
    heads: tuple[str, ...] = ()
    unit: Literal["intact", "cases"] = "intact"

    def __str__(self) -> str:
        return {"attention": "that attention", "norm": "its norm", "spike": "the spike"}.get(self.kind, self.kind)


@dataclass(frozen=True)
class Claim:
    """What is left of an outcome at a place under an edit, beside at least two contrasts.

    All values are shares of one unit, so that 1 is all of the effect and 0 nothing.

    Attributes:
        role: What the subject is thought to do: "makes", "serves", "adds", "depends", "marks", "carries",
            "repeats".
        subject: What was edited.
        outcome: What was read.
        place: Words for the place, or what else identifies it.
        value: What is left, mean over cases.
        contrasts: The same under other edits.
        draws: Number of independent draws: texts times swaps, not queries.
        search: What was searched.
        margin: Two standard errors of the value over draws. None: too few draws to say, or they are all the same.
    """

    role: str
    subject: Parts
    outcome: Outcome
    place: str
    value: float
    contrasts: tuple[Contrast, ...]
    draws: int
    search: Search
    margin: float | None = None

    def __post_init__(self) -> None:
        if not self.subject or self.draws < 1 or len(self.contrasts) < 2:
            raise ValueError("a claim needs a subject, at least one draw, and two contrasts")

    @property
    def verdict(self) -> Verdict:
        """What the values show, from the value with its margin against every contrast."""
        slack = self.margin or 0.0
        gaps = [contrast.value - self.value for contrast in self.contrasts]
        if min(gaps) - slack >= NEEDED:
            return "needed"
        there = any(contrast.kind == "intact" and contrast.value >= NEEDED for contrast in self.contrasts)
        if -max(gaps) - slack >= NEEDED and not there:  # more than an intact model has already is no sign of that
            return "sufficient"
        if min(abs(gap) for gap in gaps) <= NOTHING:
            return "not shown"
        return "undecided"

    @property
    def control(self) -> Contrast:
        """The contrast that comes nearest to the value, beside the intact model."""
        others = [contrast for contrast in self.contrasts if contrast.kind != "intact"]
        return min(others or self.contrasts, key=lambda contrast: abs(contrast.value - self.value))

    def row(self) -> dict[str, Any]:
        """The claim as a row of a table."""
        control = self.control
        return {
            "role": self.role,
            "subject": in_words(self.subject, NAMED),
            "place": self.place,
            "outcome": self.outcome.kind,
            "left": self.value,
            "control": control.value,
            "contrast": control.in_words(self.subject),
            "draws": self.draws,
            "verdict": self.verdict,
        }

    def said(self, most: int = NAMED, called: str = "") -> str:
        """What is shown of the subject, without numbers.

        Args:
            most: Parts that are named.
            called: What the subject is, if its names alone do not say so.
        """
        names, do = in_words(self.subject, most), word_form(len(self.subject), "is", "are")
        if called:
            names, do = f"{called} ({names})", "is"
        match self.verdict:
            case "needed":
                return f"{names} {do} needed"
            case "sufficient":
                return f"{names} {do} enough"
            case "not shown":
                return f"no effect of {names} is shown"
            case _:
                return f"whether {names} {do} needed is undecided"

    def phrase(self, most: int = NAMED, called: str = "") -> str:
        """The same with what is left and the control, as a clause."""
        if isinstance(self.subject[0], Tokens):
            left, control = self.beside_control()
            return f"{in_words(self.subject, most)} give {left} ({control})"
        if self.verdict == "needed" and self.subject[0] != POSITION:
            lost, control = self.beside_control(lost=True)
            return f"{self.said(most, called)}: {removed(self.subject)} {lost} is lost ({control})"
        left, control = self.beside_control()
        if self.subject[0] != POSITION:
            left = f"{removed(self.subject)} {left} stays"
        return f"{self.said(most, called)}: {left} ({control})"

    def finding(self, does: tuple[str, str], what: str, lost_of: str, most: int = NAMED) -> str:
        """What needed parts do and what is lost without them, as a clause that begins with the parts.

        Args:
            does: The verb for one part and for several.
            what: Its object.
            lost_of: What is lost without them.
            most: Parts that are named.
        """
        lost, control = self.beside_control(lost=True)
        do = word_form(len(self.subject), *does)
        without = f"{removed(self.subject)} {lost} of {lost_of} is lost ({control})"
        return f"{in_words(self.subject, most)} {do} {what}: {without}"

    def beside_control(self, *, lost: bool = False) -> tuple[str, str]:
        """What is left, or lost, in per cent; and the control with its name and the same of it."""
        value, chance = self.value, self.control.value
        if lost:
            value, chance = 1 - value, 1 - chance
        first, second = percent_pair(value, chance)
        return first, f"{self.control.in_words(self.subject)}: {second}"

    def sentence(self) -> str:
        """The clause, with what was read and where before it."""
        outcome = str(self.outcome)
        return f"{outcome[:1].upper()}{outcome[1:]} ({self.place}): {self.phrase()}."


Claims = tuple[Claim, ...]


def percent_pair(share: float, control: float) -> tuple[str, str]:
    """A share and its control in per cent, with as many digits as it takes to tell them apart (at most two)."""
    texts = ("", "")
    for digits in range(3):
        texts = f"{share:.{digits}%}".replace("-0%", "0%"), f"{control:.{digits}%}".replace("-0%", "0%")
        if abs(share - control) < 1e-3 or texts[0] != texts[1]:
            break
    return texts
