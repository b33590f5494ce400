"""The paths that a proxy answers itself: /metrics and /health, for whoever runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.loops.servers.counts import Counts

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

HEALTH_WAIT = 5  # seconds for the server to say something


def own_pages(client: httpx.AsyncClient, server: httpx.URL, counts: Counts) -> list[Route]:
    """Return the routes.

    Args:
        client: Asks the server.
        server: Its address.
        counts: What the proxy has counted.
    """
    import httpx
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    async def metrics(request: Request) -> Response:
        text, kind = counts.text()
        return Response(text, headers={"content-type": kind})

    async def health(request: Request) -> Response:
        try:
            url = server.copy_with(raw_path=server.raw_path.rstrip(b"/") + b"/health")
            status = (await client.get(url, timeout=HEALTH_WAIT)).status_code
        except httpx.HTTPError as error:
            return JSONResponse({"status": "the server does not answer", "problem": type(error).__name__}, 503)
        if status >= 500:  # it is loading its model, say
            return JSONResponse({"status": "the server is not ready", "server": status}, 503)
        return JSONResponse({"status": "ok", "server": status})  # not every server has this path

    return [Route("/metrics", metrics), Route("/health", health)]
