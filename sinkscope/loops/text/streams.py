"""`Watch` reports where outputs loop while they are being read; `sinkscope loops --follow` is its command."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any, ClassVar, NamedTuple
from zlib import crc32

from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.plain import parse_json
from sinkscope.loops.text.forms import Piece, StreamForm, pieces_of, pieces_of_record, shown
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, Step
from sinkscope.loops.text.outputs import Splitter, is_plain
from sinkscope.loops.text.signals import Tail

KEPT_TOKENS = 2048  # whose text is kept
SHOWN_TOKENS = 60  # of a loop without an exact period
MOST_BLANKS = 64  # bytes before the first word of an input whose form is to be learnt
_EVENTS = ("data:", "event:", "id:", "retry:", ":")  # how server-sent events may begin


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
    """The number by which a token is known that has none: the same in every run, and nothing has to be kept."""
    return crc32(repr(key).encode())


class Stream:
    """One output and its monitor.

    Args:
        settings: Settings of the monitor.
    """

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        recent = deque[str](maxlen=KEPT_TOKENS)
        self.monitor = Monitor(settings, lambda ids: is_plain(list(recent)[-len(ids) :]))
        self._splitter = Splitter()
        self._recent = recent
        self._quiet_until = 0

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises."""
        if piece.key is not None:
            self.monitor.is_plain = None  # the tokens are no words
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
        self._see(token, step, text)
        if not step.trigger:
            return
        if step.step > self._quiet_until:
            yield Alarm(name, step.step, step.tail, self._copy(step.tail, step.step))
        self._quiet_until = step.step + self.monitor.settings.relapse  # a loop that goes on is reported once

    def _see(self, token: int, step: Step, text: str) -> None:
        """Take note of a token."""

    def _copy(self, tail: Tail | None, step: int) -> str:
        """Text of one copy of the loop, or of the last tokens."""
        length, turned = SHOWN_TOKENS, 0
        if tail is not None:
            length = tail.period
            turned = step - tail.start  # it begins where the first copy began
        copy = deque([*self._recent][-length:])
        copy.rotate(turned)
        gap = "" if self.monitor.is_plain is None else " "
        return shown(gap.join(copy).strip(" "))


