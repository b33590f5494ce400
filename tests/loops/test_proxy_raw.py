"""Requests that no client sends, byte by byte over a socket: the proxy answers in HTTP, and then serves as before."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from served import LOCAL, served

from sinkscope.loops import MonitorSettings
from sinkscope.loops.servers.proxy import application

HOST = b"Host: 127.0.0.1\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"


class Echo:
    """A server that says what arrived."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bytes, dict[bytes, bytes], bytes]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        self.seen.append((scope["method"], scope["raw_path"], dict(scope["headers"]), body))
        headers = [(b"content-type", b"text/plain"), (b"connection", b"x-own"), (b"x-own", b"1"), (b"x-kept", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": scope["raw_path"]})


@pytest.fixture(scope="module")
def proxy() -> Iterator[SimpleNamespace]:
    echo = Echo()
    with served(echo) as direct, served(application(direct, MonitorSettings(), lambda _: None)) as address:
        yield SimpleNamespace(address=address, echo=echo)


def sent(address: str, data: bytes, wait: float = 5.0) -> bytes:
    """What comes back until the connection is closed, or nothing comes for a while."""
    place = urlsplit(address)
    with socket.create_connection((place.hostname, place.port), timeout=wait) as connection:
        connection.sendall(data)
        got = b""
        try:
            while part := connection.recv(1 << 16):
                got += part
        except (TimeoutError, ConnectionResetError):
            got += b"<open>"
        return got


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


ATTACKS = {
    b"GET /a#frag HTTP/1.1\r\n": 400,
    b"GET /a%23frag HTTP/1.1\r\n": 200,
    b"GET /a%0d%0ab HTTP/1.1\r\n": 200,
    b"GET /a%0d%0aX-Own:%201 HTTP/1.1\r\n": 200,
    b"GET /a%00b HTTP/1.1\r\n": 200,
    b"GET /%ff%fe HTTP/1.1\r\n": 200,
    b"GET //evil.example/x HTTP/1.1\r\n": 200,
    b"GET /metrics%0a HTTP/1.1\r\n": 200,
    b"GET /.%2e/x HTTP/1.1\r\n": 400,
    b"GET /..%2f..%2fx HTTP/1.1\r\n": 400,
    b"GET /x/%252e%252e/y HTTP/1.1\r\n": 200,
    b"TRACE /x HTTP/1.1\r\n": 405,
    b"BREW /x HTTP/1.1\r\n": 405,
    b"GET /x HTTP/1.1\r\nHost: evil.example\r\n": 400,
    b"GET /x HTTP/1.1\r\nX-A: b\r\n c\r\n": (200, 400),
    b"GET /x HTTP/1.1\r\nContent-Length: -1\r\n": 400,
    b"GET /x HTTP/1.1\r\nContent-Length: 1, 2\r\n": 400,
    b"GET /x HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n": (0, 400),
    b"GET /x HTTP/1.1\r\nTransfer-Encoding: gzip\r\n": (400, 501),
    b"GET /x HTTP/1.1\r\nX A: b\r\n": 400,
    b"GET /x HTTP/9.9\r\n": (0, 200, 400, 505),
    b"GET http://evil.example/x HTTP/1.1\r\n": 400,
    b"GET x HTTP/1.1\r\n": 400,
    b"GET * HTTP/1.1\r\n": 400,
    b"\x16\x03\x01\x02\x00\x01\x00\r\n": 400,
    b"nothing\r\n": 400,
    b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\n": (400, 414, 431),
    b"GET /x HTTP/1.1\r\nX-Long: " + b"a" * 200_000 + b"\r\n": (400, 431),
}


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: repr(attack[:40]))
def test_a_strange_request_has_an_answer_or_a_closed_connection(attack, proxy):
    head = attack if b"\r\nHost:" in attack else attack + HOST
    expected = ATTACKS[attack]
    got = sent(proxy.address, head + b"Connection: close\r\n\r\n", wait=2.0)
    assert status(got) in ((expected,) if isinstance(expected, int) else expected), got[:200]
    assert b"Traceback" not in got
    assert httpx.get(f"{proxy.address}/fine", **LOCAL).content == b"/fine"


@pytest.mark.parametrize(
    "path", [b"/a%0d%0ab", b"/a%00b", b"/%ff%fe", b"/x/%252e%252e/y", b"/metrics/", b"/m%C3%BC//x/"]
)
def test_a_path_arrives_as_it_was_sent(path, proxy):
    got = sent(proxy.address, b"GET " + path + b" HTTP/1.1\r\n" + HOST + b"Connection: close\r\n\r\n")
    assert b"\r\n" + path + b"\r\n" in got and proxy.echo.seen[-1][1] == path


def test_headers_that_connection_names_stay_on_their_side(proxy):
    own = b"Connection: close, X-Secret ,x-other\r\nX-Secret: 1\r\nX-Other: 2\r\nKeep-Alive: 3\r\nX-Kept: 4\r\n"
    got = sent(proxy.address, b"GET /x HTTP/1.1\r\n" + HOST + own + b"\r\n")
    headers = proxy.echo.seen[-1][2]
    assert b"x-kept" in headers and not {b"x-secret", b"x-other", b"keep-alive"} & headers.keys()
    head = got.partition(b"\r\n\r\n")[0].lower()
    assert b"x-kept: 2" in head and b"x-own" not in head


def test_two_lengths_end_the_connection(proxy):
    """RFC 9112, section 6.1: else the bytes behind could be another request for one of the two."""
    hidden = b"GET /hidden HTTP/1.1\r\n" + HOST + b"\r\n"
    lengths = b"Content-Length: 6\r\n" + CHUNKED
    seen = len(proxy.echo.seen)
    got = sent(proxy.address, b"POST /x HTTP/1.1\r\n" + HOST + lengths + b"\r\n0\r\n\r\n" + hidden)
    assert not got.endswith(b"<open>") and b"connection: close" in got.lower()
    assert [one[1] for one in proxy.echo.seen[seen:]] in ([], [b"/x"])
    alone = sent(proxy.address, b"POST /x HTTP/1.1\r\n" + HOST + CHUNKED + b"\r\n0\r\n\r\n", wait=1.0)
    assert alone.endswith(b"<open>")  # a request like any other


def test_half_a_request_holds_nobody_up(proxy):
    place = urlsplit(proxy.address)
    open_ones = []
    for head in (
        b"",
        b"POST",
        b"POST /x HTTP/1.1\r\n" + HOST,
        b"POST /x HTTP/1.1\r\n" + HOST + b"Content-Length: 9\r\n\r\nx",
    ):
        for _ in range(25):
            connection = socket.create_connection((place.hostname, place.port))
            connection.sendall(head)
            open_ones.append(connection)
    assert httpx.get(f"{proxy.address}/fine", timeout=5, **LOCAL).content == b"/fine"
    for connection in open_ones:
        connection.close()
    assert httpx.get(f"{proxy.address}/fine", timeout=5, **LOCAL).content == b"/fine"


def test_bytes_at_random_change_nothing(proxy):
    generator = random.Random(0)
    whole = (
        b"POST /x HTTP/1.1\r\n"
        + HOST
        + b"Content-Type: application/json\r\nContent-Length: 17\r\n\r\n"
        + b'{"stream": false}'
    )
    for _ in range(60):
        data = bytearray(whole)
        for _ in range(generator.choice((1, 2, 5))):
            at = generator.randrange(len(data))
            data[at : at + generator.choice((0, 1, 3))] = generator.randbytes(generator.choice((0, 1, 2)))
        sent(proxy.address, bytes(data), wait=0.05)
    assert httpx.get(f"{proxy.address}/fine", **LOCAL).content == b"/fine"
