"""The live page: served on 127.0.0.1 under an address with a token, it asks for other texts and edits."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from sinkscope.app.view.explorer import Explorer
from sinkscope.app.view.page import view_page
from sinkscope.errors import SinkscopeError
from sinkscope.files.listen import listen
from sinkscope.files.plain import parse_json
from sinkscope.files.provenance import install_command

HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


def check_server() -> None:
    """Say now, before the work, if no live page can be served here.

    Raises:
        SinkscopeError: uvicorn or, which is installed with it, starlette is missing.
    """
    if find_spec("uvicorn") is None:
        raise SinkscopeError(f"a live page needs uvicorn: {install_command('view')}, or write a page with --html FILE")


def application(explorer: Explorer, token: str) -> Any:
    """Return the ASGI application: a page at /TOKEN/ and its requests at /TOKEN/view; everything else is not found."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, JSONResponse
    from starlette.routing import Route

    title = explorer.setup.target.name

    async def page(_: Request) -> HTMLResponse:
        return HTMLResponse(view_page(None, title), headers=HEADERS)

    async def view(request: Request) -> JSONResponse:
        try:
            asked = parse_json(await request.body())
        except ValueError as error:
            return JSONResponse({"error": f"the request is not JSON ({error})"}, 400, headers=HEADERS)
        return JSONResponse(await run_in_threadpool(explorer.answer, asked), headers=HEADERS)

    routes = [Route(f"/{token}/", page), Route(f"/{token}/view", view, methods=["POST"])]
    # Another site cannot reach the page through a name of its own that leads to this machine.
    hosts = Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])
    return Starlette(routes=routes, middleware=[hosts])


def serve(explorer: Explorer, port: int, ready: Callable[[str], object]) -> None:
    """Serve the live page until Ctrl-C.

    Args:
        explorer: The open model.
        port: Port on 127.0.0.1; 0 takes a free one.
        ready: Called with the address once connections are accepted.

    Raises:
        SinkscopeError: The port is taken.
    """
    token = secrets.token_urlsafe(16)
    listen(application(explorer, token), "127.0.0.1", port, lambda address: ready(f"{address}/{token}/"))
