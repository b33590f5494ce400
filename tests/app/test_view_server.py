"""The live server of `view`: large bodies, requests that never end, and Ctrl-C with open requests."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx
import pytest
from served import LOCAL


@pytest.fixture(scope="module")
def server(model):
    """The command in a process of its own, its address, and how it ended."""
    words = [sys.executable, "-m", "sinkscope", "view", str(model), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    address = ""
    for line in process.stdout:
        found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", line)
        if found:
            address = found[0]
            break
    yield address, process
    process.kill()
    process.wait()


def test_a_large_body_is_refused_before_it_is_read(server):
    address, process = server
    before = resident(process.pid)
    answer = httpx.post(f"{address}view", content=(b"x" * (1 << 20) for _ in range(64)), timeout=60, **LOCAL)
    assert answer.status_code == 413 and "\n" not in answer.json()["error"]
    declared = httpx.post(f"{address}view", content=b"x" * (1 << 21), timeout=60, **LOCAL)
    assert declared.status_code == 413
    assert resident(process.pid) - before < 30


def resident(process: int) -> float:
    """Megabytes that a process holds."""
    with open(f"/proc/{process}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS:")) / 1024


def test_requests_that_never_end_hold_nobody_up_and_ctrl_c_ends_the_server(server):
    address, process = server
    place = urlsplit(address)
    waiting = []
    for head in (
        b"",
        b"POST ",
        f"POST {place.path}view HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{".encode(),
    ):
        for _ in range(20):
            connection = socket.create_connection((place.hostname, place.port))
            connection.sendall(head)
            waiting.append(connection)
    begin = time.monotonic()
    assert httpx.get(address, timeout=20, **LOCAL).status_code == 200
    assert time.monotonic() - begin < 10
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(20) == 0
    assert "Traceback" not in process.stderr.read()
    for connection in waiting:
        connection.close()
