"""`Watch` says of outputs while they are being read where they loop, and at their end what they are."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, NamedTuple
from zlib import crc32

from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.plain import parse_json
from sinkscope.loops.text.forms import EVENTS, UNREADABLE, Piece, StreamForm, on_one_line, pieces_of, pieces_of_record
from sinkscope.loops.text.monitor import Monitor, MonitorSettings
from sinkscope.loops.text.near_copies import Echoes
from sinkscope.loops.text.outputs import Splitter, is_tabular
from sinkscope.loops.text.signals import Tail
from sinkscope.results.notation import count_of

TextVerdict = Literal["loops", "looped", "suspicious", "empty", "clean"]
SHORT_END = 48  # tokens after the last copy that may be anything
KEPT_TOKENS = 2048  # whose text is kept
KEPT_VERDICTS = 64  # of a stream that is followed
SHOWN_TOKENS = 60  # of a loop without an exact period
MOST_BLANKS = 64  # bytes before the first word of an input whose form is to be learnt


class Alarm(NamedTuple):
    """A detected loop.

    Attributes:
        stream: Name of the stream.
        token: Number of the token, counted from 1, at which the monitor triggered.
        tail: The repetition that reaches this token; None if it is not exact.
        text: One copy, or the last tokens, shortened and without control characters.
    """

    stream: str
    token: int
    tail: Tail | None
    text: str

    def __str__(self) -> str:
        repetition = "no exact period"
        if self.tail is not None:
            repetition = f"period {self.tail.period}, {self.tail.repeats:.1f} copies since token {self.tail.start + 1}"
        return f'loop in {self.stream} at token {self.token}: {repetition}, "{self.text}"'


def _number_of(key: object) -> int:
    """A number for a token that has no id: equal tokens have equal numbers, in every run."""
    return crc32(repr(key).encode())


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, such as counters, which may be honest. "empty": no text was found in it. "clean": none of
            these.
        tokens: Number of tokens.
        wasted: Number of tokens after the first copy that belong to the repetition; None if there is none.
        period: Period in tokens of the stretch that covers most, as the monitor found it; None if there is none.
        onset: Position of the first token of the repetition, counted from 0.
        detected: Number of tokens at which the repetition was found; None if there is none.
    """

    name: str
    verdict: TextVerdict
    tokens: int = 0
    wasted: int | None = None
    period: int | None = None
    onset: int | None = None
    detected: int | None = None

    def repetition(self) -> str:
        """Return what repeats, as the end of a sentence; empty if no period was found."""
        if self.period is None or self.wasted is None:
            return ""
        repeated = count_of(self.period + self.wasted, "token")
        if self.verdict == "loops":
            return f": its last {repeated} repeat a piece of {self.period}"
        return f": {repeated} repeated a piece of {self.period}, and then it went on"


