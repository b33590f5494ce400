"""The live server of `view`: large bodies, requests that never end, and Ctrl-C with open requests."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from served import LOCAL

from sinkscope.app.cli import main


def command(folder: Path, words: list[str]) -> None:
    """The command in a process of its own, whose output goes to files."""
    sys.stdout, sys.stderr = ((folder / name).open("w", buffering=1) for name in ("out", "err"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(words))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """The command in a fork of this process, which need not import torch again; its address, and what it says."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "out").touch()
    words = ["view", str(model), "--port", "0"]
    process = multiprocessing.get_context("fork").Process(target=command, args=(folder, words))
    process.start()
    found = None
    while found is None and process.is_alive():
        time.sleep(0.05)
        found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", (folder / "out").read_text())
    assert found is not None, (folder / "err").read_text()
    yield found[0], process, folder / "err"
    process.kill()
    process.join()


def test_a_large_body_is_refused_before_it_is_read(server):
    address, process, _ = server
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
    address, process, errors = server
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
    assert httpx.get(address, timeout=20, **LOCAL).status_code == 200  # or it raises
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 0
    assert "Traceback" not in errors.read_text()
    for connection in waiting:
        connection.close()
