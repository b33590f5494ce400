"""The pieces of outputs in a byte stream: a text, lines of JSON, or the events of a server."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from sinkscope.files.plain import parse_json
from sinkscope.loops.text.beginnings import beginning, lines_of
from sinkscope.loops.text.forms import UNREADABLE, Piece, StreamForm, on_one_line, origin_of
from sinkscope.loops.text.logged import pieces_of_line

KEPT_IDS = 4096
Skip = Callable[[str], None]
"""Is told what cannot be read."""


def pieces_in(
    source: Any, form: StreamForm, name: str, skip: Skip, *, field: str | None = None, whole: bool = False
) -> Iterator[Piece]:
    """Yield the pieces that a byte stream adds to each output, as soon as they arrive.

    Args:
        source: The stream, with `read1` and `readline`.
        form: Its form; "auto" decides by its beginning.
        name: Its name.
        skip: Is told what cannot be read.
        field: Where the answers of a line are.
        whole: Whether the stream is a file, whose JSON may also be one value on several lines.

    Raises:
        UnicodeDecodeError: A text is not UTF-8.
        OSError: The stream breaks off.
    """
    start = b""
    if form == "auto" and field is None:
        form, start = beginning(source, name)
    if form == "text":
        yield from _text(source, start, name)
        return
    if form == "sse":
        rows = _events(lines_of(source, start), name, skip)
    else:
        if not start.endswith(b"\n"):
            start += source.readline()
        rows = _rows(chain(start.splitlines(True), iter(source.readline, b"")), name, skip, whole)
    ids, origin = AnswerIds(), None
    for place, row in rows:
        try:
            settled = ids.settled(row)
            origin = origin_of(settled) or (origin if form == "sse" else None)  # of events the first may say it
            for piece in pieces_of_line(settled, place, field, whole=form != "sse"):
                yield piece._replace(origin=origin)
        except UNREADABLE as error:
            skip(_problem(name, place, error, str(row)))


def _problem(name: str, place: int, error: Exception, line: str) -> str:
    return f"{name} line {place} is no output of a model: {error}; it is {on_one_line(line)}"


def _text(source: Any, start: bytes, name: str) -> Iterator[Piece]:
    """The pieces of a text."""
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


def _events(lines: Iterable[bytes], name: str, skip: Skip) -> Iterator[tuple[int, Any]]:
    """The data of server-sent events, each with the number of its line."""
    for place, line in enumerate(lines, 1):
        text = ""
        try:
            text = line.decode("utf-8-sig").strip()
            data = text.removeprefix("data:").strip() if text.startswith("data:") else ""
            if data not in ("", "[DONE]"):
                yield place, parse_json(data)
        except UNREADABLE as error:
            skip(_problem(name, place, error, text))


def _rows(lines: Iterator[bytes], name: str, skip: Skip, whole: bool, first: int = 1) -> Iterator[tuple[int, Any]]:
    """The values in lines of JSON, each with its number: a list is a value for each item."""
    begun = False
    for place, line in enumerate(lines, first):
        text = ""
        try:
            text = line.decode("utf-8-sig").strip()
            if text not in ("", "[DONE]"):
                values = _items(parse_json(text))
                begun = True
                yield from enumerate(values, place)
        except UNREADABLE as error:
            rest = list(lines) if whole and not begun else []
            try:
                values = _items(parse_json(text + b"".join(rest).decode()))  # one value on several lines
            except UNREADABLE:
                skip(_problem(name, place, error, text))
                yield from _rows(iter(rest), name, skip, False, place + 1)
            else:
                yield from enumerate(values, place)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


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
