"""`check` decides whether texts or token ids end up in a repetition loop; needs no model, no tokenizer and no torch."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from sinkscope.errors import SinkscopeError
from sinkscope.files.provenance import ModelInfo, documented_at, provenance
from sinkscope.loops.text.forms import StreamForm, pieces_of_output
from sinkscope.loops.text.monitor import MonitorSettings, Step
from sinkscope.loops.text.near_copies import Echoes
from sinkscope.loops.text.signals import Ids, Tail, compression_ratio, id_list, type_token_ratio
from sinkscope.loops.text.streams import Alarm, Stream, Watch
from sinkscope.results.notation import count_of, word_form, word_list
from sinkscope.results.result import Result

Verdict = Literal["loops", "looped", "suspicious", "clean"]
SHORT_END = 48  # tokens after the last copy that may be anything
LOOP_FOUND = 3  # exit status


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, such as counters, which may be honest. "clean": none of these.
        tokens: Number of tokens.
        wasted: Number of tokens after the first copy that belong to the repetition; None if there is none.
        period: Period in tokens of the stretch that covers most, as the monitor found it; None if there is none.
        onset: Position of the first token of the repetition, counted from 0.
        repeats: Number of copies in that stretch.
        detected: Number of tokens at which the repetition was found; None if there is none.
        ttr: Type-token ratio of the whole record.
        cr: Compression ratio of the whole record.
    """

    name: str
    verdict: Verdict
    tokens: int = 0
    wasted: int | None = None
    period: int | None = None
    onset: int | None = None
    repeats: float | None = None
    detected: int | None = None
    ttr: float | None = None
    cr: float | None = None

    def repetition(self) -> str:
        """What repeats, as the end of a sentence; empty if no period was found."""
        if self.period is None or self.wasted is None:
            return ""
        repeated = count_of(self.period + self.wasted, "token")
        if self.verdict == "loops":
            return f": its last {repeated} repeat a piece of {self.period}"
        return f": {repeated} repeated a piece of {self.period}, and then it went on"


@dataclass(frozen=True, kw_only=True)
class LoopCheck(Result):
    """The verdicts on records. Its values are plain numbers, so that checking texts loads no numpy.

    Attributes:
        loops: Number of records that loop.
        looped: Number of records that looped and went on.
        suspicious: Number of suspicious records.
        records: Results for each record.
    """

    kind = "loops"
    columns = ("name", "verdict", "tokens", "wasted", "period", "onset")

    loops: int
    looped: int
    suspicious: int
    records: tuple[CheckedOutput, ...]

    @property
    def exit_code(self) -> int:
        """The status of the command: 3 if a record loops or looped, else 0."""
        return LOOP_FOUND if self.loops or self.looped else 0

    def conclusion(self) -> str:
        """How many records have each verdict."""
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
            return f"{self.model.name} {parts[0].removeprefix('1 ')}{self.records[0].repetition()}."
        return f"Of {count_of(len(self.records), 'output')} in {self.model.name}, {word_list(parts)}."

    def closing(self) -> list[str]:
        """The conclusion and, of a loop, where to find what ends it."""
        lines = super().closing()
        if self.exit_code:
            lines.append(f"Try: a temperature of 0.7 first; {documented_at('what_to_try')} has a row for each server.")
        return lines


class CheckedStream(Stream):
    """One output, its monitor, and the numbers beside its verdict.

    Attributes:
        ids: The tokens, or the numbers that stand for words.
    """

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        super().__init__(settings)
        self._echoes = Echoes()
        self._suspected: int | None = None
        self._longest: Tail | None = None
        self._covered = 0
        self._last_copy = 0  # number of tokens up to the last one that repeats
        self._detected: int | None = None
        self.ids = array("I")

    def _see(self, token: int, step: Step, text: str) -> None:
        """Take note of a token."""
        if self.monitor.is_plain is not None and self._detected is None and self._suspected is None:
            if self._echoes.add(text, step.step - 1):
                self._suspected = step.step
        if step.trigger and self._detected is None:
            self._detected = step.step
        tail = step.tail
        if tail is not None or step.trigger:
            self._last_copy = step.step
        if tail is not None and step.step - tail.start > self._covered:
            self._longest = tail
            self._covered = step.step - tail.start
        self.ids.append(token)

    def result(self, name: str) -> CheckedOutput:
        """The verdict on the output of this name, which has ended."""
        settings = self.monitor.settings
        tokens = len(self.ids)
        facts: dict[str, Any] = {"tokens": tokens}
        if tokens:
            facts |= {"ttr": type_token_ratio(self.ids), "cr": compression_ratio(self.ids)}
        if self._detected is None:
            if self._suspected is None and self._echoes.add("\n", tokens):
                self._suspected = tokens
            if self._suspected is None or settings.rule == "never":
                return CheckedOutput(name, "clean", **facts)
            return CheckedOutput(name, "suspicious", onset=self._echoes.onset, detected=self._suspected, **facts)
        onset = self._detected
        tail = self._longest
        if tail is not None:
            onset = tail.start
            wasted = max(0, self._last_copy - onset - tail.period)
            facts |= {"period": tail.period, "repeats": tail.repeats, "wasted": wasted}
        verdict: Verdict = "looped"
        if tokens - self._last_copy <= max(SHORT_END, settings.cooldown):
            verdict = "loops"
        return CheckedOutput(name, verdict, onset=onset, detected=self._detected, **facts)


