"""The pieces of outputs in a byte stream: a text, lines of JSON, or the events of a server.

1. Bytes become text, whose lines all end in a line feed (`_decoded`).
2. The beginning says the form, behind the headers and keep-alive lines of a server (`form_of`).
3. Each line or event is a value of JSON (`_rows`), and each value adds pieces to outputs (`pieces_of_line`).
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from io import IncrementalNewlineDecoder
from itertools import chain
from pathlib import Path
from typing import Any

from sinkscope.files.plain import parse_json
from sinkscope.loops.text.forms import EVENTS, UNREADABLE, Piece, StreamForm, on_one_line, origin_of, pieces_of
from sinkscope.loops.text.logged import pieces_of_line

KEPT_IDS = 4096
MOST_BLANKS = 4096  # characters of white space, from which on an input is a text
_HEADERS = re.compile(r"\s*(?:HTTP/[^\n]*\n(?:[^\n]+\n)*\n)+")  # as curl -i writes them
_DATA = re.compile(r"data: ?\{")
_NOT_DECODED = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8
Skip = Callable[[str], None]
"""Is told what cannot be read."""


def pieces_in(
    source: Any, form: StreamForm, name: str, skip: Skip, *, field: str | None = None, whole: bool = False
) -> Iterator[Piece]:
    """Yield the pieces that a byte stream adds to each output, as soon as they arrive.

    Args:
        source: The stream, with `read1`.
        form: Its form; "auto" decides by its beginning.
        name: Its name. The text in a file with another ending than that of JSON may begin with any JSON.
        skip: Is told what cannot be read.
        field: Where the answers of a line are.
        whole: Whether the stream is a file, whose JSON may also be one value on several lines.

    Raises:
        UnicodeError: A text is not UTF-8.
        OSError: The stream breaks off.
    """
    text = _decoded(source)
    if form == "auto" and field is None:
        form, text = _beginning(text, name)
    if form == "text":
        for part in text:
            known = _NOT_DECODED.split(part)[0]
            if known:  # text before bytes that are none counts
                yield Piece(name, text=known)
            part.encode()
        return
    ids, origin = AnswerIds(), None
    for place, row in _rows(enumerate(_lines(text), 1), form, name, skip, whole):
        try:
            settled = ids.settled(row)
            origin = origin_of(settled) or (origin if form == "sse" else None)  # of events the first may say it
            for piece in pieces_of_line(settled, place, field, whole=form != "sse"):
                yield piece._replace(origin=origin)
        except UNREADABLE as error:
            skip(_problem(name, place, error, str(row)))


def _decoded(source: Any) -> Iterator[str]:
    """The text of a byte stream as it arrives; bytes that are no UTF-8 become surrogates."""
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), translate=True)
    while data := source.read1(1 << 16):
        text = decoder.decode(data)
        if text:
            yield text


def _beginning(text: Iterator[str], name: str) -> tuple[StreamForm, Iterator[str]]:
    """The form of an input, of which no more is read than that takes, and its text without headers."""
    start = body = ""
    for part in text:
        start += part
        headers = _HEADERS.match(start)
        body = start if headers is None else start[headers.end() :]
        if body.lstrip().startswith("HTTP/"):  # headers that go on
            body = ""
            continue
        form = form_of(body, name)
        if form is not None:
            return form, chain([body], text)
    return form_of(f"{body}\n", name) or _default_form(name), iter([body])


def _default_form(name: str) -> StreamForm:
    is_json = name.lower().removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson"))
    return "jsonl" if is_json else "text"


def form_of(start: str, name: str) -> StreamForm | None:
    """Return the form of an input that begins so; None if the beginning fits several."""
    *lines, rest = start.split("\n")
    has_events = False
    for line in map(str.strip, lines):
        if _DATA.match(line):
            return "sse"
        if line.startswith("{") and not has_events and _is_output(line, name):
            return "jsonl"
        if line and not line.startswith(EVENTS):
            return _default_form(name)
        has_events = has_events or bool(line)
    rest = rest.lstrip()
    if not has_events and not rest and len(start) > MOST_BLANKS:
        return _default_form(name)
    beginnings = ("HTTP/", "{", *EVENTS)
    is_open = any(begin.startswith(rest) or rest.startswith(begin) for begin in beginnings)
    return None if is_open else _default_form(name)


def _is_output(line: str, name: str) -> bool:
    """Whether a line is the JSON of an output."""
    with suppress(*UNREADABLE):
        row = parse_json(line)
        return not Path(name).suffix or pieces_of(row, 1) is not None
    return False


def _lines(text: Iterable[str]) -> Iterator[str]:
    """The lines of a text as soon as they arrive."""
    held: list[str] = []
    for part in text:
        *lines, rest = part.split("\n")
        for line in lines:
            yield "".join([*held, line])
            held = []
        held.append(rest)
    yield "".join(held)


def _rows(
    lines: Iterator[tuple[int, str]], form: StreamForm, name: str, skip: Skip, whole: bool
) -> Iterator[tuple[int, Any]]:
    """The values in lines of JSON or in events, each with its number: a list is a value for each item."""
    for place, line in lines:
        try:
            values = _values(line, form)
        except UNREADABLE as error:
            rest = list(lines) if whole else []
            try:  # one value on several lines
                values = _values("\n".join([line, *(later for _, later in rest)]), form)
            except UNREADABLE:
                skip(_problem(name, place, error, line))
                yield from _rows(iter(rest), form, name, skip, False)
                continue
        whole = whole and not values
        yield from enumerate(values, place)


def _values(line: str, form: StreamForm) -> list[Any]:
    data = line.strip()
    if form == "sse":
        data = data.removeprefix("data:").strip() if data.startswith("data:") else ""
    if data in ("", "[DONE]"):
        return []
    if _NOT_DECODED.search(data):
        raise ValueError("it is not UTF-8")
    value = parse_json(data)
    return value if isinstance(value, list) else [value]


def _problem(name: str, place: int, error: Exception, line: str) -> str:
    return f"{name} line {place} is no output of a model: {error}; it is {on_one_line(line)}"


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
