"""Long lines and large bodies at the proxy: time grows as the length, and nobody waits for the answer of another."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from served import LOCAL, served
from server_streams import chat_chunk

from sinkscope.files.events import LONGEST
from sinkscope.files.long_json import SHORT, parsing
from sinkscope.loops import MonitorSettings
from sinkscope.loops.servers.answers import SLICE, TOO_LONG, StreamWatch, asked_in, asking, at_once
from sinkscope.loops.servers.proxy import application, in_turns

BASE = 1 << 14
WAIT = 0.1
"""Seconds for which work on one answer may hold another client up."""


def prose(size: int) -> str:
    generator = random.Random(1)
    words = "the lamp river sea boat hill garden stone winter letter music glass road house".split()
    return " ".join(generator.choice(words) for _ in range(size // 5))[:size]


def no_end(size: int) -> bytes:
    return b"x" * size


def one_event(size: int) -> bytes:
    return f"data: {json.dumps(chat_chunk(prose(size)))}\n\n".encode()


def base64_event(size: int) -> bytes:
    return b'data: {"type": "image", "b64_json": "' + b"A" * size + b'"}\n\n'


def log_probabilities(size: int) -> bytes:
    tokens = [
        {"token": f"t{place}", "logprob": -place / 7, "top_logprobs": [{"token": "a"}]} for place in range(size // 70)
    ]
    chunk = {**chat_chunk("hello ")}
    chunk["choices"][0]["logprobs"] = {"content": tokens}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def whole_response(size: int) -> bytes:
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": prose(2000)}]}]
    tools = [{"type": "function", "name": f"f{place}", "parameters": {"type": "object"}} for place in range(size // 80)]
    return json.dumps({"id": "r", "object": "response", "tools": tools, "output": output}).encode()


def many_lines_of_an_event(size: int) -> bytes:
    return b"data: {\n" + b'data: "a": 1,\n' * (size // 14) + b'data: "b": 2}\n\n'


def many_events(size: int) -> bytes:
    text = prose(size // 4)
    return b"".join(
        f"data: {json.dumps(chat_chunk(text[place : place + 40]))}\n\n".encode() for place in range(0, len(text), 40)
    )


def carriage_returns(size: int) -> bytes:
    return b"\r" * size


BODIES: tuple[Callable[[int], bytes], ...] = (
    *(no_end, one_event, base64_event, log_probabilities, whole_response, many_lines_of_an_event, many_events),
    carriage_returns,
)
TO_THE_BOUND = {no_end: 1, base64_event: 1, log_probabilities: 4, whole_response: 4, many_lines_of_an_event: 8}
"""Bodies of which little is text, and which part of the bound takes about a second."""


def seconds(body: bytes, chunk: int) -> tuple[float, float, StreamWatch]:
    """How long a watch takes for a body, the longest slice of its work, and the watch."""
    watch, longest, total = StreamWatch(MonitorSettings()), 0.0, 0.0
    works = [watch.feeding(body[place : place + chunk]) for place in range(0, len(body), chunk)]
    for work in [*works, watch.rest()]:
        more = True
        while more:
            begin = time.thread_time()
            more = next(work, "ended") != "ended"
            took = time.thread_time() - begin
            longest, total = max(longest, took), total + took
    return total, longest, watch


@pytest.mark.parametrize("chunk", [1 << 10, 1 << 13, 1 << 16])
@pytest.mark.parametrize("make", BODIES, ids=lambda make: make.__name__)
def test_time_grows_as_the_length(make, chunk):
    """Eight times as many bytes take at most twelve times as long; the processor's time, and the best of five tries."""
    short, long = make(BASE), make(8 * BASE)
    at_once(StreamWatch(MonitorSettings()).feeding(short))
    for _ in range(5):
        one, many = (min(seconds(body, chunk)[0] for _ in range(2)) for body in (short, long))
        if many <= 1.5 * len(long) / len(short) * max(one, 0.001):
            return
    pytest.fail(f"{len(short)} bytes take {one:.3f} s, {len(long)} take {many:.3f} s")


