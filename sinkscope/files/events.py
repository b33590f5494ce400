"""Server-sent events and lines in bytes that arrive in pieces; time grows with the bytes. httpx-sse parses events."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from sinkscope.files.plain import parse_json

LONGEST = 1 << 24
"""Bytes of a line, or of an event, from which on it is not read."""
MOST_LINES = 4096
"""Lines of an event from which on it is not read."""
_HEADERS = {"content-type": "text/event-stream"}


class Line(NamedTuple):
    """A line, or a part of one that is too long.

    Attributes:
        raw: Its bytes, with its end.
        text: Its text without the end; None if it is too long, or only the second half of an end.
    """

    raw: bytes
    text: str | None


class Lines:
    """Splits bytes into lines as soon as they end, by CR, LF or both; bytes that are no UTF-8 become surrogates.

    Attributes:
        too_long: Number of lines that were not read.
    """

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0
        self._is_long = False
        self._after_cr = False
        self.too_long = 0

    @property
    def held(self) -> bytes:
        """Return the line that has not ended."""
        return b"".join(self._parts)

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yield the lines that bytes end."""
        if self._after_cr and data:
            self._after_cr = False
            if data[:1] == b"\n":
                yield Line(b"\n", None)
                data = data[1:]
        *lines, rest = data.replace(b"\r", b"\n").split(b"\n") if b"\r" in data else data.split(b"\n")
        place = 0
        for line in lines:
            end = place + len(line) + 1
            if data[place:end] == b"\n" and place and data[place - 1 : place] == b"\r":
                yield Line(b"\n", None)
            else:
                yield self._ended(data[place:end])
            place = end
        self._after_cr = not rest and data[-1:] == b"\r"
        if rest:
            self._parts.append(rest)
            self._size += len(rest)
        if self._size > LONGEST:
            self.too_long += not self._is_long
            self._is_long = True
            yield Line(self.held, None)
            self._parts, self._size = [], 0

    def end(self) -> Iterator[Line]:
        """Yield the last line, if no end follows it."""
        if self._parts:
            yield self._ended(b"")

    def _ended(self, last: bytes) -> Line:
        """The line that these bytes end."""
        raw = b"".join([*self._parts, last]) if self._parts else last
        is_long = self._is_long or len(raw) > LONGEST
        self.too_long += is_long and not self._is_long
        self._parts, self._size, self._is_long = [], 0, False
        return Line(raw, None if is_long else raw.rstrip(b"\r\n").decode("utf-8", "surrogateescape"))


class Events:
    """Joins lines to server-sent events, as the standard says, and gives their data.

    Where no blank line stands between events, each line of data that is an object of JSON is an event of its own.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._size = 0
        self._data = 0  # number of lines of data
        self._is_long = False  # whether the event is not read

    @property
    def begun(self) -> bool:
        """Return whether an event has begun and not ended."""
        return bool(self._lines)

    def add(self, line: str) -> list[str]:
        """Return the data of the events that a line ends."""
        if not line:
            return self.end()
        if self._is_long:
            return []
        ended: list[str] = []
        is_data = line.startswith("data")
        if is_data and self._data == 1 and _is_object(self._lines[-1]):
            ended = self.end()
        self._lines.append(line)
        self._data += is_data
        self._size += len(line)
        if self._size > LONGEST or len(self._lines) > MOST_LINES:
            self._lines, self._size, self._data, self._is_long = [], 0, 0, True
        return ended

    def end(self) -> list[str]:
        """Return the data of an event that a blank line ends."""
        lines, self._lines, self._size, self._data, self._is_long = self._lines, [], 0, 0, False
        if not any(line.startswith("data") for line in lines):
            return []
        if len(lines) == 1:  # the usual one, of which a long line is not copied
            name, _, data = lines[0].partition(":")
            return [data.removeprefix(" ")] if name == "data" else []
        import httpx
        from httpx_sse import EventSource

        content = "\n".join([*lines, "", ""]).encode("utf-8", "surrogateescape")
        content = content.decode("utf-8", "replace").encode()
        response = httpx.Response(200, headers=_HEADERS, content=content)
        return [event.data for event in EventSource(response).iter_sse()]


def _is_object(line: str) -> bool:
    """Whether a line of data is an object of JSON."""
    data = line.removeprefix("data:").strip()
    if data.startswith("{") and data.endswith("}"):
        with suppress(ValueError):
            return isinstance(parse_json(data), dict)
    return False
