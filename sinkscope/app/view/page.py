"""The page of a view: one file that fetches nothing, or a live page on 127.0.0.1, which asks for texts and edits."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.results.pages import render, source
from sinkscope.results.result import Result

START = "\nstart(document);\n"
"""The last line of the module in a page; a notebook imports the module without it."""
STYLE = "app/view/view.css"
SCRIPTS = tuple(f"app/view/{name}.js" for name in ("drawing", "panels", "text", "circuit", "view", "start"))
"""The parts of the module, in their order; a page holds them as one."""
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def view_page(view: Result | None, title: str) -> str:
    """Return the page.

    Args:
        view: The `ModelView` that is shown. None: the page asks the server that it came from.
        title: Name of the model.
    """
    style, script = source(STYLE), source(*SCRIPTS) + START
    connect = "'self'" if view is None else "'none'"
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; connect-src {connect}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    shown = None
    if view is not None:
        shown = _shown(view.to_dict())
        for text in shown["result"]["texts"]:
            _leave_out(text["variants"])
    data = json.dumps(shown, allow_nan=False, separators=(",", ":"))
    data = data.replace("<", "\\u003c")  # no token of a text can end the element
    name = "app/view/view.html"
    return render(name, kind="view", policy=policy, title=title, style=style, data=data, script=script)


def _shown(part: Any) -> Any:
    """What a page shows of a part of a view: not the number of each text, from which a margin was made."""
    if isinstance(part, dict):
        return {name: _shown(value) for name, value in part.items() if name != "by_text"}
    return [_shown(value) for value in part] if isinstance(part, list | tuple) else part


def _leave_out(variants: Sequence[dict[str, Any]]) -> None:
    """Leave out the attention of heads that is as in the intact model, which is the first variant."""
    intact, *edited = (variant["rows"] for variant in variants)
    for rows in edited:
        for number, row in enumerate(intact):
            if rows[number] == row:
                rows[number] = None


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- live ---

MOST_BYTES = 1 << 20
"""Bytes of a request that are read."""
HOST = "127.0.0.1"
GRACE = 3
"""Seconds that open requests have to end after Ctrl-C."""


def check_server() -> None:
    """Say now, before the work, if no live page can be served here.

    Raises:
        SinkscopeError: uvicorn or, which is installed with it, starlette is missing.
    """
    if find_spec("uvicorn") is None:
        raise SinkscopeError("a live page needs uvicorn: pip install starlette uvicorn, or give --html FILE")


def live_page(answer: Callable[[Any], dict[str, Any]], title: str, token: str) -> Any:
    """Return the ASGI application: a page at /TOKEN/ and its requests at /TOKEN/view; everything else is not found."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    async def page(_: Request) -> HTMLResponse:
        return HTMLResponse(view_page(None, title), headers=HEADERS)

    async def view(request: Request) -> JSONResponse:
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > MOST_BYTES:
                problem = {"error": f"the request is longer than {MOST_BYTES:,} bytes: give a shorter text"}
                return JSONResponse(problem, 413, headers={**HEADERS, "connection": "close"})
        try:
            asked = parse_json(bytes(body))
        except ValueError as error:
            return JSONResponse({"error": f"the request is not JSON ({error})"}, 400, headers=HEADERS)
        return JSONResponse(await run_in_threadpool(answer, asked), headers=HEADERS)

    routes = [Route(f"/{token}/", page), Route(f"/{token}/view", view, methods=["POST"])]
    # Another site cannot reach the page through a name of its own that leads to this machine.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def serve(answer: Callable[[Any], dict[str, Any]], title: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve the live page at 127.0.0.1 until Ctrl-C, after which open requests have a few seconds to end.

    Args:
        answer: Answers what the page asks for, such as `Explorer.answer`.
        title: Name of the model.
        port: Port; 0 takes a free one.
        ready: Called with the address once connections are accepted.

    Raises:
        SinkscopeError: The port is taken.
    """
    import uvicorn

    token = secrets.token_urlsafe(16)
    # By the protocol's number asyncio knows that it is TCP, and sends small packets at once.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((HOST, port))
        except OSError as error:
            raise SinkscopeError(f"{HOST}:{port}: {(error.strerror or str(error)).lower()}; give another") from None
        listener.listen(256)
        ready(f"http://{HOST}:{listener.getsockname()[1]}/{token}/")
        settings: dict[str, Any] = {"lifespan": "off", "timeout_graceful_shutdown": GRACE}
        settings |= {"server_header": False, "date_header": False}
        application = live_page(answer, title, token)
        config = uvicorn.Config(application, log_level="critical", access_log=False, **settings)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # the usual end
            pass
