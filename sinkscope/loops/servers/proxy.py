"""A proxy between a client and a server of models that ends answers which loop; `sinkscope loops --proxy` runs it.

It needs starlette, uvicorn and httpx, and no torch.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.loops.servers.endings import Ending
from sinkscope.loops.text.monitor import MonitorSettings
from sinkscope.loops.text.streams import Alarm, Watch, pieces_of_line

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request

LARGEST_REQUEST = 1 << 26
"""Bytes of the body of a request."""
LARGEST_EVENT = 1 << 20
"""Bytes of an event; a stream with a larger one is passed on unwatched from there."""
LARGEST_HELD = 1 << 23
"""Bytes of an answer that is held back for another try; a longer one is passed on as it comes."""
LOOPBACK = ("127.0.0.1", "localhost")
_HOP_BY_HOP = frozenset(
    "connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer trailers "
    "transfer-encoding upgrade".split()
)
_EVENT_END = re.compile(rb"\r?\n\r?\n")
_LINE_END = re.compile(rb"\n")
_EVENT_LINES = re.compile(r"\r\n|\n|\r")


@dataclass(frozen=True)
class ProxySettings:
    """How the proxy works.

    Attributes:
        upstream: Address of the server, such as http://127.0.0.1:11434.
        monitor: Settings of the monitor.
        retry: Whether to ask once more, with the server's own penalty, for an answer that loops. Answers are then
            passed on when they are complete.
        log: Called with a line for each answer that was cut; it has no content.
    """

    upstream: str
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    retry: bool = False
    log: Callable[[str], object] = print

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^/?#@\s]+[^?#@\s]*", self.upstream):
            raise SinkscopeError(
                f"--proxy {self.upstream}: expected the address of a server, such as http://127.0.0.1:11434"
            )

    def url(self, path: str, query: str) -> str:
        """The address at the server of a path that a client asks for."""
        base = self.upstream.rstrip("/")
        prefix = "/" + base.partition("://")[2].partition("/")[2]
        if prefix != "/" and path.startswith(f"{prefix}/"):
            base = base.removesuffix(prefix)
        return f"{base}{path}{'?' if query else ''}{query}"


class StreamWatch:
    """The bytes of one answer: what may be passed on, and whether it loops.

    Bytes are passed on unchanged, an event at a time, so that a stream that is cut ends after a whole event.

    Args:
        settings: Settings of the monitor.
        events: Whether the answer has server-sent events; otherwise lines of JSON.
    """

    def __init__(self, settings: MonitorSettings, events: bool) -> None:
        self.alarm: Alarm | None = None
        self._watch = Watch(settings)
        self._ending = Ending(events)
        self._events = events
        self._held = bytearray()
        self._searched = 0
        self._alarmed: dict[str, None] = {}
        self._watching = True

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the answer, and give those that may be passed on. After an alarm there are no more."""
        if not self._watching:
            return data
        self._held += data
        end = 0
        for match in (_EVENT_END if self._events else _LINE_END).finditer(self._held, self._searched):
            self._read(bytes(self._held[end : match.end()]))
            end = match.end()
            if self.alarm is not None:
                break
        passed = bytes(self._held[:end])
        del self._held[:end]
        self._searched = max(0, len(self._held) - 3)  # an end of four bytes may have begun
        if len(self._held) > LARGEST_EVENT:
            self._watching = False
            return passed + self.rest()
        return passed

    def rest(self) -> bytes:
        """What is left when the answer ends."""
        rest = bytes(self._held)
        self._held.clear()
        return rest

    def ending(self, **about: Any) -> bytes:
        """The events that end the answer after an alarm."""
        return self._ending.made({**self.about(), **about})

    def about(self) -> dict[str, Any]:
        """Where the loop is, without its text."""
        alarm = self.alarm
        if alarm is None:
            return {}
        about: dict[str, Any] = {"verdict": "loops", "token": alarm.token}
        if alarm.tail is not None:
            about.update(period=alarm.tail.period, repeats=round(alarm.tail.repeats, 1), start=alarm.tail.start + 1)
        return about

    def _read(self, event: bytes) -> None:
        """Feed the monitors with an event. It loops when every output that has not ended loops."""
        text = event.decode("utf-8", "replace").removeprefix("\ufeff").strip()
        if self._events:
            lines = [line[5:].strip() for line in _EVENT_LINES.split(text) if line.startswith("data:")]
            text = "\n".join(lines)
        if text in ("", "[DONE]"):
            return
        try:
            data = parse_json(text)
            pieces = pieces_of_line(data, "sse", 0)
            self._ending.see(data)
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            return  # what is no output of a model is passed on
        for piece in pieces:
            for alarm in self._watch.take(piece):
                self._alarmed[alarm.stream] = None
                if self._alarmed.keys() >= self._watch.open.keys() | {alarm.stream}:
                    self.alarm = alarm