class Stream:
    """One output, its monitor, and what was found in it.

    Args:
        settings: Settings of the monitor.
    """

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        recent = deque[str](maxlen=KEPT_TOKENS)
        self.monitor = Monitor(
            settings, lambda ids: is_tabular(list(recent)[-len(ids) :]), lambda _token: recent[-1][0].isdigit()
        )
        self._splitter = Splitter()
        self._recent = recent
        self._quiet_until = 0
        self._echoes = Echoes()
        self._suspected: int | None = None
        self._onset: int | None = None  # of a counter
        self._detected: int | None = None
        self._longest: Tail | None = None
        self._covered = 0
        self._last_copy = 0  # number of tokens up to the last one that repeats

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises."""
        if piece.key is not None:
            self.monitor.is_plain = self.monitor.is_number = None  # the tokens are no words
            key = piece.key
            if not isinstance(key, int):
                key = _number_of(key)
            yield from self._advance(piece.stream, key, piece.text)
            return
        for word in self._splitter.feed(piece.text, piece.last):
            yield from self._advance(piece.stream, _number_of(word), word)

    def _advance(self, name: str, token: int, text: str) -> Iterator[Alarm]:
        """Yield the alarm that a token raises, if it does."""
        self._recent.append(text[:SHOWN_TOKENS])
        step = self.monitor.update(token)
        if self.monitor.is_plain is not None and self._detected is None and self._suspected is None:
            if self._echoes.add(text, step.step - 1):
                self._suspected = step.step
        tail = step.tail
        if tail is not None and not tail.exact:  # it may be honest: reported, but no verdict that a text loops
            if step.trigger and step.step > self._quiet_until:
                self._suspected = self._suspected or step.step
                self._onset = tail.start
                yield Alarm(name, step.step, tail, self._copy(tail))
                self._quiet_until = step.step + self.monitor.settings.window
            return
        if tail is not None or step.trigger:
            self._last_copy = step.step
        if tail is not None and step.step - tail.start > self._covered:
            self._longest = tail
            self._covered = step.step - tail.start
        if not step.trigger:
            return
        if self._detected is None:
            self._detected = step.step
        if step.step > self._quiet_until:
            yield Alarm(name, step.step, tail, self._copy(tail))
        self._quiet_until = step.step + self.monitor.settings.window  # a loop that goes on is reported once

    def _copy(self, tail: Tail | None) -> str:
        """Text of one copy of the loop, or of the last tokens."""
        length = SHOWN_TOKENS if tail is None else tail.period
        gap = "" if self.monitor.is_plain is None else " "
        return on_one_line(gap.join([*self._recent][-length:]).strip(" "))

    def checked(self, name: str) -> CheckedOutput:
        """Return the verdict on the output of this name, which has ended."""
        tokens, tail = self.monitor.last.step, self._longest
        if self._detected is None:
            if self._suspected is None and self._echoes.add("\n", tokens):
                self._suspected = tokens
            if self._suspected is None:
                return CheckedOutput(name, "clean" if tokens else "empty", tokens)
            onset = self._echoes.onset if self._onset is None else self._onset
            return CheckedOutput(name, "suspicious", tokens, onset=onset, detected=self._suspected)
        verdict: TextVerdict = "looped"
        if tokens - self._last_copy <= max(SHORT_END, self.monitor.settings.cooldown):
            verdict = "loops"
        if tail is None:
            return CheckedOutput(name, verdict, tokens, onset=self._detected, detected=self._detected)
        wasted = max(0, self._last_copy - tail.start - tail.period)
        return CheckedOutput(name, verdict, tokens, wasted, tail.period, tail.start, self._detected)


class Watch:
    """All outputs of an input.

    Attributes:
        open: Outputs that have not ended, by name.
        checked: Verdicts on those that have; of a stream, whose end may never come, the latest.
        skipped: Number of lines that could not be read, and of an end that broke off.

    Args:
        settings: Settings of the monitors.
    """

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.settings = settings or MonitorSettings()
        self.open: dict[str, Stream] = {}
        self.checked: list[CheckedOutput] = []
        self.skipped = 0
        self._first_problem = ""

    def follow(
        self, source: Any, *, form: StreamForm = "auto", name: str = "the input", strict: bool = False
    ) -> Iterator[Alarm]:
        """Yield the alarms of an input as they occur.

        A line of JSON that cannot be read is skipped with a warning. If the source breaks off, what was read until then
        counts.

        Args:
            source: A binary file, a pipe or a server's response, with `read1` and `readline`; contains text, JSON
                lines, or server-sent events of any server in `sinkscope.loops.text.forms`.
            form: Format of the source; "auto" decides by the first line.
            name: Name of the source in alarms and errors.
            strict: Whether what cannot be read is an error; JSON lines may then also be one value on several lines.

        Raises:
            SinkscopeError: The source is empty, holds no output, or is not UTF-8 text.
        """

        def skip(problem: str) -> None:
            if strict:
                raise SinkscopeError(problem)
            self.skipped += 1
            self._first_problem = self._first_problem or problem

        try:
            for piece in _pieces(source, form, name, skip, strict):
                yield from self.take(piece)
                if not strict:
                    del self.checked[:-KEPT_VERDICTS]
        except UnicodeDecodeError:
            skip(f"{name} is not UTF-8 text, or not to its end: convert it, or give another input")
        except OSError as error:
            skip(f"{name} breaks off: {error}")
        for open_stream in list(self.open):
            yield from self.take(Piece(open_stream, last=True))
        if not self.checked:
            expected = "a text, JSON lines, or the events of a server (see --format)"
            empty = f"{name} is empty, or nothing in it is an output: expected {expected}"
            raise SinkscopeError(self._first_problem or empty)
        if self.skipped:
            warn(f"{self._first_problem}; what cannot be read was skipped {self.skipped} times")

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises in its output."""
        if piece.stream not in self.open:
            if piece.part and not piece.text:
                return
            self.open[piece.stream] = Stream(self.settings)
        stream = self.open[piece.stream]
        yield from stream.take(piece)
        if piece.last:
            del self.open[piece.stream]
            self.checked.append(stream.checked(piece.stream))


