"""A proxy between a client and a server of models that ends answers which loop; `sinkscope loops --proxy` runs it.

It needs the packages of the extra `proxy`, and no torch.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible
from sinkscope.files.provenance import install_command
from sinkscope.loops.servers.answers import NOTHING_ASKED, TOO_LONG, StreamWatch, Work, asking
from sinkscope.loops.servers.continued import GoOnWatch, Written
from sinkscope.loops.servers.counts import Counts, own_pages
from sinkscope.loops.servers.ways import Request as Asking
from sinkscope.loops.servers.ways import Server, assistant_text, continuation, request_of
from sinkscope.loops.servers.whole import WholeAnswer, as_stream
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.pieces import REASONING, TEXT

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
NEEDS = ("ijson", "starlette", "uvicorn", "httpx", "httpx_sse", "prometheus_client")
LOOPBACK = ("127.0.0.1", "localhost")
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
TURN = 0.005
"""Seconds of work on an answer after which others act."""
MOST_BODY = 1 << 24
"""Bytes of a request that are held; of a longer one, the limits and the prompt are not known."""
READABLE = re.compile(r"text/(event-stream|plain|x-ndjson)|application/([\w.+-]*json[\w.+-]*|octet-stream|x-ndjson)")
"""Types of bodies that may hold an answer; what it is, its first line says."""
PACKINGS = {"identity": "", "": "", "gzip": "", "x-gzip": "", "deflate": "", "br": "brotli", "zstd": "zstandard"}
"""Packings that httpx unpacks, and the package that each needs."""
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    "transfer-encoding upgrade".split()
)


@dataclass(frozen=True)
class GoOn:
    """How answers that loop go on.

    Attributes:
        server: The server, and how it continues.
        whole: Whether answers that are not streamed are asked for as streams, so that they are watched, too.
    """

    server: Server
    whole: bool = False


def application(
    upstream: str,
    monitor: Settings,
    log: Callable[[str], object],
    hosts: tuple[str, ...] = LOOPBACK,
    told: Callable[[dict[str, Any]], object] | None = None,
    go_on: GoOn | None = None,
) -> Any:
    """Return the ASGI application: it answers /metrics and /health itself, and passes all other paths on.

    Args:
        upstream: Address of the server, such as http://127.0.0.1:11434.
        monitor: Settings of the monitor.
        log: Called with a line for each answer that was cut, was passed on although it repeats itself, or was passed
            on unwatched; it has no content.
        hosts: Names by which clients may call it; empty for any.
        told: Called with the JSON of each answer that was cut or repeats itself, in place of `log`.
        go_on: How answers that loop are continued; None: they end.

    Raises:
        SinkscopeError: The address is none, or a package is missing.
    """
    check_upstream(upstream)
    import httpx
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    waits = httpx.Timeout(None, connect=30)  # a server may think for long
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    client = httpx.AsyncClient(limits=limits, timeout=waits, trust_env=False, follow_redirects=False)
    passing = _Passing(client, httpx.URL(upstream), monitor, log, told, go_on)
    middleware: list[Middleware] = []
    if hosts:  # another site cannot reach the server through a name of its own that leads to this machine
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)))
    app = Starlette(routes=own_pages(client, passing.server, passing.counts), middleware=middleware)
    app.router.default, app.router.redirect_slashes = passing, False  # a route would not take every path
    return app


@dataclass(frozen=True, eq=False)
class _Passing:
    """Passes requests on to a server, and watches the answers; the fields are those of `application`."""

    client: httpx.AsyncClient
    server: httpx.URL
    monitor: Settings
    log: Callable[[str], object]
    told: Callable[[dict[str, Any]], object] | None
    go_on: GoOn | None = None
    counts: Counts = field(default_factory=Counts)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request, as an ASGI application."""
        from starlette.requests import Request

        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        request = Request(scope, receive)
        response = await self.forward(request)
        if {"transfer-encoding", "content-length"}.issubset(request.headers.keys()):  # RFC 9112, 6.1: two lengths
            response.headers["connection"] = "close"
        await response(scope, receive, send)

    async def forward(self, request: Request) -> Response:
        """Answer as the server does; an answer that loops ends there."""
        import httpx
        from starlette.requests import ClientDisconnect

        path: bytes = request.scope["raw_path"]
        refused = _refused(request.method, path)
        if refused is not None:
            return refused
        try:
            content, rest = await _body(request)
            asked, is_whole = None, False
            if self.go_on is not None and request.method == "POST" and rest is None:
                asked = request_of(unquote(path.decode("latin-1")), content)
                streamed = as_stream(asked, self.go_on.server) if asked is not None and self.go_on.whole else None
                if asked is not None and streamed is not None:
                    is_whole, content, asked = True, streamed, request_of(asked.path, streamed)
            answer = await self.client.send(self._request(request, content, rest), stream=True)
        except httpx.HTTPError as error:
            return _problem(f"the server does not answer: {type(error).__name__}", 502)
        except httpx.InvalidURL as error:
            return _problem(f"the path cannot be passed on: {error}", 400)
        except ClientDisconnect:
            return _problem("the request was not sent to its end", 400)
        name = f"{request.method} {visible(path.decode('ascii', 'replace'))[:80]}"
        if request.method != "POST" or not answer.is_success:  # no answer of a model
            return _as_sent(answer, _parts(answer))
        unread = why_unread(answer.headers)
        if unread:
            self.pass_unwatched(name, unread)
            return _as_sent(answer, _parts(answer))
        known = NOTHING_ASKED if rest is not None else await in_turns(asking(content))
        watch = StreamWatch(self.monitor, asked=known)
        if self.go_on is not None and asked is not None and not asked.why_never():
            watch = GoOnWatch(self.monitor, known, server=self.go_on.server)
        parts = self._watched(answer, watch, name, partial(self._continuation, request, asked))
        if is_whole:
            return await _as_whole(answer, parts)
        return _as_sent(answer, parts, without=("content-length", "content-encoding"))

    async def _watched(
        self,
        answer: httpx.Response,
        watch: StreamWatch,
        name: str,
        go_on: Callable[..., Awaitable[httpx.Response | None]],
    ) -> AsyncIterator[bytes]:
        """The bytes of an answer, unpacked, until it ends or loops; the server's call ends with them, too.

        Args:
            answer: The answer.
            watch: Watches it.
            name: Name of the request, for the log.
            go_on: Asks for the continuation of what is written.
        """
        import httpx

        try:
            while True:
                async for part in answer.aiter_bytes():
                    yield await in_turns(watch.feeding(part))
                    if watch.alarm is not None:
                        break
                if watch.alarm is None:
                    yield await in_turns(watch.rest())
                    return
                if not isinstance(watch, GoOnWatch) or watch.has_calls or watch.is_spent:
                    yield watch.flush() if isinstance(watch, GoOnWatch) else b""
                    yield watch.ending()
                    return
                await answer.aclose()
                started = time.perf_counter()
                passed, written = watch.seam(self._closing(watch))
                yield passed
                following = await go_on(written)
                if following is None:
                    yield watch.ending()
                    return
                answer = following
                yield watch.comment()
                self.count(name, watch, written, time.perf_counter() - started)
                watch = GoOnWatch(self.monitor, watch.asked, written, watch.server)
        except httpx.HTTPError as error:  # the client's connection breaks as the server's did
            self.counts.broken.labels(self.counts.name_of(watch.model)).inc()
            self.log(f"{name}: the server broke off, {type(error).__name__}")
            raise
        finally:  # also if the client leaves
            self.count(name, watch)
            await answer.aclose()

    def _closing(self, watch: GoOnWatch) -> str:
        """What closes the reasoning in which an answer loops; empty outside of one, or where it was closed before."""
        end = "" if self.go_on is None else self.go_on.server.reasoning_end
        return end if watch.in_reasoning and not watch.before.closed else ""

    async def _continuation(self, request: Request, asked: Asking | None, written: Written) -> httpx.Response | None:
        """The server's continuation of what is written; None if it gives none."""
        import httpx

        if asked is None or self.go_on is None:
            return None
        text = assistant_text(written.texts.get(TEXT, ""), written.texts.get(REASONING, ""), self.go_on.server)
        next_request = continuation(self.go_on.server, asked, text, written.pieces)
        if next_request is None:
            return None
        path, body = next_request
        try:
            answer = await self.client.send(self._request(request, body, path=path.encode()), stream=True)
        except httpx.HTTPError as error:
            self.log(f"{path}: not continued, the server does not answer: {type(error).__name__}")
            return None
        if answer.is_success and not why_unread(answer.headers):
            return answer
        await answer.aclose()
        self.log(f"{path}: not continued, the server answers with status {answer.status_code}")
        return None

    def pass_unwatched(self, name: str, reason: str) -> None:
        """Count and log an answer, or a part of one, that was passed on unwatched."""
        self.counts.unwatched.labels(reason).inc()
        self.log(f"{name}: passed on unwatched: {reason}")

    def count(self, name: str, watch: StreamWatch, written: Written | None = None, seconds: float = 0.0) -> None:
        """Count an answer that has ended, or goes on, and report one that was cut or repeats itself.

        Args:
            name: Name of the request.
            watch: What watched it.
            written: What the client has got, if the answer goes on.
            seconds: Time until the continuation began.
        """
        if written is not None:
            before = watch.before if isinstance(watch, GoOnWatch) else Written()
            is_closed = written.closed and not before.closed
            self.counts.going_on(watch.model, is_closed, written.dropped - before.dropped, seconds)
        if watch.unread:
            self.pass_unwatched(name, watch.unread)
        if watch.unread and watch.unread != TOO_LONG:
            return
        report = watch.report()
        if report is None:
            self.counts.answer(watch.model)
            return
        if written is not None:
            report |= {"cut": False, "saved": None, "continued": True, "dropped": written.dropped}
        self.counts.answer(watch.model, report["verdict"], report["cut"], report["saved"])
        if self.told is not None:
            self.told({**report, "request": name})
        else:
            self.log(f"{name}: {_said(report, watch.is_whole)}")

    def _request(
        self, request: Request, content: bytes, rest: AsyncIterator[bytes] | None = None, path: bytes | None = None
    ) -> httpx.Request:
        """The request to the server, with the path as it was given, escapes too, or with another path."""
        headers = _passed_on(request.headers.raw, without=("host", "accept-encoding"))
        headers.append((b"accept-encoding", b"identity"))  # the proxy has to read the answer
        sent: bytes = path or request.scope["raw_path"]
        query = b"?" * bool(request.url.query) + request.scope["query_string"]
        url = self.server.copy_with(raw_path=self.server.raw_path.rstrip(b"/") + sent + query)
        if rest is None:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            return self.client.build_request(request.method, url, headers=headers, content=content)
        return self.client.build_request(request.method, url, headers=headers, content=_joined(content, rest))