def check_proxy() -> None:
    """Say at once if the proxy cannot run here.

    Raises:
        SinkscopeError: starlette, uvicorn or httpx is missing.
    """
    for name in ("starlette", "uvicorn", "httpx"):
        if find_spec(name) is None:
            raise SinkscopeError(f'--proxy needs {name}: pip install "sinkscope[proxy]"')


def application(settings: ProxySettings, hosts: tuple[str, ...] = LOOPBACK) -> Any:
    """The ASGI application.

    Args:
        settings: How it works.
        hosts: Names by which clients may call it; empty for any.
    """
    import httpx
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.responses import JSONResponse, Response, StreamingResponse
    from starlette.routing import Route

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
    client = httpx.AsyncClient(limits=limits, trust_env=False, follow_redirects=False)

    async def forward(request: Request) -> Response:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > LARGEST_REQUEST:
                return JSONResponse(_problem("the request is too large"), 413)
        exchange = Exchange(settings, client, request)
        try:
            answer = await exchange.ask(bytes(body))
        except httpx.HTTPError as error:
            return JSONResponse(_problem(f"the server does not answer: {type(error).__name__}"), 502)
        form = watched_form(answer.status_code, answer.headers)
        without: tuple[str, ...] = ()
        parts = raw_parts(answer)
        if form is not None:
            without = ("content-length",)
            parts = exchange.watched(answer, form == "sse", bytes(body))
        response = StreamingResponse(parts, answer.status_code)
        response.raw_headers = _passed_on(answer.headers.raw, without)
        return response

    middleware: list[Middleware] = []
    if hosts:  # another site cannot reach the server through a name of its own that leads to this machine
        middleware.append(Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts)))
    methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
    return Starlette(routes=[Route("/{path:path}", forward, methods=methods)], middleware=middleware)


@dataclass
class Exchange:
    """A request of a client, and the answers of the server to it.

    Attributes:
        settings: How the proxy works.
        client: Connections to the server.
        request: The request; its body is read apart.
    """

    settings: ProxySettings
    client: httpx.AsyncClient
    request: Request

    async def ask(self, body: bytes) -> httpx.Response:
        """Send the request to the server."""
        import httpx

        method, asked = self.request.method, self.request.url
        headers = _passed_on(self.request.headers.raw, without=("host", "content-length", "accept-encoding"))
        headers.append((b"accept-encoding", b"identity"))  # the proxy has to read the answer
        url = self.settings.url(asked.path, asked.query)
        waits = httpx.Timeout(None, connect=30).as_dict()  # a server may think for long
        content = body if body or method in ("POST", "PUT", "PATCH") else None
        request = httpx.Request(method, url, headers=headers, content=content, extensions={"timeout": waits})
        return await self.client.send(request, stream=True)

    async def watched(self, answer: httpx.Response, events: bool, body: bytes) -> AsyncIterator[bytes]:
        """Pass on an answer until it ends or loops; with `retry`, one that loops is replaced by another."""
        again: bytes | None = None
        if self.settings.retry:
            again = with_penalty(self.request.url.path, body)
        held = bytearray()
        watch = StreamWatch(self.settings.monitor, events)
        async for part in _until_alarm(answer, watch):
            held += part
            if again is None or len(held) > LARGEST_HELD:
                again = None
                yield bytes(held)
                held.clear()
        second: httpx.Response | None = None
        what = "cut"
        if watch.alarm is not None and again is not None:
            second = await self._another(again)
            what = "cut, and the server refused another try"
        if second is None:
            yield bytes(held)
        else:
            self._log("asked again with a penalty", watch)
            what = "cut in the second try"
            watch = StreamWatch(self.settings.monitor, events)
            async for part in _until_alarm(second, watch):
                yield part
        if watch.alarm is not None:
            self._log(what, watch)
            yield watch.ending(retried=second is not None)

    async def _another(self, body: bytes) -> httpx.Response | None:
        """A second answer; None if the server refuses."""
        import httpx

        try:
            answer = await self.ask(body)
        except httpx.HTTPError:
            return None
        if watched_form(answer.status_code, answer.headers) is None:
            await answer.aclose()
            return None
        return answer

    def _log(self, what: str, watch: StreamWatch) -> None:
        about = watch.about()
        place = f"token {about.get('token')}, period {about.get('period', 'unknown')}"
        self.settings.log(f"{self.request.method} {self.request.url.path[:80]}: a loop at {place}; {what}")


