"""`sinkscope loops compare`: detectors of loops side by side on texts whose truth is known."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any, ClassVar, cast

from sinkscope.display.result import Result
from sinkscope.display.tables import Grid, percent, strings
from sinkscope.errors import SinkscopeError
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.loops.figure import draw_comparison
from sinkscope.loops.rivals import DETECTORS, Detector

OURS = "sinkscope, loops or suspicious"


@dataclass(frozen=True)
class KnownText:
    """A text and the truth about it.

    Attributes:
        text: The text.
        kind: Its class.
        start: Character at which the first copy of its loop begins; None if it has none.
    """

    text: str
    kind: str
    start: int | None = None


@dataclass(frozen=True)
class DetectorScore:
    """What a detector finds.

    Attributes:
        detector: Its name.
        recall: Share of the loops in which it raises an alarm behind the beginning of the loop.
        lowest: Share of the loops that it finds in the class in which it finds fewest.
        false_alarms: Share of the texts without a loop in which it raises an alarm.
        delay: Mean number of characters from the beginning of a loop to the alarm.
        our_delay: The same of sinkscope's default, on the loops that both find.
        their_delay: The same of this detector, on the loops that both find.
        we_first: Share of these loops in which sinkscope's default is not later.
        by_class: Share of the texts of each class in which it raises an alarm.
    """

    detector: str
    recall: float | None
    lowest: float | None
    false_alarms: float | None
    delay: float | None
    our_delay: float | None
    their_delay: float | None
    we_first: float | None
    by_class: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class LoopComparison(Result):
    """Detectors of loops on one set of texts.

    Attributes:
        loops: Number of texts with a loop.
        honest: Number of texts without one.
        looping: Classes of the texts with a loop.
        detectors: The score of each detector, those of sinkscope first.
    """

    kind: ClassVar[str] = "loops-compare"
    drawing: ClassVar[Any] = draw_comparison
    page: ClassVar[str] = "measure/loops"
    percent: ClassVar[tuple[str, ...]] = ("recall", "lowest", "false_alarms", "we_first")
    table_of: ClassVar[str] = "detectors"
    table_without: ClassVar[tuple[str, ...]] = ("by_class",)
    columns: ClassVar[tuple[str, ...]] = ("detector", "recall", "lowest", "false_alarms", "our_delay", "their_delay")

    loops: int
    honest: int
    looping: tuple[str, ...]
    detectors: tuple[DetectorScore, ...]

    def conclusion(self) -> str:
        """What the default finds, beside the best of the others."""
        _, ours, *others = self.detectors
        best = max(others, key=lambda score: (score.recall or 0.0) - (score.false_alarms or 0.0))
        found = f"{percent(ours.recall)} of {self.loops} loops with {percent(ours.false_alarms)} false alarms"
        other = f"{best.detector}, finds {percent(best.recall)} with {percent(best.false_alarms)}"
        return f"sinkscope finds {found} on {self.honest} honest texts; the best other rule, {other}."

    def details(self) -> list[str]:
        """The false alarms of the verdict "loops" alone."""
        proved = self.detectors[0]
        return [
            f"The verdict loops alone finds {percent(proved.recall)} with {percent(proved.false_alarms)} false alarms."
        ]

    def grids(self) -> list[Grid]:
        """The detectors, and what each finds in each class."""
        rows: list[dict[str, Any]] = []
        for kind in self.detectors[0].by_class:
            row: dict[str, Any] = {"class": kind}
            for place, score in enumerate(self.detectors, 1):
                row[str(place)] = percent(score.by_class[kind])
            rows.append(row)
        names = [f"{place} {score.detector}" for place, score in enumerate(self.detectors, 1)]
        classes = Grid(strings(rows), title="Texts of each class with an alarm", note=f"{'; '.join(names)}.")
        return [*super().grids(), classes]


def compare(
    texts: Sequence[KnownText], detectors: Mapping[str, Detector] | None = None, name: str = "texts"
) -> LoopComparison:
    """Run detectors over texts whose truth is known.

    Args:
        texts: The texts.
        detectors: Further detectors, by name.
        name: Name of the set in the result.

    Raises:
        SinkscopeError: There is no text, or a detector returns something else than a number of characters or None.
    """
    started = time.perf_counter()
    if not texts:
        raise SinkscopeError("there is no text to compare detectors on: give some, with and without loops")
    alarms: dict[str, list[int | None]] = {}
    for detector, function in {**DETECTORS, **(detectors or {})}.items():
        alarms[detector] = []
        for text in texts:
            alarm = function(text.text)
            if alarm is not None and type(alarm) is not int:
                raise SinkscopeError(f"{detector} returns {alarm!r}: expected a number of characters, or None")
            alarms[detector].append(alarm)
    return LoopComparison(
        loops=sum(text.start is not None for text in texts),
        honest=sum(text.start is None for text in texts),
        looping=tuple(dict.fromkeys(text.kind for text in texts if text.start is not None)),
        detectors=tuple(_score(detector, texts, alarms[detector], alarms[OURS]) for detector in alarms),
        model=ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=""),
        provenance=provenance(started=started, device="cpu", dtype="int", attention="none", bos=None, seed=0),
    )


def named_detector(place: str) -> Detector:
    """The function at "module:function".

    Raises:
        SinkscopeError: There is none.
    """
    try:
        function = resolve_name(place)
    except (ImportError, AttributeError, ValueError) as error:
        raise SinkscopeError(f"--detector {place}: {error}; give module:function") from None
    if not callable(function):
        raise SinkscopeError(f"--detector {place} is no function: give module:function")
    return cast("Detector", function)


def _score(
    detector: str, texts: Sequence[KnownText], alarms: Sequence[int | None], ours: Sequence[int | None]
) -> DetectorScore:
    """What the alarms of a detector are worth."""
    found: dict[str, list[bool]] = {}
    wrong: dict[str, list[bool]] = {}
    delays: list[int] = []
    both: list[tuple[int, int]] = []
    for text, alarm, own in zip(texts, alarms, ours, strict=True):
        if text.start is None:
            wrong.setdefault(text.kind, []).append(alarm is not None)
            continue
        hit = alarm is not None and alarm > text.start
        found.setdefault(text.kind, []).append(hit)
        if hit and alarm is not None:
            delays.append(alarm - text.start)
            if own is not None and own > text.start:
                both.append((alarm - text.start, own - text.start))
    shares = {kind: statistics.fmean(hits) for kind, hits in found.items()}
    return DetectorScore(
        detector=detector,
        recall=_mean(found),
        lowest=min(shares.values(), default=None),
        false_alarms=_mean(wrong),
        delay=_average(delays),
        our_delay=_average([own for _, own in both]),
        their_delay=_average([theirs for theirs, _ in both]),
        we_first=_average([own <= theirs for theirs, own in both]),
        by_class=shares | {kind: statistics.fmean(hits) for kind, hits in wrong.items()},
    )


def _mean(flags: Mapping[str, Sequence[bool]]) -> float | None:
    return _average([flag for several in flags.values() for flag in several])


def _average(values: Sequence[float]) -> float | None:
    if not values:
        return None
    return round(statistics.fmean(values), 4)
