"""The pieces of outputs in a byte stream: a text, lines of JSON, the events of a server, or the rows of a table.

1. What gzip packed is unpacked; a table is read by rows (`files.tables`).
2. Bytes become text, whose lines all end in a line feed (`_decoded`).
3. The beginning says the form, behind the headers and keep-alive lines of a server (`form_of`).
4. Each line or event is a value of JSON (`_rows`), and each value adds pieces to outputs (`Records.pieces`).
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

from sinkscope.errors import SinkscopeError
from sinkscope.files.chats import messages_in
from sinkscope.files.events import LONGEST, Events
from sinkscope.files.opener import MOST
from sinkscope.files.plain import parse_json
from sinkscope.files.tables import CSV, is_parquet, rows_of_csv, rows_of_parquet, suffix_of, unpacked
from sinkscope.loops.text import forms
from sinkscope.loops.text.logged import Records, answer_column
from sinkscope.loops.text.pieces import UNREADABLE, Piece, StreamForm, on_one_line, origin_of

KEPT_IDS = 4096
MOST_BEGINNING = 1 << 16  # characters of headers, comments and blank lines, behind which the form is decided by them
MOST_BLANKS = 4096  # characters of white space, from which on an input is a text
EVENTS = ("data:", "event:", "id:", "retry:", ":")
"""How server-sent events may begin."""
JSON_NAMES = (".json", ".jsonl", ".ndjson")
_HEADERS = re.compile(r"\s*(?:HTTP/[^\n]*\n(?:[^\n]+\n)*\n)+")  # as curl -i writes them
_DATA = re.compile(r"data: ?(?:\{|\[\s*(?:\{|$))")
_NOT_DECODED = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8
Skip = Callable[[str], None]
"""Is told what cannot be read."""


def pieces_in(
    source: Any,
    form: StreamForm,
    name: str,
    skip: Skip,
    *,
    field: str | None = None,
    by: str | None = None,
    whole: bool = False,
) -> Iterator[Piece]:
    """Yield the pieces that a byte stream adds to each output, as soon as they arrive.

    Args:
        source: The stream, with `read1`.
        form: Its form; "auto" decides by its beginning.
        name: Its name. The text in a file with another ending than that of JSON may begin with any JSON.
        skip: Is told what cannot be read.
        field: Where the answers of a line are.
        by: Field by whose values answers are grouped.
        whole: Whether the stream is a file, whose JSON may also be one value on several lines.

    Raises:
        UnicodeError: A text is not UTF-8.
        OSError, EOFError: The stream breaks off.
        SinkscopeError: It is a table, and no name of a column says where the answers are.
    """
    source = unpacked(source)
    rows: Iterable[tuple[int, Any]]
    if form == "parquet" or (form == "auto" and is_parquet(source, name)):
        rows = enumerate(_with_answers(rows_of_parquet(source, name), name, field), 1)
        yield from _pieces_of_rows(rows, name, skip, field, by)
        return
    text = _decoded(source)
    if form == "csv" or (form == "auto" and suffix_of(name) in CSV):
        lines = (f"{_checked_text(line)}\n" for line in _lines(text, name, None if whole else skip))
        rows = enumerate(_with_answers(rows_of_csv(lines, name), name, field), 1)
        yield from _pieces_of_rows(rows, name, skip, field, by)
        return
    if form == "auto" and field is None:
        form, text = _beginning(text, name)
    if form == "text":
        for part in text:
            known = _NOT_DECODED.split(part)[0]
            if known:  # text before bytes that are none counts
                yield Piece(name, text=known)
            part.encode()
        return
    lines = _lines(text, name, None if whole else skip)
    rows = _rows(enumerate(lines, 1), form, name, skip, whole)
    yield from _pieces_of_rows(rows, name, skip, field, by, events=form == "sse")


def _pieces_of_rows(
    rows: Iterable[tuple[int, Any]], name: str, skip: Skip, field: str | None, by: str | None, events: bool = False
) -> Iterator[Piece]:
    """The pieces of values, each with its number."""
    ids, records, origin = AnswerIds(), Records(by), None
    for place, row in rows:
        try:
            settled = ids.settled(row)
            origin = origin_of(settled) or (origin if events else None)  # of events the first may say it
            for piece in records.pieces(settled, place, field, whole=not events):
                yield piece._replace(origin=origin)
        except UNREADABLE as error:
            skip(_problem(name, place, error, str(row)))


def _with_answers(rows: Iterable[dict[str, Any]], name: str, field: str | None) -> Iterator[dict[str, Any]]:
    """Rows of a table, in which a column has the name by which answers are known.

    Raises:
        SinkscopeError: No column is one of answers.
    """
    column: str | None = None
    for number, row in enumerate(rows):
        if number == 0 and field is None:
            column = answer_column([*row])
            if column is None:
                known = on_one_line(", ".join(row), 200)
                raise SinkscopeError(f"{name} has the columns {known}: name the one with the answers by --field")
        plain = {str(key).lower().replace(" ", "_"): value for key, value in row.items()}
        if column and plain.get(column.lower().replace(" ", "_")) is None:
            plain["text"] = ""
        if column and len(row) == 1:
            plain = {"text": row[column]}
        yield row if field is not None else plain


def _checked_text(line: str) -> str:
    """The line, if all its bytes were UTF-8."""
    line.encode()
    return line


def _decoded(source: Any) -> Iterator[str]:
    """The text of a byte stream as it arrives; bytes that are no UTF-8 become surrogates."""
    decoder = IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")("surrogateescape"), translate=True)
    while data := source.read1(1 << 16):
        text = decoder.decode(data)
        if text:
            yield text


def _beginning(text: Iterator[str], name: str) -> tuple[StreamForm, Iterator[str]]:
    """The form of an input, of which no more is read than that takes, and its text without headers."""
    parts: list[str] = []
    size, body = 0, ""
    for part in text:
        parts.append(part)
        size += len(part)
        if len(parts) > 1 and "\n" not in part and size <= LONGEST:  # a line that goes on
            continue
        start = "".join(parts)
        parts = [start]
        headers = _HEADERS.match(start, 0, MOST_BEGINNING)
        body = start if headers is None else start[headers.end() :]
        ends_too_late = body.rfind("\n") > MOST_BEGINNING or size > LONGEST
        if body.lstrip().startswith("HTTP/"):  # headers that go on
            if ends_too_late:
                return default_form(name), chain([body], text)
            body = ""
            continue
        form = form_of(body, name)
        if form is None and ends_too_late:
            form = "sse" if body.lstrip().startswith(EVENTS) else default_form(name)
            form = "jsonl" if body.lstrip().startswith("{") else form
        if form is not None:
            return form, chain([body], text)
    body = body if len(parts) < 2 else body + "".join(parts[1:])
    return form_of(f"{body}\n", name) or default_form(name), iter([body])


def default_form(name: str) -> StreamForm:
    """Return the form of an input whose beginning does not say it."""
    suffix = suffix_of(name)
    if suffix == ".sse":
        return "sse"
    return "jsonl" if suffix in JSON_NAMES else "text"


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
            return default_form(name)
        has_events = has_events or bool(line)
    rest = rest.lstrip()
    if not has_events and not rest and len(start) > MOST_BLANKS:
        return default_form(name)
    beginnings = ("HTTP/", "{", *EVENTS)
    is_open = any(begin.startswith(rest) or rest.startswith(begin) for begin in beginnings)
    return None if is_open else default_form(name)


def _is_output(line: str, name: str) -> bool:
    """Whether a line is the JSON of an output."""
    with suppress(*UNREADABLE):
        row = parse_json(line)
        return not Path(name).suffix or forms.Events().pieces(row, 1) is not None
    return False


def _lines(text: Iterable[str], name: str, skip: Skip | None = None) -> Iterator[str]:
    """The lines of a text as soon as they arrive.

    Args:
        text: The text as it arrives.
        name: Name of the input.
        skip: Is told of lines that are too long for a stream; None: it is a file.

    Raises:
        SinkscopeError: A line of a file is longer than what is read whole.
    """
    held: list[str] = []
    size, is_long = 0, False
    most = MOST if skip is None else LONGEST
    for part in text:
        *lines, rest = part.split("\n")
        for line in lines:
            yield "" if is_long else "".join([*held, line])
            held, size, is_long = [], 0, False
        held.append(rest)
        size += len(rest)
        if size <= most:
            continue
        problem = f"{name} has a line of over {most:,} characters"
        if skip is None:
            raise SinkscopeError(f"{problem}: give a file of shorter ones")
        if not is_long:
            skip(f"{problem}, which is not read")
        held, is_long = [], True
    yield "" if is_long else "".join(held)


def _rest_of(lines: Iterable[tuple[int, str]], name: str) -> list[tuple[int, str]]:
    """All other lines of a file.

    Raises:
        SinkscopeError: They are longer than what is read whole.
    """
    rest: list[tuple[int, str]] = []
    size = 0
    for place, line in lines:
        rest.append((place, line))
        size += len(line)
        if size > MOST:
            raise SinkscopeError(f"{name} is longer than {MOST:,} characters and no JSON lines: give a shorter file")
    return rest


def _rows(
    lines: Iterator[tuple[int, str]], form: StreamForm, name: str, skip: Skip, whole: bool
) -> Iterator[tuple[int, Any]]:
    """The values in lines of JSON or in events, each with its number: a list is a value for each item."""
    if form == "sse":
        yield from _rows_of_events(lines, name, skip)
        return
    for place, line in lines:
        try:
            values = values_in(line)
        except UNREADABLE as error:
            rest = _rest_of(lines, name) if whole else []
            try:  # one value on several lines
                values = values_in("\n".join([line, *(later for _, later in rest)]))
            except UNREADABLE:
                skip(_problem(name, place, error, line))
                yield from _rows(iter(rest), form, name, skip, False)
                continue
        whole = whole and not values
        yield from enumerate(values, place)


def _rows_of_events(lines: Iterator[tuple[int, str]], name: str, skip: Skip) -> Iterator[tuple[int, Any]]:
    """The values in events, each with the number of the line where it began."""
    events, begun = Events(), 1
    for place, line in chain(lines, [(0, "")]):
        for data in events.add(line.strip("\n")):
            try:
                for value in values_of_event(data):
                    yield begun, value
            except UNREADABLE as error:
                skip(_problem(name, begun, error, data))
        begun = begun if line else place + 1


def values_in(text: str) -> list[Any]:
    """Return the values in a line of JSON or in the data of an event: of a list, which is no chat, its items.

    Raises:
        ValueError: It is not JSON.
    """
    data = text.strip()
    if data in ("", "[DONE]"):
        return []
    if _NOT_DECODED.search(data):
        raise ValueError("it is not UTF-8")
    value = parse_json(data)
    if not isinstance(value, list):
        return [value]
    if value and messages_in(value) is not None:
        return [{"messages": value}]
    return value


def values_of_event(data: str) -> list[Any]:
    """Return the values in the data of an event: JSON, or a text that does not begin as JSON does.

    Raises:
        ValueError: It begins as JSON and is none.
    """
    if data.lstrip()[:1] in ("{", "[", ""):
        return values_in(data)
    return [data]


def _problem(name: str, place: int, error: Exception, line: str) -> str:
    return f"{name} line {place} is no output of a model: {error}; it is {on_one_line(line)}"


class AnswerIds:
    """Tells ids of answers from those of chunks: some servers give each chunk a new id.

    A chunk without text belongs to the answer before it, whatever its id: some servers send one behind the end.
    """

    def __init__(self) -> None:
        self._seen: dict[Any, None] = {}
        self._first: str | None = None  # of the last chunks, while each has another one
        self._last: str | None = None  # of the last chunk

    def settled(self, row: Any) -> Any:
        """Return a line; if it and the one before have new ids, and no answer ended between, with the id of that."""
        if not isinstance(row, dict) or "choices" not in row or not row.get("id"):
            return row
        own = str(row["id"])
        if own in self._seen:
            self._first, self._last = None, own
            return row
        choices = [*(row["choices"] or ())]
        if self._last is not None and not any(map(_has_text, choices)):
            settled = self._first or self._last
            if not all(map(_goes_on, choices)):
                self._first = None
            return {**row, "id": settled}
        self._seen[own] = None
        if len(self._seen) > KEPT_IDS:
            del self._seen[next(iter(self._seen))]
        first, goes_on = self._first, all(map(_goes_on, choices))
        self._first = None
        if goes_on:
            self._first = first or own
        self._last = first or own
        return {**row, "id": self._last}


def _has_text(choice: Any) -> bool:
    """Whether a choice holds anything beside its place and its end."""
    if not isinstance(choice, dict) or "message" in choice:
        return True
    delta = choice.get("delta") or {"text": choice.get("text")}
    return not isinstance(delta, dict) or any(value for name, value in delta.items() if name != "role")


def _goes_on(choice: Any) -> bool:
    """Whether a choice is a piece of an answer that does not end there."""
    return isinstance(choice, dict) and "message" not in choice and not forms.has_ended(choice.get("finish_reason"))