@pytest.mark.parametrize("make", TO_THE_BOUND, ids=lambda make: make.__name__)
def test_up_to_the_bound_no_slice_of_work_is_long(make):
    """Of the processor's time, and the best of three tries."""
    body = make(LONGEST // TO_THE_BOUND[make] - 1000)
    for _ in range(3):
        longest = seconds(body, 1 << 16)[1]
        if longest < WAIT:
            break
    assert longest < WAIT, f"{len(body)} bytes: {longest:.3f} s in one slice"


def test_a_long_text_is_watched_in_slices():
    """Which are counted: how long a slice takes depends on the machine."""
    watch, body = StreamWatch(MonitorSettings()), one_event(1 << 15)
    turns = sum(1 for _ in watch.feeding(body)) + sum(1 for _ in watch.rest())
    assert turns >= (1 << 15) // SLICE


def test_a_line_beyond_the_bound_is_passed_on_unwatched():
    body = b"data: " + b"y" * (LONGEST + 1000)
    watch = StreamWatch(MonitorSettings())
    passed = b"".join(watch.feed(body[place : place + (1 << 16)]) for place in range(0, len(body), 1 << 16))
    held = len(body) - len(passed)
    assert held < 1 << 16  # it is not kept until its end
    assert passed + watch.end() == body and watch.unread == TOO_LONG


@pytest.mark.parametrize("size", [600, 5_000, 40_000])
def test_a_text_in_one_event_has_the_verdict_and_the_place_of_the_same_text_in_many(size):
    text = f"{prose(size // 2)} {'one more cup of tea, ' * (size // 20)}"
    one = StreamWatch(MonitorSettings())
    one.feed(f"data: {json.dumps(chat_chunk(text))}\n\n".encode())
    many = StreamWatch(MonitorSettings())
    for word in text.split(" "):
        many.feed(f"data: {json.dumps(chat_chunk(f'{word} '))}\n\n".encode())
    assert one.alarm is not None and many.alarm is not None
    assert one.alarm.token == many.alarm.token


VALUES = (
    {
        "choices": [{"delta": {"content": 'a\U0001f600\u2028"b'}, "index": 0, "finish_reason": None}],
        "x": [1, 2.5, -1e3, True],
    },
    [{"a": {}}, [], "", None, False, [[[]]]],
    "a text",
)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_long_value_is_parsed_as_a_short_one(value):
    filled = [value, ["z"] * SHORT]
    assert at_once(parsing(json.dumps(filled))) == filled


@pytest.mark.parametrize("text", ['{"a": ', "[1,]", "[1] 2", '["\udcff"]', "nope"])
def test_what_is_no_json_is_none_if_it_is_long_too(text):
    with pytest.raises(ValueError, match=r"."):
        at_once(parsing(" " * 2 + text + ("" if text.endswith(" ") else " " * SHORT)))


def test_a_long_request_is_asked_in_slices():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * (1 << 23)}}
    parts = [{"type": "text", "text": "What is in it? " * 4000}, image]
    body = json.dumps(
        {"model": "m", "n": 2, "max_tokens": 9, "messages": [{"role": "user", "content": parts}]}
    ).encode()
    asked = asked_in(body)
    assert (asked.model, asked.answers, asked.limit) == ("m", 2, 9) and asked.prompt.startswith("What is in it?")
    longest, work, more = 0.0, asking(body), True
    while more:
        begin = time.thread_time()
        more = next(work, "ended") != "ended"
        longest = max(longest, time.thread_time() - begin)
    assert longest < WAIT


# Over sockets


class Upstream:
    """Answers with the bytes that it holds, or says how long the body of the request was."""

    def __init__(self) -> None:
        self.body, self.chunk, self.received = b"", 1 << 10, 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.received, more = 0, True
        while more:
            message = await receive()
            self.received, more = self.received + len(message.get("body", b"")), message.get("more_body", False)
        kind = b"text/event-stream" if scope["method"] == "POST" else b"text/plain"
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        body = self.body if scope["path"] == "/long" else b"data: [DONE]\n\n"
        for place in range(0, len(body), self.chunk):
            part = body[place : place + self.chunk]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


@pytest.fixture(scope="module")
def proxy() -> Iterator[SimpleNamespace]:
    upstream = Upstream()
    with served(upstream) as direct, served(application(direct, MonitorSettings(), lambda _: None)) as address:
        yield SimpleNamespace(address=address, upstream=upstream)


@pytest.mark.parametrize("make", [no_end, one_event, log_probabilities, many_events], ids=lambda make: make.__name__)
def test_no_client_waits_for_the_answer_of_another(make, proxy):
    """While a long answer passes, others are answered."""
    body = make(1 << 17)
    proxy.upstream.body = body
    done = threading.Event()
    got: list[bytes] = []

    def read() -> None:
        got.append(httpx.post(f"{proxy.address}/long", json={}, timeout=300, **LOCAL).content)
        done.set()

    thread = threading.Thread(target=read)
    thread.start()
    answered = 0
    with httpx.Client(timeout=60, **LOCAL) as client:
        while not done.is_set():
            assert client.get(f"{proxy.address}/x").status_code == 200
            answered += 1
    thread.join()
    assert got == [body]
    assert answered  # how long a slice of work may take is asked above


def test_work_gives_others_their_turn():
    order: list[str] = []

    def long_work() -> Any:
        for _ in range(10):
            time.sleep(0.006)
            order.append("work")
            yield
        return "done"

    async def other() -> None:
        for _ in range(5):
            order.append("other")
            await asyncio.sleep(0)

    async def both() -> str:
        task = asyncio.create_task(other())
        done = await in_turns(long_work())
        await task
        return done

    with ThreadPoolExecutor(1) as pool:  # another test may have left a loop in this thread
        assert pool.submit(asyncio.run, both()).result() == "done"
    assert order.index("other") < 3 and order.count("other") == 5 and "other" in order[:4]


def test_a_request_of_any_length_is_passed_on_and_not_held(proxy):
    size = 24 << 20
    parts = (b"x" * (1 << 20) for _ in range(size >> 20))
    answer = httpx.post(f"{proxy.address}/x", content=parts, timeout=60, **LOCAL)
    assert answer.content == b"data: [DONE]\n\n" and proxy.upstream.received == size
    answer = httpx.post(f"{proxy.address}/x", content=b"y" * size, timeout=60, **LOCAL)
    assert answer.status_code == 200 and proxy.upstream.received == size
