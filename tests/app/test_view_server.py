"""The live server of `view` in a process of its own: requests that never end, and Ctrl-C while they are open."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from multiprocessing import get_context
from urllib.parse import urlsplit

import httpx
from served import LOCAL

from sinkscope.app.cli import main


def command(out: str, words: list[str]) -> None:
    """The command, whose output goes to a file."""
    sys.stdout = sys.stderr = open(out, "w", buffering=1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(words))


def test_requests_that_never_end_hold_nobody_up_and_ctrl_c_ends_the_server(model, tmp_path):
    """In a fork of this process, which need not import torch again."""
    out = tmp_path / "out"
    out.touch()
    words = ["view", str(model), "--port", "0"]
    process = get_context("fork").Process(target=command, args=(str(out), words), daemon=True)
    process.start()
    found = None
    while found is None:
        assert process.is_alive(), out.read_text()
        time.sleep(0.05)
        found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", out.read_text())
    place = urlsplit(found[0])
    body = f"POST {place.path}view HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{"
    waiting = [socket.create_connection((place.hostname, place.port)) for _ in range(60)]
    for number, connection in enumerate(waiting):
        connection.sendall(("", "POST ", body)[number % 3].encode())
    assert httpx.get(found[0], timeout=20, **LOCAL).status_code == 200  # or it raises
    answer = httpx.post(f"{found[0]}view", content=(b"x" * (1 << 20) for _ in range(64)), timeout=60, **LOCAL)
    assert answer.status_code == 413 and "\n" not in answer.json()["error"]  # before it is read
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 0 and "Traceback" not in out.read_text()
