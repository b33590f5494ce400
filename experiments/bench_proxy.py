"""What the loop proxy costs: tokens of a stream through it, and straight from the server.

    python -m experiments.bench_proxy [--tokens 10000] [--rounds 5] [--out figures/bench_proxy.json]

A server that writes a chat completion as fast as it can, the proxy, and the client are three processes that talk over
127.0.0.1. Each token is an event, and several events may lie in one packet. The watching alone is timed without
sockets.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from experiments.record import Row, record
from experiments.script import run as run_script
from sinkscope.files.output import write_atomic
from sinkscope.loops.servers.proxy import StreamWatch
from sinkscope.loops.text.monitor import MonitorSettings
from sinkscope.models.text import typical_text


def stream_events(count: int) -> list[bytes]:
    """Events of a chat completion, a word each, of text that does not loop."""
    words = typical_text().split()
    made: list[bytes] = []
    for i in range(count):
        delta = {"index": 0, "delta": {"content": f"{words[i % len(words)]} "}, "finish_reason": None}
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [delta]}
        made.append(f"data: {json.dumps(chunk)}\n\n".encode())
    return [*made, b"data: [DONE]\n\n"]


def serve(port: int) -> None:
    """Write as many events as a request asks for."""

    async def answer(request: Request) -> StreamingResponse:
        parts = stream_events((await request.json())["tokens"])

        async def each():
            for part in parts:
                yield part

        return StreamingResponse(each(), media_type="text/event-stream")

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="critical")


def free_port() -> int:
    """A port that nobody uses."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def seconds(address: str, tokens: int) -> tuple[float, int]:
    """Time of an answer, and its bytes."""
    started = time.perf_counter()
    size = 0
    with httpx.stream("POST", address, json={"tokens": tokens}, timeout=600, trust_env=False) as answer:
        for part in answer.iter_raw():
            size += len(part)
    return time.perf_counter() - started, size


def watching(tokens: int) -> float:
    """Seconds of processor time that the watching of so many tokens takes, without sockets."""
    parts = stream_events(tokens)
    watch = StreamWatch(MonitorSettings(), events=True)
    started = time.thread_time()
    for part in parts:
        watch.feed(part)
    return time.thread_time() - started


def measured(tokens: int, rounds: int) -> Row:
    """Microseconds a token, straight and through the proxy, in turn."""
    direct = free_port()
    proxied = free_port()
    words = [sys.executable, "-m"]
    upstream = f"http://127.0.0.1:{direct}"
    commands = [
        [*words, "experiments.bench_proxy", "--serve-at", str(direct)],
        [*words, "sinkscope", "loops", "--proxy", upstream, "--port", str(proxied)],
    ]
    processes = []
    for command in commands:
        processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL))
    try:
        for _ in range(200):
            try:
                httpx.post(f"http://127.0.0.1:{proxied}/x", json={"tokens": 1}, trust_env=False).raise_for_status()
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        taken: dict[str, list[float]] = {"straight": [], "proxy": []}
        for _ in range(rounds):
            straight, size = seconds(f"{upstream}/x", tokens)
            through, same = seconds(f"http://127.0.0.1:{proxied}/x", tokens)
            if size != same:
                raise RuntimeError(f"{size} bytes became {same}")
            taken["straight"].append(straight / tokens * 1e6)
            taken["proxy"].append(through / tokens * 1e6)
    finally:
        for process in processes:
            process.terminate()
            process.wait()
    watched = []
    for _ in range(rounds):
        watched.append(watching(tokens) / tokens * 1e6)
    medians = {}
    for name, values in taken.items():
        medians[name] = round(statistics.median(values), 1)
    return {
        "tokens": tokens,
        "microseconds_per_token": {**medians, "watching": round(statistics.median(watched), 1)},
        "rounds": taken,
        "load": os.getloadavg()[0],
    }


def main(
    *,
    tokens: int = 10_000,
    rounds: int = 5,
    serve_at: int | None = None,
    out: Path = Path("figures/bench_proxy.json"),
) -> None:
    """Make what the module describes.

    Args:
        serve_at: Only be the server, at this port, as the script does itself in a process of its own.
    """
    if serve_at is not None:
        serve(serve_at)
        return
    started = time.perf_counter()
    result = measured(tokens, rounds)
    settings = {"tokens": tokens, "rounds": rounds}
    write_atomic(out, record("bench-proxy", result, settings, started=started, dtype="text"))
    print(json.dumps(result["microseconds_per_token"]), f"load {result['load']:.1f}")


if __name__ == "__main__":
    run_script(main)
