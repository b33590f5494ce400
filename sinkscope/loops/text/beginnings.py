"""How an input begins: its form, which may be known only after headers and keep-alive lines; and its lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sinkscope.files.plain import parse_json
from sinkscope.loops.text.forms import EVENTS, UNREADABLE, StreamForm, pieces_of

MOST_BLANKS, MOST_BEFORE = 64, 4096  # bytes of white space in a line and in all, from which on they are a text
_HEADERS = "HTTP/"  # as curl -i writes them
_DATA = re.compile(r"data: ?\{")
_END = re.compile(rb"\r\n|\n|\r")


class Beginning(NamedTuple):
    """The form of an input, and what was read of it to learn the form; headers are left out."""

    form: StreamForm
    start: bytes


def beginning(source: Any, name: str) -> Beginning:
    """Read an input until its form is known.

    Args:
        source: The input, with `read1`.
        name: Its name. The text in a file with another ending than that of JSON may begin with any JSON.
    """
    start, has_events = b"", False
    while True:
        line, is_whole = _line(source)
        text = line.decode("utf-8-sig", "ignore").lstrip()
        kind = _kind_of(text) if is_whole else "other"
        if kind == "headers" and not has_events and not start.strip():
            start = b""
            _skip_headers(source, line)
            continue
        start += line
        if kind == "data":
            return Beginning("sse", start)
        if kind == "json" and not has_events and _is_output(text, name):
            return Beginning("jsonl", start)
        has_events = has_events or kind == "event"
        may_go_on = kind == "event" or (kind == "blank" and (has_events or len(start) < MOST_BEFORE))
        if not may_go_on:
            is_json = name.lower().removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson"))
            return Beginning("jsonl" if is_json else "text", start)


def _kind_of(text: str) -> Literal["headers", "json", "data", "event", "blank", "other"]:
    """What a whole line may be."""
    if not text:
        return "blank"
    if text.startswith(_HEADERS):
        return "headers"
    if text.startswith("{"):
        return "json"
    if _DATA.match(text):
        return "data"
    return "event" if text.startswith(EVENTS) else "other"


def _skip_headers(source: Any, line: bytes) -> None:
    """Read headers up to the empty line behind them."""
    while line.strip():
        line = source.readline()


def _is_output(text: str, name: str) -> bool:
    """Whether a line is the JSON of an output."""
    with suppress(*UNREADABLE):
        row = parse_json(text)
        return not Path(name).suffix or pieces_of(row, 1) is not None
    return False


def _line(source: Any) -> tuple[bytes, bool]:
    """Read a line, and whether it is whole: a text is read no further than needed to see that it is none of these."""
    line = b""
    while True:
        byte = source.read1(1)
        line += byte
        word = line.decode("utf-8-sig", "ignore").lstrip()
        if not byte or byte in b"\r\n":
            return line, bool(line)
        if word.startswith((_HEADERS, "{")):
            return line + source.readline(), True
        if word.startswith(EVENTS):
            while byte and byte not in b"\r\n":
                byte = source.read1(1)
                line += byte
            return line, True
        beginnings = (*EVENTS, _HEADERS)
        if len(line) > MOST_BLANKS or (word and not any(begin.startswith(word) for begin in beginnings)):
            return line, False


class LineSplitter:
    """Splits bytes that arrive in pieces into lines that end in LF, CR or both, as those of events may.

    Attributes:
        held: The line that is not complete.
    """

    def __init__(self) -> None:
        self.held = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, with their ends; between a CR and an LF there may be a line."""
        lines: list[bytes] = []
        self.held += data
        place = 0
        for end in _END.finditer(self.held):
            lines.append(self.held[place : end.end()])
            place = end.end()
        self.held = self.held[place:]
        return lines


def lines_of(source: Any, start: bytes) -> Iterator[bytes]:
    """Yield the lines of events as soon as they arrive, after what was read of them already."""
    splitter = LineSplitter()
    data = start or source.read1(1 << 16)
    while data:
        yield from splitter.feed(data)
        data = source.read1(1 << 16)
    if splitter.held:
        yield splitter.held
