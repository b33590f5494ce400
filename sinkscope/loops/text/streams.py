"""`Watch` says of outputs while they are being read where they loop, and at their end what they are."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal, NamedTuple
from zlib import crc32

from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.plain import parse_json
from sinkscope.loops.text.beginnings import beginning, lines_of
from sinkscope.loops.text.counters import asked_copies
from sinkscope.loops.text.forms import (
    UNREADABLE,
    Origin,
    Piece,
    StreamForm,
    on_one_line,
    origin_of,
    pieces_of,
    pieces_of_record,
)
from sinkscope.loops.text.monitor import Monitor, MonitorSettings, Settings
from sinkscope.loops.text.near_copies import Echoes
from sinkscope.loops.text.outputs import Splitter
from sinkscope.loops.text.signals import Tail
from sinkscope.results.notation import count_of

TextVerdict = Literal["loops", "looped", "suspicious", "empty", "clean"]
SHORT_END = 48  # tokens after the last copy that may be anything
KEPT_TOKENS = 2048  # whose text is kept
KEPT_VERDICTS = 64  # of a stream that is followed
SHOWN_TOKENS = 60  # of a loop without an exact period
KEPT_IDS = 4096


class Alarm(NamedTuple):
    """A detected loop, or a repetition that may be honest.

    Attributes:
        stream: Name of the stream.
        token: Number of the token, counted from 1, at which it was found.
        tail: The repetition that reaches this token; None if the paper's monitor found none.
        text: One copy, or the last tokens, shortened and without control characters.
        cut: Whether it is a loop, which a proxy or a guard ends.
        origin: Id and model of the answer.
    """

    stream: str
    token: int
    tail: Tail | None
    text: str
    cut: bool = True
    origin: Origin = Origin()

    def about(self) -> dict[str, Any]:
        """Return it as JSON without the text, with the time now."""
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "verdict": "loops" if self.cut else "suspicious",
            "model": self.origin.model or None,
            "id": self.origin.id or None,
            "token": self.token,
            "period": None if self.tail is None else self.tail.period,
            "onset": None if self.tail is None else self.tail.start,
        }

    def __str__(self) -> str:
        repetition = "no exact period"
        if self.tail is not None:
            repetition = f"period {self.tail.period}, {self.tail.repeats:.1f} copies since token {self.tail.start + 1}"
        what = "loop" if self.cut else "perhaps honest repetition"
        return f'{what} in {self.stream} at token {self.token}: {repetition}, "{self.text}"'


def _number_of(key: object) -> int:
    """A number for a token that has no id: equal tokens have equal numbers, in every run."""
    return crc32(repr(key).encode())


@dataclass(frozen=True)
class CheckedOutput:
    """The result for one record.

    Attributes:
        name: Name such as "line 3", or the file's name.
        verdict: "loops": it repeats itself to its end. "looped": it repeated itself and went on. "suspicious": it has
            near copies, or copies of data, which may be honest. "empty": no text was found in it. "clean": none of
            these. A proxy and a guard end what loops.
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
        asked: Number of copies that the prompt asks for.
    """

    def __init__(self, settings: Settings | None = None, asked: int = 0) -> None:
        self._recent = deque[str](maxlen=KEPT_TOKENS)
        self.monitor = Monitor(settings, self._words_of, asked)
        self._has_words: bool | None = None  # else ids
        self._splitter = Splitter()
        self._told = 0  # 1: what may be honest, 2: a loop
        self._origin = Origin()
        self._echoes = Echoes()
        self._suspected: int | None = None
        self._onset: int | None = None  # of what may be honest
        self._detected: int | None = None
        self._longest: Tail | None = None
        self._covered = 0
        self._last_copy = 0  # number of tokens up to the last one that repeats

    def take(self, piece: Piece) -> Iterator[Alarm]:
        """Yield the alarms that a piece raises: at most one for a loop, and before it one for what may be honest."""
        if piece.origin is not None and not any(self._origin):
            self._origin = piece.origin
        if piece.key is not None:
            self._has_words = False
            key = piece.key
            if not isinstance(key, int):
                key = _number_of(key)
            yield from self._advance(piece.stream, key, piece.text)
            return
        if self._has_words is None:
            self._has_words = True
        for word in self._splitter.feed(piece.text, piece.last):
            yield from self._advance(piece.stream, _number_of(word), word)

    def _words_of(self, ids: Sequence[int]) -> Sequence[str]:
        """The words of the last tokens; of ids there are none."""
        if not self._has_words:
            return ()
        if len(ids) == 1:
            return [self._recent[-1]]
        return [*self._recent][-len(ids) :]

    def _advance(self, name: str, token: int, text: str) -> Iterator[Alarm]:
        """Yield the alarm that a token raises, if it does."""
        self._recent.append(text[:SHOWN_TOKENS])
        step = self.monitor.update(token)
        if self._has_words and self._detected is None and self._suspected is None:
            if self._echoes.add(text, step.step - 1):
                self._suspected = step.step
        tail = step.tail
        if not step.suspect and (tail is not None or step.trigger):
            self._last_copy = step.step
            if tail is not None and step.step - tail.start > self._covered:
                self._longest = tail
                self._covered = step.step - tail.start
        if step.trigger and self._detected is None:
            self._detected = step.step
        if step.suspect and self._suspected is None and tail is not None:
            self._suspected, self._onset = step.step, tail.start
        level = 2 if step.trigger else int(step.suspect)
        if level > self._told:
            self._told = level
            yield Alarm(name, step.step, tail, self._copy(tail), step.trigger, self._origin)

    def _copy(self, tail: Tail | None) -> str:
        """Text of one copy of the loop, or of the last tokens."""
        length = SHOWN_TOKENS if tail is None else tail.period
        gap = " " if self._has_words else ""
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
        prompt: What was asked; copies that it asks for are no loop.
    """

    def __init__(self, settings: Settings | None = None, prompt: str = "") -> None:
        self.settings = settings or MonitorSettings()
        self._asked = asked_copies(prompt)
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
            self.open[piece.stream] = Stream(self.settings, self._asked)
        stream = self.open[piece.stream]
        yield from stream.take(piece)
        if piece.last:
            del self.open[piece.stream]
            self.checked.append(stream.checked(piece.stream))


