"""`check` decides whether texts or token ids end up in a repetition loop; needs no model, no tokenizer and no torch."""

from __future__ import annotations

import hashlib
import statistics
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from sinkscope.files.progress import silent
from sinkscope.files.provenance import ModelInfo, provenance
from sinkscope.files.records import Natural, check_values
from sinkscope.loops.text.figure import draw_check
from sinkscope.loops.text.monitor import Monitor, MonitorSettings
from sinkscope.loops.text.near_copies import counting_rows, echoes
from sinkscope.loops.text.outputs import TokenRecord, as_records, spans
from sinkscope.loops.text.signals import Ids, Tail, compression_ratio, is_loop, type_token_ratio
from sinkscope.results.notation import count_of, word_form
from sinkscope.results.result import Result

Verdict = Literal["loops", "looped", "suspicious", "clean"]
CURVE_POINTS = 128  # at most, of a record's curve
SHORT_END = 8  # tokens behind the last copy that may be anything
GRAM, RECYCLED = 3, 0.5  # an end is of the loop if this share of its n-grams were in the loop
LOOP_FOUND = 3  # exit status
NAME_SHOWN = 32  # characters of a name in the table


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, such as counters, that a rule on exact copies cannot prove. "clean": none of these.
        role: Who repeats, in a session; None of a text.
        turns: Messages of a session in which the repetition is, counted from 1; None of a text.
        tokens: Number of tokens.
        wasted: Number of tokens behind the first copy that belong to the repetition; None if there is none.
        period: Period in tokens of the stretch that covers most, as the monitor found it; None if there is none.
        onset: Position of the first token of the repetition, counted from 0.
        repeats: Number of copies in that stretch.
        detected: Number of tokens at which the repetition was found; None if there is none.
        ttr: Type-token ratio of the whole record.
        cr: Compression ratio of the whole record.
        loop_rule: Whether the loop rule with length holds (Eq. 7); None if the maximum number of tokens was not given.
        steps: Steps at which `curve` was measured.
        curve: Type-token ratio of the window at these steps.
    """

    name: str
    verdict: Verdict
    role: str | None = None
    turns: str | None = None
    tokens: int = 0
    wasted: int | None = None
    period: int | None = None
    onset: int | None = None
    repeats: float | None = None
    detected: int | None = None
    ttr: float | None = None
    cr: float | None = None
    loop_rule: bool | None = None
    steps: tuple[int, ...] = ()
    curve: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoopCheck(Result):
    """The verdicts on records. Its values are plain numbers, so that checking texts loads no numpy.

    Attributes:
        loops: Number of records that loop.
        looped: Number of records that looped and went on.
        suspicious: Number of suspicious records.
        records: Results for each record.
    """

    kind: ClassVar[str] = "loops"
    drawing: ClassVar[Any] = draw_check
    table_without: ClassVar[tuple[str, ...]] = ("steps", "curve")
    columns: ClassVar[tuple[str, ...]] = ("name", "verdict", "role", "turns", "tokens", "wasted", "period", "onset")

    loops: int
    looped: int
    suspicious: int
    records: tuple[CheckedOutput, ...]

    @property
    def exit_code(self) -> int:
        """The status of the command: 3 if a record loops or looped, else 0."""
        return LOOP_FOUND if self.loops or self.looped else 0

    def conclusion(self) -> str:
        """How many records have each verdict, and their diversity."""
        parts: list[str] = []
        for count, one, several in (
            (self.loops, "loops", "loop"),
            (self.looped, "looped", "looped"),
            (self.suspicious, "is suspicious", "are suspicious"),
            (len(self.records) - self.loops - self.looped - self.suspicious, "is clean", "are clean"),
        ):
            if count:
                parts.append(f"{count} {word_form(count, one, several)}")
        if len(self.records) == 1:
            (part,) = parts
            return f"The {self._unit()} in {self.model.name} {part.removeprefix('1 ')}{self._ratios()}."
        said = parts[-1]
        if len(parts) > 1:
            said = f"{', '.join(parts[:-1])} and {parts[-1]}"
        return f"Of {count_of(len(self.records), self._unit())} in {self.model.name}, {said}{self._ratios()}."

    def details(self) -> list[str]:
        """Where the repetitions begin, and what they cost."""
        lines: list[str] = []
        period = self._median("period")
        if period is not None:
            onset = self._median("onset")
            lines.append(f"The loops have a median period of {period:g} tokens and begin at token {onset:g} (median).")
        for record in self.records:
            if record.turns is not None:
                lines.append(f"In {record.name}, the {record.role} repeats itself in messages {record.turns}.")
        wasted = sum(record.wasted or 0 for record in self.records)
        if wasted and self.model.family != "session":
            lines.append(f"{count_of(wasted, 'token')} behind the first copies are wasted.")
        return lines

    def shown_rows(self) -> list[dict[str, Any]]:
        """The rows that are printed, with names that leave room for the verdict."""
        rows = super().shown_rows()
        for row in rows:
            name = str(row["name"])
            if len(name) > NAME_SHOWN:
                row["name"] = f"{name[: NAME_SHOWN // 2 - 2]}...{name[1 - NAME_SHOWN // 2 :]}"
        return rows

    def _unit(self) -> str:
        return "session" if self.model.family == "session" else "output"

    def _ratios(self) -> str:
        """What sessions waste, or the median type-token ratios of repetitive and clean records."""
        wasted = sum(record.wasted or 0 for record in self.records)
        if wasted and self.model.family == "session":
            return f"; {wasted} of {sum(record.tokens for record in self.records)} tokens are wasted on repetition"
        repetitive, clean = self._median("ttr"), self._median("ttr", clean=True)
        if repetitive is None and clean is None:
            return ""
        if repetitive is None or clean is None:
            return f"; the median type-token ratio is {repetitive or clean:.2g}"
        return f"; the median type-token ratio is {repetitive:.2g}, and {clean:.2g} of the clean ones"

    def _median(self, field: str, clean: bool = False) -> float | None:
        values: list[float] = []
        for record in self.records:
            value = getattr(record, field)
            if (record.verdict == "clean") == clean and value is not None:
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

    A record loops or looped if the monitor triggers in it. By default this happens as soon as there are 3 copies of
    anything that cover at least 48 tokens and are exact or nearly so. With `MonitorSettings.paper()`, LoopGuard's
    monitor decides. Because there are no probabilities, its other two votes (type-token ratio and compression ratio)
    must agree, and one of its gates (stalled novelty or tail repetition) must hold. A text in which it does not trigger
    is suspicious if nearly all sentences resemble earlier ones, or if rows differ in a number only.

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
        results.append(checked_output(record, settings, max_new))
    # What stands in place of a model: its fingerprint is that of the ids.
    digest = hashlib.sha256()
    for record in records:
        digest.update(array("I", record.ids).tobytes() + b"|")
    model = ModelInfo(name=name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=digest.hexdigest()[:16])
    return loop_check(results, model, {**vars(settings), "max_new": max_new}, started)


def loop_check(
    results: Sequence[CheckedOutput], model: ModelInfo, settings: dict[str, Any], started: float
) -> LoopCheck:
    """The result of records that were checked.

    Args:
        results: The records.
        model: What stands in place of a model: the input and its fingerprint.
        settings: Settings of the monitor.
        started: `time.perf_counter()` at the start.
    """
    verdicts = [result.verdict for result in results]
    return LoopCheck(
        loops=verdicts.count("loops"),
        looped=verdicts.count("looped"),
        suspicious=verdicts.count("suspicious"),
        records=tuple(results),
        model=model,
        settings=settings,
        provenance=provenance(started=started, device="cpu", dtype="int", attention="none", bos=None, seed=0),
    )


def checked_output(record: TokenRecord, settings: MonitorSettings, max_new: int | None = None) -> CheckedOutput:
    """The verdict on one record, and the numbers beside it."""
    ids = record.ids
    monitor = Monitor(settings)
    every = max(1, -(-len(ids) // CURVE_POINTS))
    longest: Tail | None = None
    covered = 0
    last_copy = 0  # number of tokens up to the last one that repeats
    detected: int | None = None
    curve: dict[int, float] = {}
    for token in ids:
        step = monitor.update(token)
        if step.trigger and detected is None:
            detected = step.step
        if step.tail is not None or step.trigger:
            last_copy = step.step
        if step.tail is not None and step.step - step.tail.start > covered:
            longest = step.tail
            covered = step.step - step.tail.start
        if step.step % every == 0 or step.step == len(ids):
            curve[step.step] = round(step.ttr, 4)
    facts: dict[str, Any] = {"tokens": len(ids), "steps": tuple(curve), "curve": tuple(curve.values())}
    if ids:
        facts |= {"ttr": type_token_ratio(ids), "cr": compression_ratio(ids)}
    if max_new is not None:
        facts["loop_rule"] = is_loop(ids, max_new, theta_ttr=settings.theta_ttr, theta_cr=settings.theta_cr)
    if detected is None:
        return _suspicion(CheckedOutput(record.name, "clean", **facts), record, settings)
    onset = detected
    if longest is not None:
        onset = longest.start
        wasted = max(0, last_copy - onset - longest.period)
        facts |= {"period": longest.period, "repeats": longest.repeats, "wasted": wasted}
    verdict: Verdict = "looped"
    if _goes_on(ids, onset, last_copy, settings):
        verdict = "loops"
    return CheckedOutput(record.name, verdict, onset=onset, detected=detected, **facts)


def _goes_on(ids: Sequence[int], onset: int, last_copy: int, settings: MonitorSettings) -> bool:
    """Whether what follows the last copy still belongs to the loop, so that it runs to the end."""
    rest = len(ids) - last_copy
    if rest <= SHORT_END or (settings.rule != "repeats" and rest <= settings.cooldown):
        return True
    seen: set[tuple[int, ...]] = set()
    for place in range(onset, last_copy - GRAM + 1):
        seen.add(tuple(ids[place : place + GRAM]))
    recycled = 0
    for place in range(last_copy, len(ids)):
        recycled += tuple(ids[place - GRAM + 1 : place + 1]) in seen
    return recycled >= RECYCLED * rest


def _suspicion(result: CheckedOutput, record: TokenRecord, settings: MonitorSettings) -> CheckedOutput:
    """The result, suspicious if its text has near copies."""
    if record.text is None or settings.rule == "never":
        return result
    words = spans(record.text)
    place = counting_rows([word for word, _ in words])
    characters = echoes(record.text)
    if characters is not None:
        first, found = (bisect_left(words, at, key=lambda word: word[1]) for at in characters)
        if place is None or found < place[1]:
            place = (first, found + 1)
    if place is None:
        return result
    return replace(result, verdict="suspicious", onset=place[0], detected=min(place[1], len(words)))