class Checker(Watch):
    """Collects the verdicts of outputs as they end.

    Args:
        settings: Settings of the monitor.
        name: Name of the input in the result.
    """

    SKIPS: ClassVar[bool] = False

    def __init__(self, settings: MonitorSettings | None, name: str) -> None:
        super().__init__(settings)
        self._name = name
        self._started = time.perf_counter()
        self._records: list[CheckedOutput] = []

    def new_stream(self) -> Stream:
        """What checks a new output."""
        return CheckedStream(self.settings)

    def end(self, name: str, stream: CheckedStream) -> None:
        """Keep the verdict on an output."""
        self._records.append(stream.result(name))

    def result(self) -> LoopCheck:
        """The verdicts on all outputs."""
        verdicts = [record.verdict for record in self._records]
        return LoopCheck(
            loops=verdicts.count("loops"),
            looped=verdicts.count("looped"),
            suspicious=verdicts.count("suspicious"),
            records=tuple(self._records),
            model=ModelInfo(name=self._name, family="text", n_layers=0, d_model=0, d_mlp=0, fingerprint=""),
            settings=vars(self.settings),
            provenance=provenance(started=self._started),
        )


def check(
    outputs: str | Sequence[Any] | Ids,
    *,
    settings: MonitorSettings | None = None,
    name: str = "input",
) -> LoopCheck:
    """Check outputs for repetition loops; no model, no tokenizer and no torch are needed.

    A record loops or looped if the monitor triggers in it. By default this happens as soon as there are 3 exact copies
    of anything that cover at least 48 tokens, or 384 tokens of numbers and signs. With `MonitorSettings.paper()`,
    LoopGuard's monitor decides. Because there are no probabilities, its other two votes (type-token ratio and
    compression ratio) must agree, and one of its gates (stalled novelty or tail repetition) must hold. A text in which
    it does not trigger is suspicious if nearly all sentences or rows resemble earlier ones.

    Args:
        outputs: A text, token ids, or several of either.
        settings: Settings of the monitor.
        name: Name of the input in the result.

    Returns:
        A `LoopCheck`.

    Raises:
        SinkscopeError: The input is empty or neither text nor ids, or the settings need probabilities.
    """
    checker = Checker(settings, name)
    items: Any = id_list(outputs)
    if not isinstance(items, str | list | tuple) or not items:
        raise SinkscopeError(f"{outputs!r} cannot be checked: give a text, token ids, or several of either")
    named: list[tuple[str, Any]] = [("text", items)]
    if not isinstance(items, str) and not isinstance(items[0], int):
        named = [(str(place), item) for place, item in enumerate(items, 1)]
    for each, output in named:
        try:
            pieces = pieces_of_output(output, each)
        except ValueError as error:
            raise SinkscopeError(f"output {each} cannot be checked: {error}") from None
        for piece in pieces:
            for _ in checker.take(piece):
                pass
    return checker.result()


def check_file(
    source: Any,
    *,
    form: StreamForm = "auto",
    settings: MonitorSettings | None = None,
    name: str = "input",
    told: Callable[[Alarm], None] | None = None,
) -> LoopCheck:
    """Check the outputs of a file while it is read.

    Args:
        source: A binary file or a pipe: a text, JSON lines, server-sent events, or one JSON value, which is read whole.
        form: Form of the source; "auto" decides by the first line.
        settings: Settings of the monitor.
        name: Name of the file in the result and in errors.
        told: Called with each loop as it is found.

    Raises:
        SinkscopeError: The source is empty, or something in it cannot be read.
    """
    checker = Checker(settings, name)
    for alarm in checker.follow(source, form=form, name=name):
        if told is not None:
            told(alarm)
    return checker.result()
