"""`sinkscope loops --proxy` between a client and fake servers of every form, over sockets of this machine."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_texts import prose, rows_of
from served import LOCAL, served
from server_streams import SERVERS, chat_chunk, choices_of, events
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sinkscope.files.store import json_lines
from sinkscope.loops import MonitorSettings
from sinkscope.loops.servers.answers import Asked, StreamWatch, asked_in
from sinkscope.loops.servers.counts import MOST_MODELS, Counts
from sinkscope.loops.servers.proxy import NEEDS, application

SECRET = "one more cup of tea, "
LOOPING = f"{prose(60)} {SECRET * 60}"
HONEST = prose(120)
LINES = ("ollama-chat", "ollama-generate")  # servers that send lines of JSON
PATHS = {"ollama-chat": "/api/chat", "ollama-generate": "/api/generate", "openai-chat": "/v1/chat/completions"}


def _sent(server: str, text: str) -> bytes:
    """All bytes of an answer."""
    objects = SERVERS[server](text)
    if server in LINES:
        end = {"model": "m", "done": True, "done_reason": "stop"}
        return json_lines([*objects, end]).encode()
    return events(objects).encode()


class Upstream:
    """A fake server: the fields of a request say what it answers."""

    def __init__(self) -> None:
        self.headers: list[dict[str, str]] = []
        self.written = 0
        self.broken = 0

    async def answer(self, request: Request) -> Response:
        body = await request.body()
        self.headers.append(dict(request.headers))
        if request.url.path == "/error":
            return JSONResponse({"error": "the model is not here"}, 404, headers={"x-reason": "no model"})
        if not body:
            return JSONResponse({"path": request.url.path, "query": request.url.query})
        asked = json.loads(body)
        data = _sent(asked["server"], asked["text"])
        kind = "application/x-ndjson" if asked["server"] in LINES else "text/event-stream"
        return StreamingResponse(self._parts(data, asked), media_type=kind)

    async def _parts(self, data: bytes, asked: dict[str, Any]):
        size = asked.get("size", 1000)
        try:
            for place in range(0, len(data), size):
                if place >= asked.get("breaks", len(data)):
                    raise ConnectionResetError
                yield data[place : place + size]
                self.written += size
                await asyncio.sleep(asked.get("pause", 0))
        except asyncio.CancelledError:
            self.broken += 1
            raise

    def app(self) -> Starlette:
        methods = ["GET", "POST", "DELETE"]
        return Starlette(routes=[Route("/{path:path}", self.answer, methods=methods)])


@pytest.fixture(scope="module")
def plain() -> Iterator[SimpleNamespace]:
    """A proxy before a fake server; its log, its address and that of the server."""
    upstream, log = Upstream(), list[str]()
    with served(upstream.app()) as direct, served(application(direct, MonitorSettings(), log.append)) as address:
        yield SimpleNamespace(address=address, direct=direct, upstream=upstream, lines=log)


def ask(plain: SimpleNamespace, server: str, text: str, **more: Any) -> bytes:
    """All bytes of the answer to a request of the proxy."""
    body = {"server": server, "text": text, **more}
    return httpx.post(plain.address + PATHS.get(server, "/x"), json=body, timeout=60, **LOCAL).content


def _objects(server: str, data: bytes) -> list[Any]:
    if server in LINES:
        return [json.loads(line) for line in data.splitlines()]
    lines = [line[6:] for line in data.decode().splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize("server", SERVERS)
def test_an_honest_answer_arrives_and_a_looping_one_is_cut_behind_an_event_and_says_why(server, plain):
    assert ask(plain, server, HONEST, size=997) == _sent(server, HONEST)
    plain.lines.clear()
    whole = _sent(server, LOOPING)
    data = ask(plain, server, LOOPING)
    sent, objects = _objects(server, whole), _objects(server, data)
    same = 0
    while same < len(objects) and objects[same] == sent[same]:
        same += 1
    assert 0 < same < len(sent) / 2
    assert data.startswith(whole[: whole.index(json.dumps(sent[same - 1]).encode()) + 10])
    ends = objects[same:]
    told = [end.get("sinkscope") or (end.get("response") or {}).get("sinkscope") for end in ends]
    (about,) = filter(None, told)
    assert about["verdict"] == "loops" and about["period"] == 6
    kind = next(name for name in FINISH if server.startswith(name))
    assert FINISH[kind] in json.dumps(ends)
    if server == "anthropic":
        assert [end["type"] for end in ends] == ["content_block_stop", "message_delta", "message_stop"]
    if server.startswith("openai"):
        assert data.endswith(b"data: [DONE]\n\n") and ends[-1]["choices"][0]["stop_reason"] == "repetition_detected"
    (line,) = plain.lines
    assert "a loop at token" in line and "tea" not in line and "choice" not in line


FINISH = {  # where an answer that was cut says why it ended, and what
    "anthropic": '"delta": {"stop_reason": "max_tokens"',
    "responses": '"status": "incomplete"',
    "ollama": '"done_reason": "length"',
    "openai": '"finish_reason": "length"',
    "llama.cpp": '"stop_type": "limit"',
}


def test_the_upstream_call_ends_when_the_answer_is_cut_and_when_the_client_leaves(plain):
    upstream = plain.upstream
    before, written = upstream.broken, upstream.written
    assert ask(plain, "openai-chat", SECRET * 1_000, pause=0.001).endswith(b"[DONE]\n\n")
    _wait(lambda: upstream.broken == before + 1)
    assert upstream.written - written < len(_sent("openai-chat", SECRET * 1_000)) / 10
    body = {"server": "openai-chat", "text": prose(3000), "pause": 0.01}
    with httpx.stream("POST", f"{plain.address}/x", json=body, **LOCAL) as answer:
        next(answer.iter_raw())
    _wait(lambda: upstream.broken == before + 2)


def _wait(holds: Any) -> None:
    for _ in range(500):
        if holds():
            return
        time.sleep(0.02)
    raise AssertionError("it does not hold after 10 seconds")


def test_a_connection_that_breaks_is_broken_for_the_client_too(plain):
    body = {"server": "openai-chat", "text": HONEST, "breaks": 5000, "size": 700}
    got = b""
    with pytest.raises(httpx.RemoteProtocolError):
        with httpx.stream("POST", f"{plain.address}/x", json=body, **LOCAL) as answer:
            for part in answer.iter_raw():
                got += part
    assert len(got) > 3000 and _sent("openai-chat", HONEST).startswith(got)


def test_a_request_that_is_no_stream_passes_unchanged(plain):
    answer = httpx.get(f"{plain.address}/v1/models?a=1&b=%20", **LOCAL)
    assert answer.json() == {"path": "/v1/models", "query": "a=1&b=%20"}
    answer = httpx.get(f"{plain.address}/error", **LOCAL)
    direct = httpx.get(f"{plain.direct}/error", **LOCAL)
    assert (answer.status_code, answer.content) == (404, direct.content) and answer.headers["x-reason"] == "no model"
    httpx.delete(f"{plain.address}/api/delete", headers={"Authorization": "Bearer key"}, **LOCAL)
    sent = plain.upstream.headers[-1]
    assert sent["authorization"] == "Bearer key" and sent["accept-encoding"] == "identity"
    assert plain.address.removeprefix("http://") not in sent["host"]
    seen = len(plain.lines)
    whole = httpx.post(f"{plain.address}/v1/embeddings", **LOCAL)
    assert whole.json()["path"] == "/v1/embeddings"
    assert plain.lines[seen:] == ["POST /v1/embeddings: passed on unwatched: not streamed"]
    strange = httpx.get(f"{plain.address}/v1/models", headers={"Host": "evil.example"}, **LOCAL)
    assert strange.status_code == 400


def test_a_server_that_is_not_there_is_an_error_in_json():
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        upstream = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with served(application(upstream, MonitorSettings(), print)) as address:
            answer = httpx.post(f"{address}/v1/chat/completions", json={}, **LOCAL)
            assert health(address) == 503
    assert answer.status_code == 502 and "does not answer" in answer.json()["error"]["message"]


def health(address: str) -> int:
    return httpx.get(f"{address}/health", **LOCAL).status_code


def test_health_is_that_of_the_server(plain):
    async def loading(scope: Any, receive: Any, send: Any) -> None:
        await JSONResponse({}, 503)(scope, receive, send)

    with served(loading) as direct, served(application(direct, MonitorSettings(), print)) as address:
        assert (health(address), health(plain.address)) == (503, 200)


@settings(max_examples=30)
@given(
    server=st.sampled_from(sorted(SERVERS)),
    cuts=st.lists(st.integers(1, 300), min_size=1, max_size=30),
    text=st.lists(st.sampled_from(["tea ", "a\n", "我 ", "\n\n", "\r\n", "data: ", "x"]), max_size=30).map("".join),
)
def test_whatever_pieces_arrive_the_same_bytes_leave(server, cuts, text):
    data = _sent(server, f"{text} ." if text.strip() else ".")
    watch = StreamWatch(MonitorSettings(), server not in LINES)
    passed = b""
    place = turn = 0
    while place < len(data):
        size = cuts[turn % len(cuts)]
        passed += watch.feed(data[place : place + size])
        place, turn = place + size, turn + 1
    assert watch.alarm is not None or passed + watch.held == data


TEA, FINE = (SECRET * 60).split(), prose(300).split()


def test_one_looping_choice_of_two_is_cut_when_the_other_has_ended_and_not_before():
    """In both orders; also where every chunk has a new id."""
    for order in ({0: FINE, 1: TEA}, {1: TEA, 0: FINE}):
        data = events(choices_of(order, {})).encode()
        watch = StreamWatch(MonitorSettings(), True, Asked("", 2))
        assert watch.feed(data) + watch.held == data and watch.alarm is None
        watch = StreamWatch(MonitorSettings(), True, Asked("", 2))
        passed = watch.feed(events(choices_of(order, {0: 150})).encode())
        assert watch.alarm is not None and passed.rstrip().endswith(b'"finish_reason": "stop"}]}')
        assert FINE[149].encode() in passed and b'"index":1' in watch.ending()


def test_a_choice_that_has_not_begun_is_waited_for():
    data = events([*choices_of({0: TEA}, {}), *choices_of({1: FINE}, {1: 200})]).encode()
    watch = StreamWatch(MonitorSettings(), True, Asked("", 2))
    passed = watch.feed(data)
    assert watch.alarm is not None and b'"finish_reason": "stop"' in passed
    alone = StreamWatch(MonitorSettings(), True)
    assert len(alone.feed(data)) < len(data) / 2


@pytest.mark.parametrize(("end", "finish"), [(b"\n", None), (b"\r", ""), (b"\r\n", None)])
def test_however_lines_end_they_are_passed_on_at_once_and_cut_behind_an_event(end, finish):
    objects = [chat_chunk(f"{word} ", finish=finish, id=word) for word in TEA]
    data = events(objects).encode().replace(b"\n", end)
    watch = StreamWatch(MonitorSettings(), True)
    passed = b""
    for place in range(0, len(data), 50):
        passed += watch.feed(data[place : place + 50])
        if watch.alarm is not None:
            break
        assert len(data[: place + 50]) - len(passed) < 120
    assert watch.alarm is not None and data.startswith(passed.rstrip(b"\n\r"))
    assert re.search(rb"(\n\n|\r\r|\r\n\r\n)\n*$", passed)


def test_what_a_request_asks_for():
    for row in rows_of("requests.jsonl"):
        assert asked_in(json.dumps(row["body"]).encode())[:2] == (row["prompt"], row["answers"])
    assert asked_in(b"no json") == Asked()


def test_copies_that_were_asked_for_pass_and_others_are_cut(plain):
    lines = "The lamp was opened again and the river went on to the sea.\n" * 10
    asked = {"messages": [{"role": "user", "content": "Write ten lines."}]}
    assert ask(plain, "openai-chat", lines, **asked) == _sent("openai-chat", lines)
    assert b"repetition_detected" in ask(plain, "openai-chat", lines)


@pytest.mark.parametrize("path", ["/v1/models/a%20b%3Fc%2Fd", "/v1/m%C3%BC//%E6%88%91/"])
def test_a_path_is_passed_on_as_it_was_sent(path, plain):
    with served(echo) as direct, served(application(f"{direct}/base/", MonitorSettings(), print)) as address:
        assert raw_get(address, f"{path}?a=%2F&b") == f"/base{path}?a=%2F&b"


@pytest.mark.parametrize("path", ["/../x", "/v1/%2E./x", "/v1/./x", "/..%5cx"])
def test_a_path_that_leads_elsewhere_is_refused(path, plain):
    assert "a path with . or .. is not passed on" in raw_get(plain.address, path)


USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def test_a_cut_stream_has_the_usage_that_was_asked_for_and_no_other(plain, server="openai-chat"):
    asked = {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]}
    data = ask(plain, server, LOOPING, **USAGE, **asked)
    assert data.endswith(b"data: [DONE]\n\n")
    *said, finish, last = _objects(server, data)
    usage = {"prompt_tokens": 8, "completion_tokens": len(said), "total_tokens": 8 + len(said)}
    assert finish["choices"] and last["choices"] == [] and last["usage"] == usage and last["id"] == finish["id"]
    assert last["sinkscope"] == {"usage": "estimated"}
    assert b"usage" not in ask(plain, server, LOOPING, **asked)
    assert ask(plain, server, HONEST, **USAGE) == _sent(server, HONEST)


def test_the_usage_that_a_server_says_in_each_chunk_is_passed_on():
    watch = StreamWatch(MonitorSettings(), True, Asked("", 1, "", None, 5))
    usage = {"prompt_tokens": 70, "completion_tokens": 9, "total_tokens": 79}
    watch.feed(events([{**chat_chunk(f"{word} "), "usage": usage} for word in TEA]).encode())
    (last,) = [one for one in _objects("openai-chat", watch.ending()) if not one["choices"]]
    assert last["usage"] == usage and "sinkscope" not in last


def counted(address: str) -> dict[str, float]:
    """The counts at /metrics, without those of the library."""
    answer = httpx.get(f"{address}/metrics", **LOCAL)
    assert answer.headers["content-type"].startswith("text/plain; version=")
    rows = [line.rsplit(" ", 1) for line in answer.text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("sinkscope_"): float(value) for name, value in rows if "_created" not in name}


def test_counts_by_model_and_a_line_of_json_for_each_alarm():
    told = list[dict[str, Any]]()
    logged = list[str]()
    code = "".join(f' {{"id": {number}, "name": "item", "done": false}},\n' for number in range(60))
    with served(Upstream().app()) as direct:
        with served(application(direct, MonitorSettings(), logged.append, told=told.append)) as address:
            here = SimpleNamespace(address=address)
            assert counted(address) == {}
            data = ask(here, "openai-chat", LOOPING, model="asked", max_tokens=500)
            written = sum(bool(one["choices"][0]["delta"]) for one in _objects("openai-chat", data))
            ask(here, "openai-chat", HONEST, model="asked")
            ask(here, "llama.cpp", LOOPING, model="asked", n_predict=-1)
            ask(here, "ollama-chat", code)
            found = counted(address)
    assert found == {
        'answers_total{model="m"}': 3, 'answers_total{model="asked"}': 1,
        'alarms_total{model="m",verdict="loops"}': 1, 'alarms_total{model="m",verdict="suspicious"}': 1,
        'alarms_total{model="asked",verdict="loops"}': 1, 'alarms_total{model="asked",verdict="suspicious"}': 0,
        'cuts_total{model="m"}': 1, 'cuts_total{model="asked"}': 1,
        'saved_tokens_total{model="m"}': 500 - written, 'saved_tokens_total{model="asked"}': 0,
    }  # fmt: skip
    assert [(one["model"], one["id"], one["verdict"], one["cut"], one["saved"]) for one in told] == [
        ("m", "cmpl-1", "loops", True, 500 - written),
        ("asked", None, "loops", True, None),
        ("m", None, "suspicious", False, None),
    ]
    assert not logged and all(datetime.fromisoformat(one["time"]) for one in told)
    assert "tea" not in json.dumps(told) and told[0]["request"] == "POST /v1/chat/completions"


def test_invented_names_of_models_do_not_fill_the_memory():
    counts = Counts()
    for number in range(300):
        counts.answer(f"m{number}")
    names = {line for line in counts.text()[0].decode().splitlines() if line.startswith("sinkscope_answers_total")}
    assert len(names) == MOST_MODELS + 1 and 'sinkscope_answers_total{model="other"} 200.0' in names


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application that answers with the path as it was sent."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": scope["raw_path"] + b"?" + scope["query_string"]})


def raw_get(address: str, path: str) -> str:
    """The body of the answer to a path that no client has changed."""
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=60)
    connection.putrequest("GET", path)
    connection.endheaders()
    body = connection.getresponse().read().decode()
    connection.close()
    return body


def test_the_command_serves_until_ctrl_c_without_torch_and_logs_no_content():
    upstream = Upstream()

    with served(upstream.app()) as direct:
        words = [sys.executable, "-X", "importtime", "-m", "sinkscope", "loops", "--proxy", direct, "--port", "0"]
        pipe = subprocess.PIPE
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed, env=environment)
        try:
            address = process.stdout.readline().split()[0]
            body = {"server": "ollama-chat", "text": LOOPING}
            data = httpx.post(f"{address}/api/chat", json=body, timeout=60, **LOCAL).content
            assert _objects("ollama-chat", data)[-1]["done_reason"] == "length"
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    said = [line for line in err.splitlines() if not line.startswith("import time:")]
    assert len(said) == 1 and said[0].startswith("POST /api/chat: a loop at token") and "tea" not in err
    container = (Path(__file__).parents[2] / "Containerfile").read_text()
    assert {"click", "pydantic", *(name.replace("_", "-") for name in NEEDS)} <= set(container.split())
    assert process.returncode == 0 and not [line for line in err.splitlines() if line.endswith((" torch", " numpy"))]
