"""A proxy between a client and a server of models that ends answers which loop; `sinkscope loops --proxy` runs it.

It needs starlette, uvicorn, httpx and prometheus-client, and no torch.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible
from sinkscope.files.provenance import install_command
from sinkscope.loops.servers.answers import TOO_LONG, StreamWatch, asked_in
from sinkscope.loops.servers.counts import Counts, own_pages
from sinkscope.loops.text.monitor import Settings

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response

NEEDS = ("starlette", "uvicorn", "httpx", "httpx_sse", "prometheus_client")
LOOPBACK = ("127.0.0.1", "localhost")
READABLE = re.compile(r"text/(event-stream|plain|x-ndjson)|application/([\w.+-]*json[\w.+-]*|octet-stream|x-ndjson)")
"""Types of bodies that may hold an answer; what it is, its first line says."""
PACKINGS = {"identity": "", "": "", "gzip": "", "x-gzip": "", "deflate": "", "br": "brotli", "zstd": "zstandard"}
"""Packings that httpx unpacks, and the package that each needs."""
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    "transfer-encoding upgrade".split()
)


def application(
    upstream: str,
    monitor: Settings,
    log: Callable[[str], object],
    hosts: tuple[str, ...] = LOOPBACK,
    told: Callable[[dict[str, Any]], object] | None = None,
) -> Any:
    """Return the ASGI application: it answers /metrics and /health itself, and passes all other paths on.

    Args:
        upstream: Address of the server, such as http://127.0.0.1:11434.
        monitor: Settings of the monitor.
        log: Called with a line for each answer that was cut, was passed on although it repeats itself, or was passed
            on unwatched; it has no content.
        hosts: Names by which clients may call it; empty for any.
        told: Called with the JSON of each answer that was cut or repeats itself, in place of `log`.

    Raises:
        SinkscopeError: The address is none, or a package is missing.
    """
    _check(upstream)
    import httpx
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.routing import Route

    waits = httpx.Timeout(None, connect=30)  # a server may think for long
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    client = httpx.AsyncClient(limits=limits, timeout=waits, trust_env=False, follow_redirects=False)
    passing = _Passing(client, httpx.URL(upstream), monitor, log, told)
    middleware: list[Middleware] = []
    if hosts:  # another site cannot reach the server through a name of its own that leads to this machine
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)))
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    pages = own_pages(client, passing.server, passing.counts)
    return Starlette(routes=[*pages, Route("/{path:path}", passing.forward, methods=methods)], middleware=middleware)


@dataclass(frozen=True, eq=False)
class _Passing:
    """Passes requests on to a server, and watches the answers; the fields are those of `application`."""

    client: httpx.AsyncClient
    server: httpx.URL
    monitor: Settings
    log: Callable[[str], object]
    told: Callable[[dict[str, Any]], object] | None
    counts: Counts = field(default_factory=Counts)

    async def forward(self, request: Request) -> Response:
        """Answer as the server does; an answer that loops ends there."""
        import httpx

        path: bytes = request.scope["raw_path"]
        if leaves_folder(path):
            return _problem("a path with . or .. is not passed on", 400)
        content = await request.body()
        try:
            answer = await self.client.send(self._request(request, content), stream=True)
        except httpx.HTTPError as error:
            return _problem(f"the server does not answer: {type(error).__name__}", 502)
        name = f"{request.method} {visible(path.decode('ascii', 'replace'))[:80]}"
        if request.method != "POST" or not answer.is_success:  # no answer of a model
            return _as_sent(answer, _parts(answer))
        unread = why_unread(answer.headers)
        if unread:
            self.pass_unwatched(name, unread)
            return _as_sent(answer, _parts(answer))
        watch = StreamWatch(self.monitor, asked=asked_in(content))
        return _as_sent(answer, self._watched(answer, watch, name), without=("content-length", "content-encoding"))

    async def _watched(self, answer: httpx.Response, watch: StreamWatch, name: str) -> AsyncIterator[bytes]:
        """The bytes of an answer, unpacked, until it ends or loops; the server's call ends with them, too."""
        import httpx

        try:
            async for part in answer.aiter_bytes():
                yield watch.feed(part)
                if watch.alarm is not None:
                    yield watch.ending()
                    return
            yield watch.end()
        except httpx.HTTPError as error:  # the client's connection breaks as the server's did
            self.counts.broken.labels(self.counts.name_of(watch.model)).inc()
            self.log(f"{name}: the server broke off, {type(error).__name__}")
            raise
        finally:  # also if the client leaves
            self.count(name, watch)
            await answer.aclose()

    def pass_unwatched(self, name: str, reason: str) -> None:
        """Count and log an answer, or a part of one, that was passed on unwatched."""
        self.counts.unwatched.labels(reason).inc()
        self.log(f"{name}: passed on unwatched: {reason}")

    def count(self, name: str, watch: StreamWatch) -> None:
        """Count an answer that has ended, and report one that was cut or repeats itself."""
        if watch.unread:
            self.pass_unwatched(name, watch.unread)
        if watch.unread and watch.unread != TOO_LONG:
            return
        report = watch.report()
        if report is None:
            self.counts.answer(watch.model)
            return
        self.counts.answer(watch.model, report["verdict"], report["cut"], report["saved"])
        if self.told is not None:
            self.told({**report, "request": name})
        else:
            self.log(f"{name}: {_said(report, watch.is_whole)}")

    def _request(self, request: Request, content: bytes) -> httpx.Request:
        """The request to the server, with the path as it was given, escapes too."""
        headers = _passed_on(request.headers.raw, without=("host", "content-length", "accept-encoding"))
        headers.append((b"accept-encoding", b"identity"))  # the proxy has to read the answer
        path: bytes = request.scope["raw_path"]
        query = b"?" * bool(request.url.query) + request.scope["query_string"]
        url = self.server.copy_with(raw_path=self.server.raw_path.rstrip(b"/") + path + query)
        return self.client.build_request(request.method, url, headers=headers, content=content)


def _problem(what: str, status: int) -> Response:
    """An answer of the proxy itself."""
    from starlette.responses import JSONResponse

    return JSONResponse({"error": {"message": f"sinkscope: {what}", "type": "proxy_error"}}, status)


def _check(upstream: str) -> None:
    """Refuse what is no address, or a missing package."""
    for name in NEEDS:
        if find_spec(name) is None:
            raise SinkscopeError(f"--proxy needs {name}: {install_command('proxy')}")
    if not re.fullmatch(r"https?://[^/?#@\s]+[^?#@\s]*", upstream):
        raise SinkscopeError(f"--proxy {upstream}: expected the address of a server, such as http://127.0.0.1:11434")


def _said(report: dict[str, Any], is_whole: bool) -> str:
    """What the log says about an answer."""
    if report["cut"]:
        return f"a loop at token {report['token']}; cut"
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
    """Headers for the other side: without those of one connection, and without some."""
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        word = name.decode("latin-1").lower()
        if word not in _HOP_BY_HOP and word not in without:
            kept.append((word.encode("latin-1"), value))
    return kept
