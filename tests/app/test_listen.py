"""The sockets on which applications are served."""

from __future__ import annotations

import socket

import pytest
import uvicorn
from refusals import refused

from sinkscope.app.view.listen import GRACE, listen


@pytest.fixture
def served_on(monkeypatch) -> list[socket.socket]:
    """The sockets that a server gets; their protocol is known to asyncio."""
    found: list[tuple[int, float | None]] = []

    def run(server: uvicorn.Server, sockets: list[socket.socket]) -> None:
        found.extend((one.proto, server.config.timeout_graceful_shutdown) for one in sockets)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    return found


def test_a_listener_is_known_as_tcp_so_that_small_packets_are_sent_at_once(served_on):
    said: list[str] = []
    listen(lambda *_: None, "127.0.0.1", 0, said.append)
    assert served_on == [(socket.IPPROTO_TCP, GRACE)] and said[0].startswith("http://127.0.0.1:")


def test_a_port_that_is_taken_is_refused_in_one_line(served_on):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        with refused("address already in use; give another"):
            listen(lambda *_: None, "127.0.0.1", other.getsockname()[1], print)