def _pieces(source: Any, form: StreamForm, name: str, skip: Callable[[str], None], whole: bool) -> Iterator[Piece]:
    """The pieces that a byte stream adds to each output, as soon as they arrive; `skip` is told what cannot be read."""
    start = b""
    if form == "auto":
        form, start = beginning(source, name)
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
    if form == "sse":
        lines = lines_of(source, start)
    else:
        if not start.endswith(b"\n"):
            start += source.readline()
        lines = chain([start], iter(source.readline, b""))
    ids, origin = AnswerIds(), None
    for place, line in enumerate(lines, 1):
        text = ""
        try:
            text = line.decode("utf-8-sig").strip()
            if form == "sse":
                text = text.removeprefix("data:").strip() if text.startswith("data:") else ""
            if text not in ("", "[DONE]"):
                rest = source.read if whole and place == 1 else bytes
                for number, row in enumerate(_rows(text, rest), place):
                    settled = ids.settled(row)
                    origin = origin_of(settled) or (origin if form == "sse" else None)  # of events the first may say it
                    for piece in pieces_of_line(settled, form, number):
                        yield piece._replace(origin=origin)
        except UNREADABLE as error:
            skip(f"{name} line {place} is no output of a model: {error}; it is {on_one_line(text)}")


class AnswerIds:
    """Tells ids of answers from those of chunks: some servers give each chunk a new id."""

    def __init__(self) -> None:
        self._seen: dict[Any, None] = {}
        self._first: str | None = None  # of the last chunks, while each has another one

    def settled(self, row: Any) -> Any:
        """Return a line; if it and the one before have new ids, and no answer ended between, with the id of that."""
        if not isinstance(row, dict) or "choices" not in row or not row.get("id"):
            return row
        own = str(row["id"])
        if own in self._seen:
            self._first = None
            return row
        self._seen[own] = None
        if len(self._seen) > KEPT_IDS:
            del self._seen[next(iter(self._seen))]
        first, goes_on = self._first, all(map(_goes_on, row["choices"] or ()))
        self._first = None
        if goes_on:
            self._first = first or own
        return {**row, "id": first or own}


def _goes_on(choice: Any) -> bool:
    """Whether a choice is a piece of an answer that does not end there."""
    return isinstance(choice, dict) and "message" not in choice and not choice.get("finish_reason")


def _rows(line: str, rest: Callable[[], bytes]) -> list[Any]:
    """The outputs in a line of JSON, or in one value that goes on in the `rest`."""
    try:
        value = parse_json(line)
    except ValueError:
        value = parse_json(line + rest().decode())
    if isinstance(value, list):
        return value
    return [value]


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
