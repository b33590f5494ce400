"""What a proxy reads of a body: events on several lines, packings, types, statuses; and what it passes on unwatched."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import brotli
import httpx
import pytest
import zstandard
from loop_texts import prose
from served import LOCAL, served
from server_streams import chat_chunk, events
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sinkscope.files import events as event_reader
from sinkscope.loops import MonitorSettings
from sinkscope.loops.servers.answers import StreamWatch
from sinkscope.loops.servers.proxy import application

LOOPING = "I went home and slept well. " * 60
FINE = prose(120)
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
}


def stream_of(text: str, indent: int | None = None) -> bytes:
    """Chunks of a chat; with `indent` each event has its data on several lines."""
    if indent is None:
        return events([chat_chunk(f"{word} ") for word in text.split()]).encode()
    sent = ""
    for word in text.split():
        data = json.dumps(chat_chunk(f"{word} "), indent=indent).split("\n")
        sent += "".join(f"data: {line}\n" for line in data) + "\n"
    return sent.encode()


class Upstream:
    """A server that answers what it is told to; the query says with which headers and status."""

    def __init__(self) -> None:
        self.body = b""

    async def answer(self, request: Request) -> Response:
        given = dict(request.query_params)
        status, dies = int(given.pop("status", 200)), given.pop("dies", "")
        headers = {name.replace("_", "-"): value for name, value in given.items()}

        async def parts() -> Any:
            for place in range(0, len(self.body), 500):
                yield self.body[place : place + 500]
                await asyncio.sleep(0)
            if dies:
                raise ConnectionResetError

        return StreamingResponse(parts(), status, headers)


@pytest.fixture(scope="module")
def plain() -> Iterator[SimpleNamespace]:
    """A proxy before such a server, and its log."""
    upstream, log = Upstream(), list[str]()
    app = Starlette(routes=[Route("/{path:path}", upstream.answer, methods=["POST", "GET"])])
    with served(app) as direct, served(application(direct, MonitorSettings(), log.append)) as address:
        yield SimpleNamespace(address=address, upstream=upstream, log=log)


def ask(plain: SimpleNamespace, body: bytes, **given: Any) -> httpx.Response:
    plain.upstream.body = body
    plain.log.clear()
    return httpx.post(f"{plain.address}/v1/x", params=given, json={}, timeout=60, **LOCAL)


@pytest.mark.parametrize("packing", PACKED)
def test_packed_streams_are_watched_and_arrive_unpacked(packing, plain):
    about = {"content_encoding": packing, "content_type": "text/event-stream"}
    answer = ask(plain, PACKED[packing](stream_of(FINE)), **about)
    assert answer.content == stream_of(FINE) and "content-encoding" not in answer.headers and plain.log == []
    answer = ask(plain, PACKED[packing](stream_of(LOOPING)), **about)
    assert b"repetition_detected" in answer.content and "cut" in plain.log[0]


@pytest.mark.parametrize(
    "about",
    [
        {"content_type": "application/json"},
        {"content_type": "text/plain; charset=utf-8"},
        {"content_type": "application/octet-stream"},
        {"content_type": "text/event-stream", "status": 201},
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("indent", [None, 1], ids=["a line", "several lines"])
def test_a_body_is_what_it_begins_as(about, indent, plain):
    answer = ask(plain, stream_of(FINE, indent), **about)
    assert answer.content == stream_of(FINE, indent) and answer.status_code == about.get("status", 200)
    answer = ask(plain, stream_of(LOOPING, indent), **about)
    assert answer.content.endswith(b"data: [DONE]\n\n") and b"repetition_detected" in answer.content
    assert len(answer.content) < len(stream_of(LOOPING, indent)) / 2 and "cut" in plain.log[0]


@pytest.mark.parametrize("text", [FINE, LOOPING])
def test_an_answer_that_is_not_streamed_is_judged_and_passed_on(text, plain):
    whole = json.dumps({"id": "c", "choices": [{"index": 0, "message": {"content": text}, "finish_reason": "stop"}]})
    answer = ask(plain, whole.encode(), content_type="application/json")
    assert answer.text == whole
    assert [line.split("; ")[-1] for line in plain.log] == (
        ["passed on, because the answer is not streamed"] if text == LOOPING else []
    )


UNWATCHED = {
    "not streamed": ({"content_type": "application/json"}, b'{\n "models": [1]\n}'),
    "another type of content": ({"content_type": "audio/mpeg"}, b"ID3\x00"),
    "a packing that is not read": ({"content_encoding": "compress"}, b"\x1f\x9d\x90"),
    "no event of a form that is known": (
        {"content_type": "text/event-stream"},
        b'data: {"type": "progress", "done": 3}\n\n',
    ),
}


@pytest.mark.parametrize("reason", UNWATCHED)
def test_what_cannot_be_read_is_passed_on_logged_and_counted(reason, plain):
    about, body = UNWATCHED[reason]
    before = count(plain.address, "unwatched_total", reason)
    with httpx.Client(**LOCAL) as client:
        plain.upstream.body = body
        plain.log.clear()
        with client.stream("POST", f"{plain.address}/v1/x", params=about, json={}) as answer:
            assert b"".join(answer.iter_raw()) == body
    assert plain.log == [f"POST /v1/x: passed on unwatched: {reason}"]
    assert count(plain.address, "unwatched_total", reason) == before + 1


def count(address: str, name: str, label: str) -> float:
    for line in httpx.get(f"{address}/metrics", **LOCAL).text.splitlines():
        if line.startswith(f"sinkscope_{name}{{") and f'"{label}"' in line:
            return float(line.rsplit(" ", 1)[1])
    return 0.0


@pytest.mark.parametrize("packing", ["", "gzip"])
def test_a_server_that_dies_ends_the_stream_in_the_same_way_and_is_counted(packing, plain):
    about = {"content_encoding": packing} if packing else {}
    plain.upstream.body = PACKED["gzip"](stream_of(FINE)) if packing else stream_of(FINE)
    before = count(plain.address, "broken_answers_total", "unknown")
    plain.log.clear()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(f"{plain.address}/v1/x", params={"dies": "1", **about}, json={}, **LOCAL)
    assert any("the server broke off" in line for line in plain.log)
    assert count(plain.address, "broken_answers_total", "unknown") == before + 1


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("size", [1, 7, 4096])
def test_events_on_several_lines_are_joined_however_they_arrive(end, size):
    data = stream_of(LOOPING, 1).replace(b"\n", end.encode())
    watch, passed = StreamWatch(MonitorSettings()), b""
    for place in range(0, len(data), size):
        passed += watch.feed(data[place : place + size])
        if watch.alarm is not None:
            break
    assert watch.alarm is not None and data.startswith(passed.rstrip(b"\r\n")) and len(passed) < len(data) / 2


def test_events_without_a_blank_line_between_are_read():
    data = stream_of(LOOPING).replace(b"\n\n", b"\n")
    watch = StreamWatch(MonitorSettings())
    passed = watch.feed(data)
    assert watch.alarm is not None and passed.endswith(b"}\n\n\n")


def test_a_line_that_is_too_long_is_passed_on_unread(monkeypatch):
    """Behind it the stream is watched as before."""
    monkeypatch.setattr(event_reader, "LONGEST", 1 << 16)
    line = b'data: {"x": "' + b"a" * (1 << 20) + b'"}\n\n'
    data = stream_of(FINE) + line + stream_of(LOOPING)
    watch, passed = StreamWatch(MonitorSettings()), b""
    for place in range(0, len(data), 1000):
        passed += watch.feed(data[place : place + 1000])
        assert len(watch.held) <= 1 << 16
        if watch.alarm is not None:
            break
    assert watch.alarm is not None and line in passed and data.startswith(passed.rstrip(b"\n"))
    watch = StreamWatch(MonitorSettings())
    watch.feed(stream_of(FINE) + b"data: " + b"a" * (1 << 17) + b"\n\n")
    watch.end()
    assert watch.unread == "a line above 16 MB"
