"""The live server of `view` in a process of its own: requests that never end, and Ctrl-C while they are open."""

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
from served import LOCAL

from sinkscope.app.cli import main


def command(folder: Path, words: list[str]) -> None:
    """The command, whose output goes to files."""
    sys.stdout, sys.stderr = ((folder / name).open("w", buffering=1) for name in ("out", "err"))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(words))


def test_requests_that_never_end_hold_nobody_up_and_ctrl_c_ends_the_server(model, tmp_path):
    """In a fork of this process, which need not import torch again."""
    (tmp_path / "out").touch()
    words = ["view", str(model), "--port", "0"]
    process = multiprocessing.get_context("fork").Process(target=command, args=(tmp_path, words), daemon=True)
    process.start()
    found = None
    while found is None and process.is_alive():
        time.sleep(0.05)
        found = re.search(r"http://127\.0\.0\.1:\d+/\S+/", (tmp_path / "out").read_text())
    assert found is not None, (tmp_path / "err").read_text()
    place = urlsplit(found[0])
    body = f"POST {place.path}view HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{{"
    waiting = []
    for head in ("", "POST ", body) * 20:
        waiting.append(socket.create_connection((place.hostname, place.port)))
        waiting[-1].sendall(head.encode())
    assert httpx.get(found[0], timeout=20, **LOCAL).status_code == 200  # or it raises
    answer = httpx.post(f"{found[0]}view", content=(b"x" * (1 << 20) for _ in range(64)), timeout=60, **LOCAL)
    assert answer.status_code == 413 and "\n" not in answer.json()["error"]  # before it is read
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode == 0 and "Traceback" not in (tmp_path / "err").read_text()
    for connection in waiting:
        connection.close()