async def in_turns(work: Work[T]) -> T:
    """Do some work and return its result; whenever it has taken `TURN` seconds, others act."""
    begin = time.perf_counter()
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value
        if time.perf_counter() - begin > TURN:
            await asyncio.sleep(0)
            begin = time.perf_counter()


async def _body(request: Request) -> tuple[bytes, AsyncIterator[bytes] | None]:
    """The body of a request; of one that is longer than `MOST_BODY` the beginning, and what follows."""
    parts, content = request.stream(), bytearray()
    async for part in parts:
        content += part
        if len(content) > MOST_BODY:
            return bytes(content), parts
    return bytes(content), None


async def _joined(content: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield content
    async for part in rest:
        yield part


def _refused(method: str, path: bytes) -> Response | None:
    """The answer to a request that is not passed on; None if it is."""
    if method not in METHODS:
        return _problem(f"the method {visible(method):.20} is not passed on", 405)
    if leaves_folder(path):
        return _problem("a path with . or .. is not passed on", 400)
    if not path.startswith(b"/") or b"#" in path:
        return _problem("only a path that begins with / and has no # is passed on: write %23 for it", 400)
    return None


def _problem(what: str, status: int) -> Response:
    """An answer of the proxy itself."""
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": f"sinkscope: {what}", "type": "proxy_error"}}, status)


def check_upstream(upstream: str) -> None:
    """Refuse what is no address of a server, or a missing package.

    Raises:
        SinkscopeError: It is none, or one is missing.
    """
    for name in NEEDS:
        if find_spec(name) is None:
            raise SinkscopeError(f"--proxy needs {name}: {install_command('proxy')}")
    if not re.fullmatch(r"https?://[^/?#@\s]+[^?#@\s]*", upstream):
        raise SinkscopeError(f"--proxy {upstream}: expected the address of a server, such as http://127.0.0.1:11434")


def _said(report: dict[str, Any], is_whole: bool) -> str:
    """What the log says about an answer."""
    where = "" if report["channel"] == TEXT else f" of its {report['channel']}"
    if report.get("continued"):
        return f"a loop at token {report['token']}{where}; {report['dropped']} tokens dropped, and it goes on"
    if report["cut"]:
        return f"a loop at token {report['token']}{where}; cut"
    if report["verdict"] == "loops":
        why = "; passed on, because the answer is not streamed" if is_whole else " in one of several outputs; passed on"
        return f"a loop at token {report['token']}{why}"
    return f"a repetition at token {report['token']} that may be honest; passed on"


async def _parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The bytes of an answer as they were sent; the call of the server ends with them, or if the client leaves."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


async def _as_whole(answer: httpx.Response, parts: AsyncIterator[bytes]) -> Response:
    """The whole answer that a stream makes; an error in the stream has the status of a server that fails."""
    from starlette.responses import Response as Plain

    whole = WholeAnswer()
    async for part in parts:
        whole.feed(part)
    status, body = answer.status_code, whole.whole()
    if whole.error is not None:
        status, body = 502, json.dumps(whole.error).encode()
    response = Plain(body, status)
    dropped = ("content-length", "content-encoding", "content-type")
    headers = _passed_on(answer.headers.raw, dropped)
    about = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    response.raw_headers = [*headers, *about]
    return response


def _as_sent(answer: httpx.Response, parts: AsyncIterator[bytes], without: tuple[str, ...] = ()) -> Response:
    """A response with the status and headers of the server's."""
    from starlette.responses import StreamingResponse

    response = StreamingResponse(parts, answer.status_code)
    response.raw_headers = _passed_on(answer.headers.raw, without)
    return response


def leaves_folder(path: bytes) -> bool:
    """Return whether a path as it was sent has segments that lead elsewhere, escaped or not."""
    segments = re.split(r"[/\\\\]", unquote(path.decode("latin-1")))
    return not {".", ".."}.isdisjoint(segments)


def why_unread(headers: Mapping[str, str]) -> str:
    """Return why the body of an answer cannot be read; empty if it can, by its type and its packing."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and not READABLE.fullmatch(kind):
        return "another type of content"
    for packing in headers.get("content-encoding", "identity").lower().split(","):
        module = PACKINGS.get(packing.strip())
        if module is None or (module and find_spec(module) is None):
            return "a packing that is not read"
    return ""


def _passed_on(headers: list[tuple[bytes, bytes]], without: tuple[str, ...] = ()) -> list[tuple[bytes, bytes]]:
    """Headers for the other side: not `without`, nor hop-by-hop headers, nor those that `Connection` names."""
    left_out = {*_HOP_BY_HOP, *without}
    for name, value in headers:
        if name.lower() == b"connection":
            left_out.update(word.strip().lower() for word in value.decode("latin-1").split(","))
    passed_on: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.decode("latin-1").lower() not in left_out:
            passed_on.append((name.lower(), value))
    return passed_on