def _pieces(source: Any, form: StreamForm, name: str, skip: Callable[[str], None], whole: bool) -> Iterator[Piece]:
    """The pieces that a byte stream adds to each output, as soon as they arrive; `skip` is told what cannot be read."""
    start = b""
    if form == "auto":
        start, form = _beginning(source)
    if form == "text":
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        data = start or source.read1(1 << 16)
        while data:
            try:
                text = decoder.decode(data)
            except UnicodeDecodeError as error:
                if error.start:  # text before bytes that are no UTF-8 counts
                    yield Piece(name, text=error.object[: error.start].decode())
                raise
            if text:
                yield Piece(name, text=text)
            data = source.read1(1 << 16)
        return
    if not start.endswith(b"\n"):
        start += source.readline()
    for place, line in enumerate(chain([start], iter(source.readline, b"")), 1):
        text = ""
        try:
            text = line.decode("utf-8-sig").strip()
            if form == "sse":
                text = text.removeprefix("data:").strip() if text.startswith("data:") else ""
            if text not in ("", "[DONE]"):
                rest = source.read if whole and place == 1 else bytes
                for number, row in enumerate(_rows(text, rest), place):
                    yield from pieces_of_line(row, form, number)
        except UNREADABLE as error:
            skip(f"{name} line {place} is no output of a model: {error}; it is {on_one_line(text)}")


def _rows(line: str, rest: Callable[[], bytes]) -> list[Any]:
    """The outputs in a line of JSON, or in one value that goes on in the `rest`."""
    try:
        value = parse_json(line)
    except ValueError:
        value = parse_json(line + rest().decode())
    if isinstance(value, list):
        return value
    return [value]


def _beginning(source: Any) -> tuple[bytes, StreamForm]:
    """What was read to learn the form of an input, a byte at a time, and the form."""
    start = b""
    while len(start) < MOST_BLANKS:
        byte = source.read1(1)
        start += byte
        word = start.decode("utf-8-sig", "ignore").lstrip()
        if word.startswith(EVENTS):
            return start, "sse"
        if word == "{":
            start += source.readline()
            with suppress(ValueError):
                parse_json(start.decode("utf-8-sig"))
                return start, "jsonl"
            break
        if not byte or not any(event.startswith(word) for event in EVENTS):
            break
    return start, "text"


def pieces_of_line(data: Any, form: StreamForm, place: int) -> list[Piece]:
    """Return what the JSON of a line or event adds.

    Args:
        data: The JSON.
        form: "jsonl" if every line has to add something.
        place: Number of the line.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It reports an error, or cannot be read.
    """
    if not isinstance(data, dict):
        raise ValueError("expected an object")
    problem = data.get("error")
    if problem:
        raise ValueError(f"the server reports an error, {on_one_line(str(problem), 200)}")
    outputs = pieces_of(data, place)
    if outputs is None and form == "jsonl":
        return pieces_of_record(data, place)
    return outputs or []
