"""Applications that run in a thread, on a port of this machine."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

LOCAL: dict[str, Any] = {"trust_env": False, "verify": False}
"""How httpx asks a server of this machine: by no proxy, and without all certificates, which take long to read."""


@contextlib.contextmanager
def served(app: Any) -> Iterator[str]:
    """The address of an application."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(256)
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = server.force_exit = True
            thread.join()
