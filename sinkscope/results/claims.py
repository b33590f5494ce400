"""Claims are records: what an edit leaves of an outcome, beside its contrasts. All wording is made from them here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sinkscope.results.notation import percent, short_sentence
from sinkscope.results.parts import Parts, in_words, kind_of, removed

NEEDED = 0.5
"""Share of an effect that an edit must take away (or bring) more than every contrast, to be needed (or sufficient)."""
NO_DIFFERENCE = 0.2
"""An edit that leaves as much as one of its contrasts, within this share, shows nothing."""
NAMED_PARTS, BRIEF_PARTS = 4, 2  # parts that a sentence names
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
        """Return what the contrast is, in a sentence about a subject."""
        if self.name:
            return self.name
        if self.kind == "random":
            return f"random {kind_of(subject)}"
        return self.kind


@dataclass(frozen=True)
class SearchSpace:
    """How many candidates, and of what kind, were tried before a claim was made.

    Attributes:
        what: What was tried, in a few words.
        tried: How many.
    """

    what: str
    tried: int

    def __str__(self) -> str:
        return f"{self.tried:,} {self.what} tried"


@dataclass(frozen=True)
class Outcome:
    """What is measured of a place.

    Attributes:
        kind: "spike": the projection of the residual stream on the direction of the spike; "attention": what heads give
            to the place; "norm": the norm; or the label of another measurement.
        layers: The layers after which it is read.
        unit: What 1 is: "intact": the value without an edit; "cases": all cases.
        effect: What a share is a share of, in a sentence; {} is the place. Empty: the kind, at the place.
        gives: Verb phrase where the subject is added; {} is the value.
    """

    kind: str
    layers: tuple[int, ...] = ()
    unit: Literal["intact", "cases"] = "intact"
    effect: str = ""
    gives: str = ""


@dataclass(frozen=True)
class Claim:
    """What is left of an outcome at a place under an edit, beside at least two contrasts.

    All values are shares of one unit, so that 1 is all of the effect and 0 nothing.

    Attributes:
        role: What the subject is thought to do: "makes", "marks", "carries" or "repeats".
        subject: What was edited.
        outcome: What was read.
        place: Words for the place, or what else identifies it.
        value: What is left, mean over cases.
        contrasts: The same under other edits.
        draws: Number of independent draws: texts times swaps, not queries.
        search: What was searched.
        margin: Two standard errors of the value over draws; 0 if the claim is about the texts that were read and no
            others, as about copies of one token. None: too few draws to say.
        edit: How the subject was edited, such as "patched". Empty: it was zeroed or replaced, as its kind says.
    """

    role: str
    subject: Parts
    outcome: Outcome
    place: str
    value: float
    contrasts: tuple[Contrast, ...]
    draws: int
    search: SearchSpace
    margin: float | None = None
    edit: str = ""

    def __post_init__(self) -> None:
        if not self.subject or self.draws < 1 or len(self.contrasts) < 2:
            raise ValueError("a claim needs a subject, at least one draw, and two contrasts")

    @property
    def verdict(self) -> Verdict:
        """What the values show, from the value with its margin against every contrast; nothing without a margin."""
        slack = self.margin
        if slack is None:
            return "undecided"
        gaps = [contrast.value - self.value for contrast in self.contrasts]
        if min(gaps) - slack >= NEEDED:
            return "needed"
        there = any(contrast.kind == "intact" and contrast.value >= NEEDED for contrast in self.contrasts)
        if -max(gaps) - slack >= NEEDED and not there:  # more than an intact model has already is no sign of that
            return "sufficient"
        if min(abs(gap) for gap in gaps) <= NO_DIFFERENCE:
            return "not shown"
        return "undecided"

    @property
    def control(self) -> Contrast:
        """The contrast that comes nearest to the value, beside the intact model."""
        others = [contrast for contrast in self.contrasts if contrast.kind != "intact"]
        return min(others or self.contrasts, key=lambda contrast: abs(contrast.value - self.value))

    def row(self) -> dict[str, Any]:
        """Return the claim as a row of a table."""
        control = self.control
        return {
            "role": self.role,
            "subject": in_words(self.subject, NAMED_PARTS),
            "place": self.place,
            "outcome": self.outcome.kind,
            "remaining": self.value,
            "control": control.value,
            "contrast": control.in_words(self.subject),
            "draws": self.draws,
            "verdict": self.verdict,
        }

    @property
    def brings(self) -> bool:
        """Whether the claim is about adding the subject, and not about removing it."""
        return all(contrast.kind != "intact" for contrast in self.contrasts)

    @property
    def takes(self) -> bool:
        """Whether an edit takes away a share of what the intact model has."""
        return self.outcome.unit == "intact" and not self.brings

    def sentence(self, *, brief: bool = False) -> str:
        """Return what was measured of the subject, beside its control; a negative says what was searched.

        Args:
            brief: Name fewer parts, and leave out the search.
        """
        value, chance = self.value, self.control.value
        lost = self.takes and self.verdict == "needed"
        if lost:
            value, chance = 1 - value, 1 - chance
        share, control = percent_pair(value, chance)
        said = in_words(self.subject, BRIEF_PARTS if brief else NAMED_PARTS)
        if self.brings:
            said += " " + self.outcome.gives.replace("{}", share)
        else:
            effect = self.outcome.effect.replace("{}", self.place) or f"the {self.outcome.kind} at {self.place}"
            measured = f"{share} of {effect} {'is gone' if lost else 'stays'}"
            if any(
                one.kind == "intact" and one.value < NEEDED for one in self.contrasts
            ):  # an edit may bring the effect
                measured = f"{effect} is {share}"
            said = f"{removed(self.subject, self.edit, said)}, {measured}"
        control = f"{self.control.in_words(self.subject)}: {control}"
        if self.verdict == "not shown" and not brief:
            control += f"; {self.search}"
        return f"{said[:1].upper()}{said[1:]} ({control})."

    def shortest(self) -> str:
        """Return the whole sentence, or the brief one if that has more than 30 words."""
        return short_sentence(self.sentence(brief=brief) for brief in (False, True))


Claims = tuple[Claim, ...]


def percent_pair(share: float, control: float) -> tuple[str, str]:
    """Return a share and its control in per cent, with as many digits as it takes to tell them apart (at most two)."""
    texts = ("", "")
    for digits in range(3):
        texts = (percent(share, digits), percent(control, digits))
        if texts[0] != texts[1] or abs(share - control) < 1e-3:
            break
    return texts
