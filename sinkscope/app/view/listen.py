"""Serves the live page of `view` on this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from sinkscope.errors import SinkscopeError

GRACE = 3
"""Seconds that open requests have to end after Ctrl-C."""


def listen(application: Any, host: str, port: int, ready: Callable[[str], object]) -> None:
    """Serve an ASGI application until Ctrl-C, after which open requests have a few seconds to end.

    Args:
        application: The application.
        host: Address to listen at.
        port: Port; 0 takes a free one.
        ready: Called with the address once connections are accepted.

    Raises:
        SinkscopeError: The address is taken, or is none of this machine.
    """
    import uvicorn

    # By the protocol's number asyncio knows that it is TCP, and sends small packets at once.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise SinkscopeError(f"{host}:{port}: {(error.strerror or str(error)).lower()}; give another") from None
        listener.listen(256)
        ready(f"http://{host}:{listener.getsockname()[1]}")
        settings: dict[str, Any] = {"lifespan": "off", "timeout_graceful_shutdown": GRACE}
        settings |= {"server_header": False, "date_header": False}
        config = uvicorn.Config(application, log_level="critical", access_log=False, **settings)
        try:
            uvicorn.Server(config).run(sockets=[listener])
        except KeyboardInterrupt:  # the usual end
            pass
