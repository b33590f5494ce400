"""`check` decides whether texts or token ids end up in a repetition loop; needs no model, no tokenizer and no torch."""

from __future__ import annotations

import hashlib
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from sinkscope.files.console import silent
from sinkscope.files.notation import agreeing, counted
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.files.records import Natural, check_values
from sinkscope.files.result import Result
from sinkscope.loops.monitor import Monitor, MonitorSettings
from sinkscope.loops.outputs import TokenRecord, as_records
from sinkscope.loops.repetition import NearRepetition
from sinkscope.loops.signals import (
    Ids,
    Tail,
    compression_ratio,
    ends_in_loop,
    is_loop,
    type_token_ratio,
)

CURVE_POINTS = 128  # at most, of a record's curve
SHORTEST_STRETCH, LONGEST_PERIOD, COPIES = 16, 2048, 3  # of an exact repetition that is reported


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        tokens: Number of tokens.
        ttr: Type-token ratio of the whole record.
        cr: Compression ratio of the whole record.
        period: Period of the longest repeated stretch, either exact with at least 3 copies and 16 tokens or found by
            the monitor. None if no stretch has a period of up to 2,048 tokens.
        onset: Position of the first token of that stretch.
        repeats: Number of copies in that stretch.
        detected: First step at which the monitor triggers; None if it never does.
        loop: Whether the monitor triggers.
        ends_in_loop: Whether the loop rule without length holds for the last window.
        loop_rule: Whether the loop rule with length holds (Eq. 7); None if the maximum number of tokens was not given.
        steps: Steps at which `curve` was measured.
        curve: Type-token ratio of the window at these steps.
    """

    name: str
    tokens: int
    ttr: float | None
    cr: float | None
    period: int | None
    onset: int | None
    repeats: float | None
    detected: int | None
    loop: bool
    ends_in_loop: bool
    loop_rule: bool | None
    steps: tuple[int, ...]
    curve: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class LoopCheck(Result):
    """Which of the records loop. Its values are plain numbers, so that checking texts loads no numpy.

    Attributes:
        loops: Number of records that loop.
        records: Results for each record.
    """

    kind: ClassVar[str] = "loops"
    drawing: ClassVar[Any] = "sinkscope.app.loops:draw_check"
    table_without: ClassVar[tuple[str, ...]] = ("steps", "curve")

    loops: int
    records: tuple[CheckedOutput, ...]

    def conclusion(self) -> str:
        """How many records loop, and the diversity of looping and other records."""
        count = len(self.records)
        loop = agreeing(count, "loops", "loop")
        finding = f"{self.loops or 'None'} of {counted(count, 'output')} in {self.model.name} {loop}"
        ratio = self._median("ttr")
        other_ratio = self._median("ttr", loop=False)
        if ratio is not None:
            finding += f"; their median type-token ratio is {ratio:.2g}"
            if other_ratio is not None:
                finding += f", that of the others {other_ratio:.2g}"
        return f"{finding}."

    def details(self) -> list[str]:
        """Where the loops begin."""
        period = self._median("period")
        if period is None:
            return []
        onset = self._median("onset")
        return [f"The loops have a median period of {period:g} tokens and begin at token {onset:g} (median)."]

    def _median(self, field: str, loop: bool = True) -> float | None:
        values: list[float] = []
        for record in self.records:
            value = getattr(record, field)
            if record.loop == loop and value is not None:
                values.append(value)
        if not values:
            return None
        return statistics.median(values)


def check(
    outputs: str | Sequence[Any] | Ids,
    *,
    settings: MonitorSettings | None = None,
    max_new: int | None = None,
    name: str = "input",
    progress: Callable[[str, int, int], None] | None = None,
) -> LoopCheck:
    """Check outputs for repetition loops; no model, no tokenizer and no torch are needed.

    A record loops if the monitor triggers in it. By default this happens as soon as there are 3 copies of anything that
    cover at least 48 tokens and are exact or nearly so. With `MonitorSettings.paper()`, LoopGuard's monitor decides.
    Because there are no probabilities, its other two votes (type-token ratio and compression ratio) must agree, and one
    of its gates (stalled novelty or tail repetition) must hold.

    Args:
        outputs: A text, token ids, or several of either; or records that `loops.outputs.parse` makes from a file.
        settings: Settings of the monitor.
        max_new: Maximum number of new tokens, for the loop rule with length (LoopGuard, Eq. 7).
        name: Name of the input in the result.
        progress: Called with a stage, the amount done and the total.

    Returns:
        A `LoopCheck`.

    Raises:
        SinkscopeError: The input is empty or neither text nor ids, or the settings need probabilities.
    """
    started = time.perf_counter()
    settings = settings or MonitorSettings()
    progress = progress or silent
    check_values(Natural | None, max_new=max_new)
    records = as_records(outputs)
    results: list[CheckedOutput] = []
    for place, record in enumerate(records):
        progress("checking", place, len(records))
        results.append(_checked(record, settings, max_new))
    # What stands in place of a model: its fingerprint is that of the ids.
    digest = hashlib.sha256()
    for record in records:
        digest.update(array("I", record.ids).tobytes() + b"|")
    return LoopCheck(
        loops=sum(result.loop for result in results),
        records=tuple(results),
        model=ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=digest.hexdigest()[:16]),
        settings={**vars(settings), "max_new": max_new},
        provenance=provenance(started=started, device="cpu", dtype="int", attention="none", bos=None, seed=0),
    )


def _checked(record: TokenRecord, settings: MonitorSettings, max_new: int | None) -> CheckedOutput:
    ids = record.ids
    monitor = Monitor(settings)
    exact = NearRepetition(LONGEST_PERIOD, COPIES, SHORTEST_STRETCH, 0.0)
    every = max(1, -(-len(ids) // CURVE_POINTS))
    longest: Tail | tuple[None, None, None] = (None, None, None)
    covered = 0
    detected: int | None = None
    curve: dict[int, float] = {}
    for position, token in enumerate(ids):
        step = monitor.update(token)
        if step.trigger and detected is None:
            detected = step.step
        for tail in (exact.add(token, position), step.tail):
            if tail is not None and step.step - tail.start > covered:
                longest = tail
                covered = step.step - tail.start
        if step.step % every == 0 or step.step == len(ids):
            curve[step.step] = round(step.ttr, 4)
    thresholds = {"theta_ttr": settings.theta_ttr, "theta_cr": settings.theta_cr}
    period, onset, repeats = longest
    ttr, cr = (type_token_ratio(ids), compression_ratio(ids)) if ids else (None, None)
    return CheckedOutput(
        name=record.name,
        tokens=len(ids),
        ttr=ttr,
        cr=cr,
        period=period,
        onset=onset,
        repeats=repeats,
        detected=detected,
        loop=detected is not None,
        ends_in_loop=ends_in_loop(ids, settings.window, **thresholds),
        loop_rule=None if max_new is None else is_loop(ids, max_new, **thresholds),
        steps=tuple(curve),
        curve=tuple(curve.values()),
    )
