"""Inputs of `loops` that go on without the end of a line, or without saying what they are, are held up to a bound."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

import pytest
from loop_texts import prose
from refusals import refused

from sinkscope.loops.text import lines
from sinkscope.loops.text.check import check_file
from sinkscope.loops.text.streams import Watch

LOOP = "one more cup of tea, " * 40
GOOD = json.dumps({"text": LOOP}) + "\n"


class Endless:
    """Beginning, and then the same bytes for ever; it says how many were read."""

    def __init__(self, begin: bytes, more: bytes, most: int = 1 << 24):
        self._begin, self._more, self._most = begin, more, most
        self.read = 0

    def read1(self, size: int) -> bytes:
        part, self._begin = (self._begin or self._more * 64), b""
        self.read += len(part)
        return part if self.read < self._most else b""


@pytest.fixture
def short(monkeypatch) -> None:
    """Bounds that are reached soon."""
    monkeypatch.setattr(lines, "LONGEST", 1 << 15)
    monkeypatch.setattr(lines, "MOST", 1 << 17)


@pytest.mark.parametrize("size", [1 << 17, 1 << 18])
def test_a_long_line_of_a_stream_is_skipped_once_and_those_behind_it_are_read(size, short):
    source = io.BytesIO(f"{GOOD}{json.dumps({'text': 'y' * size})}\n{GOOD}".encode())
    watch = Watch()
    alarms = [alarm for alarm in watch.read(source, form="jsonl", whole=False) if alarm.cut]
    assert len(alarms) == 2 and watch.skipped == 1 and "characters, which is not read" in watch.problems[0]


def test_a_line_of_a_file_may_be_longer_and_has_a_bound_too(short):
    fine = f"{json.dumps({'text': LOOP, 'more': 'y' * (1 << 16)})}\n"
    assert check_file(io.BytesIO(fine.encode()), form="jsonl").records[0].verdict == "loops"
    with refused("has a line of over 131,072 characters: give a file of shorter ones"):
        check_file(io.BytesIO(fine.replace("yy", "yyyyyy").encode()), form="jsonl")
    with refused("is longer than 131,072 characters and no JSON lines"):
        check_file(io.BytesIO(("{\n" + f'"a": "{prose(20)}",\n' * 4000).encode()), form="jsonl")


BEGINNINGS = {
    "a line": (b'{"a": "', b"x" * 1000),
    "events": (b'data: {"a": "', b"x" * 1000),
    "comments": (b": hello\n", b": hello\n"),
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "blanks": (b" ", b" \n"),
}


@pytest.mark.parametrize("name", BEGINNINGS)
def test_an_input_that_does_not_say_what_it_is_is_not_kept(name, short):
    """What it is, is decided before 200 KB; then nothing of it is held."""
    source = Endless(*BEGINNINGS[name])
    form, text = lines._beginning(lines._decoded(source), "input")
    assert source.read < 200_000
    assert form in ("jsonl", "sse", "text") and isinstance(text, Iterator)
