"""The proxy between a client and real servers: what is healthy passes, what loops is cut, and nothing hangs.

A server is tested if its program is named: SINKSCOPE_LLAMA_SERVER (llama-server of llama.cpp) or SINKSCOPE_TRANSFORMERS
(`transformers`, with its extra `serving`); `docs/what_to_try.md` says how to get them. SINKSCOPE_REAL holds the model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import served

from sinkscope.loops import MonitorSettings
from sinkscope.loops.servers.proxy import application

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
MODEL = "smollm2-135m"
PROGRAMS = {"llama.cpp": "SINKSCOPE_LLAMA_SERVER", "transformers": "SINKSCOPE_TRANSFORMERS"}
LOOPS = [
    "Write a very long story about a dog.",
    "List 100 animals.",
    "Tell me everything about Lisbon, in great detail.",
]
SHORT = [f"What is {number} plus {number + 3}? Answer in one sentence." for number in range(17)]
HEALTHY = [
    *SHORT,
    "Write a Python function that checks whether a number is prime, with tests.",
    "Explain what happiness is.",
    "Write a JSON array of 12 cities, each with a name and a country.",
]
CHANGING = re.compile(r'"(?:id|created|timings|system_fingerprint)":\s*(?:"[^"]*"|[\d.]+|\{[^}]*\})')
"""Fields of a chunk that differ between two runs of one request."""


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@dataclass
class Server:
    """A real server, the proxy before it, and what the proxy logged."""

    direct: str
    model: str
    process: subprocess.Popen[bytes]
    proxy: str = ""
    log: list[str] = field(default_factory=list)

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        message = {"role": "user", "content": prompt}
        return {"model": self.model, "messages": [message], "stream": True, "temperature": 0, "max_tokens": tokens}

    def written(self, address: str, prompt: str, tokens: int) -> str:
        """All that a client receives, without what differs between runs."""
        url = f"{address}/v1/chat/completions"
        answer = httpx.post(url, json=self.body(prompt, tokens), timeout=900, trust_env=False)
        assert answer.status_code == 200, answer.text
        return CHANGING.sub('"changing": 0', answer.content.decode())

    def ask(self, address: str, prompt: str, tokens: int = 900) -> list[dict[str, Any]]:
        """The chunks of an answer, without what differs between runs."""
        lines = self.written(address, prompt, tokens).splitlines()
        return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.fixture(scope="module", params=PROGRAMS)
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    program, folder = os.environ.get(PROGRAMS[request.param]), os.environ.get("SINKSCOPE_REAL")
    if not program or not folder:
        pytest.skip(f"{PROGRAMS[request.param]} and SINKSCOPE_REAL name no program and no model")
    file, port = Path(folder).resolve() / f"{MODEL}.gguf", free_port()
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if request.param == "llama.cpp":
        environment["LD_LIBRARY_PATH"] = str(Path(program).parent)
        words = [program, "-m", str(file), "--port", str(port), "-c", "8192", "-np", "2"]
        words, model = [*words, "-t", "1"], MODEL  # two threads wait for each other on a busy machine
    else:
        from experiments.real.models import loaded, save

        model = str(request.getfixturevalue("tmp_path_factory").mktemp("served") / MODEL)
        save(loaded(file), Path(model))
        words = [program, "serve", model, "--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    one = Server(f"http://127.0.0.1:{port}", model, process)
    try:
        wait_for(one)
        with served(application(one.direct, MonitorSettings(), one.log.append)) as one.proxy:
            yield one
    finally:
        process.kill()
        process.wait()


def wait_for(server: Server) -> None:
    for _ in range(600):
        assert server.process.poll() is None, "the server has ended"
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{server.direct}/health", trust_env=False).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError("the server did not begin")


@pytest.mark.parametrize("prompt", HEALTHY)
def test_a_healthy_answer_passes_byte_for_byte(server: Server, prompt: str):
    sent = server.written(server.direct, prompt, 160)
    assert server.written(server.proxy, prompt, 160) == sent and sent.count("data: {") > 3


@pytest.mark.parametrize("prompt", LOOPS)
def test_a_loop_is_cut_after_what_the_server_sent(server: Server, prompt: str):
    chunks = server.ask(server.proxy, prompt)
    about = chunks[-1]["sinkscope"]
    assert about["verdict"] == "loops" and 100 < about["token"] < 700
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    whole = server.ask(server.direct, prompt, len(chunks) + 40)
    assert chunks[:-1] == whole[: len(chunks) - 1] and not any("usage" in chunk and chunk["usage"] for chunk in chunks)


def test_two_answers_at_once_stay_apart(server: Server):
    healthy = HEALTHY[-3]
    with ThreadPoolExecutor(2) as pool:
        loop, fine = pool.map(lambda prompt: server.ask(server.proxy, prompt, 600), [LOOPS[0], healthy])
    assert "sinkscope" in loop[-1] and "sinkscope" not in fine[-1]
    assert said(fine)[:80] == said(server.ask(server.direct, healthy, 600))[:80]


def said(chunks: list[dict[str, Any]]) -> str:
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"]]
    return "".join(pieces)


def test_a_client_that_leaves_frees_the_server(server: Server):
    for _ in range(4):
        with httpx.stream(
            "POST",
            f"{server.proxy}/v1/chat/completions",
            json=server.body("Explain the history of France in 4000 words.", 4000),
            timeout=300,
            trust_env=False,
        ) as answer:
            next(answer.iter_raw())
    started = time.monotonic()
    assert server.ask(server.proxy, SHORT[0], 16)
    assert time.monotonic() - started < 120, "four answers of 4,000 tokens would take longer"


def test_a_server_that_dies_is_an_error_for_the_client_and_the_proxy_stays(server: Server):
    """It is the last test of a server."""
    with pytest.raises(httpx.HTTPError):
        with httpx.stream(
            "POST",
            f"{server.proxy}/v1/chat/completions",
            json=server.body("Explain the history of France in 4000 words.", 4000),
            timeout=300,
            trust_env=False,
        ) as answer:
            for number, _ in enumerate(answer.iter_raw()):
                if number == 3:
                    server.process.send_signal(signal.SIGKILL)
    answer = httpx.post(f"{server.proxy}/v1/chat/completions", json={}, timeout=60, trust_env=False)
    assert answer.status_code == 502 and "does not answer" in answer.json()["error"]["message"]