async def raw_parts(answer: httpx.Response) -> AsyncIterator[bytes]:
    """The bytes of an answer; the connection to the server is closed when they end or the client leaves."""
    try:
        async for part in answer.aiter_raw():
            yield part
    finally:
        await answer.aclose()


async def _until_alarm(answer: httpx.Response, watch: StreamWatch) -> AsyncIterator[bytes]:
    """The bytes of an answer up to an alarm, after which the server need not go on."""
    import httpx

    try:
        async for part in answer.aiter_raw():
            passed = watch.feed(part)
            if passed:
                yield passed
            if watch.alarm is not None:
                return
        yield watch.rest()
    except httpx.HTTPError:
        yield watch.rest()
        raise  # the client sees that the answer is not complete
    finally:
        await answer.aclose()


def watched_form(status: int, headers: Mapping[str, str]) -> str | None:
    """The form of an answer that is watched: "sse" or "jsonl"; None for any other, such as an error."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if status != 200 or headers.get("content-encoding", "identity") != "identity":
        return None
    return {"text/event-stream": "sse", "application/x-ndjson": "jsonl", "application/jsonl": "jsonl"}.get(kind)


def with_penalty(path: str, body: bytes) -> bytes | None:
    """The request with the server's own penalty on repetition; None if its interface has none."""
    try:
        data = parse_json(body)
    except ValueError:
        return None
    if not isinstance(data, dict):
        return None
    inner: str | None = None
    penalty: dict[str, float] = {"frequency_penalty": 0.5}
    if path.endswith(("/api/chat", "/api/generate")):  # Ollama
        inner, penalty = "options", {"repeat_penalty": 1.3, "repeat_last_n": 512}
    elif path.endswith("/completion"):  # llama.cpp
        penalty = {"dry_multiplier": 0.8}
    elif path.endswith("/generate_stream"):  # Text Generation Inference
        inner, penalty = "parameters", {"repetition_penalty": 1.2}
    elif path.endswith("/generate"):  # SGLang
        inner = "sampling_params"
    elif not path.endswith("/completions"):
        return None
    if inner is None:
        return json.dumps({**data, **penalty}).encode()
    options = data.get(inner)
    if options is not None and not isinstance(options, dict):
        return None
    return json.dumps({**data, inner: {**(options or {}), **penalty}}).encode()


def _passed_on(headers: list[tuple[bytes, bytes]], without: tuple[str, ...] = ()) -> list[tuple[bytes, bytes]]:
    """Headers for the other side: without those of one connection, and without some."""
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        word = name.decode("latin-1").lower()
        if word not in _HOP_BY_HOP and word not in without:
            kept.append((word.encode("latin-1"), value))
    return kept


def _problem(message: str) -> dict[str, Any]:
    """An error in the form that clients of OpenAI and Ollama show."""
    return {"error": {"message": f"sinkscope: {message}", "type": "proxy_error"}}


def serve(settings: ProxySettings, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Run the proxy until Ctrl-C.

    Args:
        settings: How it works.
        host: Address to listen at.
        port: Port; 0 takes a free one.
        ready: Called with the address once connections are accepted.

    Raises:
        SinkscopeError: The address is taken, or is none of this machine.
    """
    import uvicorn

    hosts = LOOPBACK if host in LOOPBACK else ()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SinkscopeError(f"{host}:{port}: {(error.strerror or str(error)).lower()}; give another") from None
        listener.listen(256)
        ready(f"http://{host}:{listener.getsockname()[1]}")
        config = uvicorn.Config(application(settings, hosts), log_level="critical", access_log=False, lifespan="off")
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # the usual end
            pass