class Watch:
    """All outputs of an input.

    Attributes:
        streams: Number of outputs seen so far.
        skipped: Number of lines that could not be read, and of an end that broke off.
        open: Outputs that have not ended, by name.

    Args:
        settings: Settings of the monitors.
    """

    SKIPS: ClassVar[bool] = True
    """Whether what cannot be read is skipped, and is no error."""

    def __init__(self, settings: MonitorSettings | None = None) -> None:
        self.settings = settings or MonitorSettings()
        self.streams = 0
        self.skipped = 0
        self._first_problem = ""
        self.open: dict[str, Stream] = {}

    def follow(self, source: Any, *, form: StreamForm = "auto", name: str = "the input") -> Iterator[Alarm]:
        """Yield the alarms of an input as they occur.

        A line of JSON that cannot be read is skipped with a warning. If the source breaks off, what was read until then
        counts.

        Args:
            source: A binary file, a pipe or a server's response, with `read1` and `readline`; contains text, JSON
                lines, or server-sent events of any server in `sinkscope.loops.text.forms`.
            form: Format of the source; "auto" decides by the first line.
            name: Name of the source in alarms and errors.

        Raises:
            SinkscopeError: The source is empty, holds no output, or is not UTF-8 text.
        """
        try:
            for piece in _pieces(source, form, name, self._skip, not self.SKIPS):
                yield from self.take(piece)
        except UnicodeDecodeError as error:
            if error.reason != "unexpected end of data":  # a character that was cut off is left out silently
                self._skip(f"{name} is not UTF-8 text, or not to its end: convert it, or give another input")
        except OSError as error:
            self._skip(f"{name} breaks off: {error}")
        for open_stream in list(self.open):
            yield from self.take(Piece(open_stream, last=True))
        if not self.streams:
            expected = "a text, JSON lines, or the events of a server (see --format)"
            empty = f"{name} is empty, or nothing in it is an output: expected {expected}"
            raise SinkscopeError(self._first_problem or empty)
        if self.skipped:
            problem = f"{self._first_problem}; what cannot be read was skipped {self.skipped} times"
            warn(problem)

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises in its output."""
        stream = self.open.pop(piece.stream, None)
        if stream is None:
            stream = self.new_stream()
            self.streams += 1
        yield from stream.take(piece)
        if not piece.last:
            self.open[piece.stream] = stream
        else:
            self.end(piece.stream, stream)

    def new_stream(self) -> Stream:
        """What watches a new output."""
        return Stream(self.settings)

    def end(self, name: str, stream: Any) -> None:
        """Take note of an output that has ended, and what watched it."""

    def _skip(self, problem: str) -> None:
        """Count what cannot be read; the first problem is told at the end."""
        if not self.SKIPS:
            raise SinkscopeError(problem)
        self.skipped += 1
        self._first_problem = self._first_problem or problem


def _pieces(source: Any, form: StreamForm, name: str, skip: Callable[[str], None], is_file: bool) -> Iterator[Piece]:
    """The pieces that a byte stream adds to each output, as soon as they arrive; `skip` is told what cannot be read."""
    start = b""
    if form == "auto":
        start, form = _beginning(source)
    if form == "text":
        for text in _texts(start, source):
            yield Piece(name, text=text)
        return
    if not start.endswith(b"\n"):
        start += source.readline()
    for place, line in enumerate(chain([start], iter(source.readline, b"")), 1):
        text = ""
        try:
            text = line.decode("utf-8-sig").strip()
            if form == "sse":
                text = text.removeprefix("data:").strip() if text.startswith("data:") else ""
            elif is_file and place == 1 and _is_document(text):
                yield from _document(line + source.read())
                return
            if text not in ("", "[DONE]"):
                yield from pieces_of_line(parse_json(text), form, place)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            skip(f"{name} line {place} is no output of a model: {error}; it is {shown(text)}")


def _is_document(line: str) -> bool:
    """Whether a file is one JSON value, by its first line: a list, or an object that goes on."""
    if not line.startswith("{"):
        return line.startswith("[")
    with suppress(ValueError):
        parse_json(line)
        return False
    return True


def _document(data: bytes) -> Iterator[Piece]:
    """The pieces of a file that is one JSON value: an output, or a list of outputs."""
    value = parse_json(data.decode("utf-8-sig"))
    rows = value if isinstance(value, list) else [value]
    for place, row in enumerate(rows, 1):
        yield from pieces_of_line(row, "jsonl", place)


def _texts(start: bytes, source: Any) -> Iterator[str]:
    """The text of a byte stream as it arrives; text before bytes that are no UTF-8 counts."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    data = start or source.read1(1 << 16)
    while data:
        try:
            text = decoder.decode(data)
        except UnicodeDecodeError as error:
            if error.start:
                yield error.object[: error.start].decode()
            raise
        if text:
            yield text
        data = source.read1(1 << 16)
    decoder.decode(b"", final=True)  # a character that was cut off is an error


def _beginning(source: Any) -> tuple[bytes, StreamForm]:
    """What was read to learn the form of an input, a byte at a time, and the form."""
    start = b""
    while len(start) < MOST_BLANKS:
        byte = source.read1(1)
        start += byte
        word = start.decode("utf-8-sig", "ignore").lstrip()
        if word.startswith(_EVENTS):
            return start, "sse"
        if word == "{":
            start += source.readline()
            with suppress(ValueError):
                parse_json(start.decode("utf-8-sig"))
                return start, "jsonl"
            break
        if not byte or not any(event.startswith(word) for event in _EVENTS):
            break
    return start, "text"


def pieces_of_line(data: Any, form: StreamForm, place: int) -> list[Piece]:
    """What the JSON of a line or event adds.

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
        raise ValueError(f"the server reports an error, {shown(str(problem), 200)}")
    outputs = pieces_of(data, place)
    if outputs is None and form == "jsonl":
        return pieces_of_record(data, place)
    return outputs or []
