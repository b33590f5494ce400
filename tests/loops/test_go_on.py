"""The proxy with `--go-on`: answers that loop go on as one stream, against a server that continues."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from loop_texts import prose
from served import LOCAL, served
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sinkscope.loops import MonitorSettings
from sinkscope.loops.servers.held import LAG, HeldText
from sinkscope.loops.servers.proxy import GoOn, application
from sinkscope.loops.servers.ways import Server, Template, found_server
from sinkscope.loops.text.reasoning import reasoning_end_in

COPY = "I will now check the file again and report what I see there. "
START, REST, END = prose(40) + " ", prose(50, 1), prose(30, 2)


class Model:
    """A server whose answers are scripts: each request of one conversation gets the next text.

    Attributes:
        bodies: The bodies of the requests.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.turns = Counter[str]()
        self.left = 0

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append({"path": request.url.path, **body})
        name = body["user"] if "user" in body else body["model"]
        texts = SCRIPTS[name]
        turn = self.turns[name]
        self.turns[name] += 1
        if turn >= len(texts):
            return JSONResponse({"error": {"message": "no more"}}, 500)
        return StreamingResponse(self.parts(body, request.url.path, texts[turn], turn), media_type="text/event-stream")

    async def parts(self, body: dict[str, Any], path: str, said: Any, turn: int) -> Any:
        is_chat = path.endswith("/chat/completions")
        pieces = said if isinstance(said, list) else [("content", said)]
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        about = {"id": f"c{turn}", "object": kind, "created": turn, "model": f"m{turn}"}
        count = 0
        if is_chat:
            yield event({**about, "choices": [choice({"role": "assistant", "content": ""})]})
        try:
            for field, text in pieces:
                if field == "dies":
                    raise ConnectionResetError
                for word in text.split():
                    piece = word if turn == count == 0 else f" {word}"
                    count += 1
                    await asyncio.sleep(body.get("pause", 0))
                    delta: Any = {field: piece}
                    if field == "call":
                        delta = {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
                    if not is_chat:
                        yield event(
                            {
                                **about,
                                "object": "text_completion",
                                "choices": [{"index": 0, "text": piece, "finish_reason": None}],
                            }
                        )
                    else:
                        yield event({**about, "choices": [choice(delta)]})
        except asyncio.CancelledError:
            self.left += 1
            raise
        yield event(
            {
                **about,
                "choices": [choice({}, "stop")] if is_chat else [{"index": 0, "text": "", "finish_reason": "stop"}],
            }
        )
        if body.get("stream_options"):
            yield event({**about, "choices": [], "usage": {"prompt_tokens": 10 + 5 * turn, "completion_tokens": count}})
        yield b"data: [DONE]\n\n"


def choice(delta: Any, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish}


def plain_choice(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": text, "finish_reason": finish}


def event(data: Any) -> bytes:
    return f"data: {json.dumps(data)}\n\n".encode()


LOOP, AGAIN = COPY * 30, "Well, and so it went on and on again. " * 30
NO_MORE = "No more of this today, thank you. " * 30
SCRIPTS: dict[str, list[Any]] = {
    "healthy": [f"{START}{REST}"],
    "early": [LOOP, END],
    "late": [f"{START}{REST} {LOOP}", END],
    "twice": [f"{START}{LOOP}", f"{REST} {AGAIN}", END],
    "thrice": [f"{START}{LOOP}", f"{REST} {AGAIN}", f"So. {NO_MORE}"],
    "the same again": [f"{START}{LOOP}", LOOP, LOOP],
    "counts": [f"{START}{' '.join(f'{n}. Grapefruit' for n in range(1, 90))}", END],
    "quotes": [f"{START}{COPY}{COPY}{REST}"],
    "reasoning": [[("reasoning_content", f"{START}{LOOP}")], END],
    "marks": [f"<think> {START}{LOOP}", END],
    "closed marks": [f"<think> {START}</think> {REST} {LOOP}", END],
    "reasoning twice": [[("reasoning_content", f"{START}{LOOP}")], f"{REST} {LOOP}", END],
    "call": [[("content", START), ("call", LOOP)], END],
    "dies": [f"{START}{LOOP}", [("content", END), ("dies", "")]],
    "no more": [f"{START}{LOOP}"],
}  # fmt: skip


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def plain(model: Model) -> Iterator[SimpleNamespace]:
    app = Starlette(routes=[Route("/{path:path}", model.answer, methods=["POST"])])
    log, told = list[str](), list[dict[str, Any]]()
    server = Server("llama.cpp", None, "</think>")
    with served(app) as direct:
        going = application(direct, MonitorSettings(), log.append, told=told.append, go_on=GoOn(server, whole=True))
        with served(going) as address:
            yield SimpleNamespace(address=address, direct=direct, log=log, told=told)


def ask(
    address: str, script: str, path: str = "/v1/chat/completions", **more: Any
) -> tuple[list[dict[str, Any]], bytes]:
    """The events of an answer, and all its bytes."""
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "So?"}]} if "chat" in path else {"prompt": "So"}
    body = {"model": "m", "user": script, "stream": True, **asked, **more}
    answer = httpx.post(f"{address}{path}", json=body, timeout=60, **LOCAL)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines], answer.content


def text_of(events: list[dict[str, Any]], field: str = "content") -> str:
    said = ""
    for one in events:
        for each in one["choices"]:
            said += (each["delta"].get(field) or "") if "delta" in each else each.get("text", "")
    return said


def shape(events: list[dict[str, Any]]) -> tuple[set[str], list[str]]:
    """The ids, and the reasons to finish."""
    reasons = [each["finish_reason"] for one in events for each in one["choices"] if each.get("finish_reason")]
    return {one["id"] for one in events}, reasons


def test_a_healthy_answer_is_byte_for_byte_that_of_the_server(plain, model):
    for script in ("healthy", "quotes"):
        _, data = ask(plain.address, script)
        model.turns.clear()
        assert data == ask(plain.direct, script)[1]


GOES_ON = {
    "early": f"{COPY}{END}",
    "late": f"{START}{REST} {COPY}{END}",
    "twice": f"{START}{COPY}{REST} Well, and so it went on and on again. {END}",
    "counts": f"{START}1. Grapefruit {END}",
}


@pytest.mark.parametrize("script", GOES_ON)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_that_loops_goes_on_as_one_stream_without_the_copies(script, path, plain, model):
    events, data = ask(plain.address, script, path, stream_options={"include_usage": True}, temperature=0)
    assert text_of(events).split() == GOES_ON[script].split()
    assert shape(events) == ({"c0"}, ["stop"]) and data.endswith(b"data: [DONE]\n\n") and data.count(b"[DONE]") == 1
    seams = len(SCRIPTS[script]) - 1
    assert data.count(b": sinkscope: ") == seams and events[-2]["sinkscope"]["continued"] == seams
    written = len(GOES_ON[script].split())
    usage = events[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert abs(usage["completion_tokens"] - written) <= seams  # the piece at the seam may be shared
    asked = model.bodies[-1]
    assert asked["temperature"] == 0.7 and asked["dry_multiplier"] == 0.8
    kept = asked["messages"][-1]["content"] if "chat" in path else asked["prompt"][2:]
    assert text_of(events).startswith(kept) and kept == kept.rstrip()
    assert [one["verdict"] for one in plain.told] == ["loops"] * seams and all(one["continued"] for one in plain.told)


def test_no_more_than_two_continuations_and_then_it_ends_as_ever(plain):
    for script in ("thrice", "the same again"):
        events, data = ask(plain.address, script)
        assert shape(events) == ({"c0"}, ["length"]) and data.endswith(b"data: [DONE]\n\n")
        assert events[-1]["choices"][0]["stop_reason"] == "repetition_detected"
    events, data = ask(plain.address, "no more")  # the server refuses
    assert shape(events) == ({"c0"}, ["length"]) and text_of(events).split() == f"{START}{COPY}".split()


@pytest.mark.parametrize(
    "more",
    [{"logprobs": True}, {"n": 2}, {"response_format": {"type": "json_schema"}}, {"messages": None}],
    ids=str,
)
def test_some_answers_are_only_cut(more, plain, model):
    for script in ("late", "call"):
        model.turns.clear()
        events, _ = ask(plain.address, script, **(more if script == "late" else {}))
        if more.get("n") != 2 or script == "call":
            assert shape(events)[1] == ["length"] and "continued" not in json.dumps(events)
        assert model.turns[script] == 1


def test_the_limit_of_the_client_holds(plain, model):
    ask(plain.address, "late", max_tokens=400)
    kept = len(f"{START}{REST} {COPY}".split())
    assert abs(model.bodies[-1]["max_tokens"] - (400 - kept)) <= 1
    model.turns.clear()
    events, _ = ask(plain.address, "late", max_tokens=kept - 5)
    assert model.turns["late"] == 1 and shape(events)[1] == ["length"]


def test_a_loop_in_a_reasoning_ends_the_reasoning(plain, model):
    events, _ = ask(plain.address, "reasoning")
    assert text_of(events, "reasoning_content").split() == f"{START}{COPY}".split()
    assert text_of(events).split() == END.split() and shape(events) == ({"c0"}, ["stop"])
    asked = model.bodies[-1]["messages"][-1]["content"]
    assert asked.startswith("<think>\n") and asked.endswith("\n</think>\n\n") and COPY.strip() in asked
    events, _ = ask(plain.address, "marks")
    assert text_of(events).split() == f"<think> {START}{COPY}</think> {END}".split()
    assert model.bodies[-1]["messages"][-1]["content"].endswith(f"{COPY.strip()}\n</think>\n\n")
    assert next(one for one in events if "sinkscope" in one)["sinkscope"]["reasoning"] == "closed"
    events, _ = ask(plain.address, "closed marks")
    assert text_of(events).split() == f"<think> {START}</think> {REST} {COPY}{END}".split()
    events, _ = ask(plain.address, "reasoning twice")
    assert text_of(events).split() == f"{REST} {COPY}{END}".split()


def test_a_reasoning_that_the_template_begins_has_no_mark_in_the_text(model):
    app = Starlette(routes=[Route("/{path:path}", model.answer, methods=["POST"])])
    server = Server("llama.cpp", None, "</think>", opens_reasoning=True)
    with served(app) as direct, served(application(direct, MonitorSettings(), print, go_on=GoOn(server))) as address:
        events, _ = ask(address, "late")
    assert text_of(events).split() == f"{START}{REST} {COPY} </think> {END}".split()
    asked = model.bodies[-1]["messages"][-1]["content"]
    assert asked.startswith(f"<think>\n{START.split()[0]}") and asked.endswith(f"{COPY.strip()}\n</think>\n\n")


def test_a_server_that_dies_while_it_continues_breaks_the_stream(plain):
    with pytest.raises(httpx.RemoteProtocolError):
        ask(plain.address, "dies")
    assert any("the server broke off" in line for line in plain.log)


def test_a_client_that_leaves_ends_the_continuation(plain, model):
    body = {"model": "m", "user": "late", "stream": True, "pause": 0.004, "messages": []}
    with httpx.stream("POST", f"{plain.address}/v1/chat/completions", json=body, **LOCAL) as answer:
        for part in answer.iter_raw():
            if b": sinkscope: " in part:
                break
    for _ in range(200):
        if model.left == 2:  # the one that looped, and its continuation
            break
        time.sleep(0.02)
    assert model.left == 2


def test_two_clients_at_once_get_each_its_own(plain):
    scripts = ["late", "healthy", "twice", "marks"]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda script: ask(plain.address, script, pause=0.001)[0], scripts)]
    assert text_of(found[0]).split() == GOES_ON["late"].split()
    assert text_of(found[1]).split() == SCRIPTS["healthy"][0].split()
    assert text_of(found[2]).split() == GOES_ON["twice"].split()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_an_answer_that_is_not_streamed_is_watched_and_given_whole(path, plain, model):
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "So?"}]} if "chat" in path else {"prompt": "So"}
    for script, expected in (("healthy", SCRIPTS["healthy"][0]), ("late", GOES_ON["late"])):
        body = {"model": "m", "user": script, **asked}
        answer = httpx.post(f"{plain.address}{path}", json=body, timeout=60, **LOCAL)
        assert answer.headers["content-type"] == "application/json"
        whole = answer.json()
        (only,) = whole["choices"]
        said = only["message"]["content"] if "chat" in path else only["text"]
        assert said.split() == expected.split() and only["finish_reason"] == "stop" and whole["usage"]
        assert whole["object"] == ("chat.completion" if "chat" in path else "text_completion")
        assert model.bodies[-1]["stream"] is True
    refused = httpx.post(f"{plain.address}{path}", json={"model": "m", "user": "late", **asked}, **LOCAL)
    assert refused.status_code == 500 and refused.json() == {"error": {"message": "no more"}}


def test_metrics_count_what_went_on(plain):
    for script in ("late", "reasoning", "thrice"):
        ask(plain.address, script)
    text = httpx.get(f"{plain.address}/metrics", **LOCAL).text
    counted = {}
    for line in text.splitlines():
        if line.startswith("sinkscope_") and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            counted[name.split("{")[0]] = counted.get(name.split("{")[0], 0) + float(value)
    assert counted["sinkscope_continued_total"] == 4 and counted["sinkscope_closed_reasonings_total"] == 1
    assert counted["sinkscope_cuts_total"] == 1 and counted["sinkscope_dropped_tokens_total"] > 100
    assert counted["sinkscope_continuation_seconds_total"] > 0


def test_a_server_that_begins_a_new_message_is_continued_by_the_models_own_template(model):
    class Tokenizer:
        bos_token, bos_token_id, eos_token = "<s>", 1, "</s>"
        chat_template = "{{ '<think>' }}...{{ '</think>' }}"

        def apply_chat_template(self, messages: Any, tokenize: bool, add_generation_prompt: bool) -> str:
            return "<s>" + "".join(f"[{one['role']}]{one['content']}" for one in messages) + "[assistant]<think>\n"

        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [1, 5]}

    template = Template(Tokenizer())
    app = Starlette(routes=[Route("/{path:path}", model.answer, methods=["POST"])])
    SCRIPTS["m-template"] = SCRIPTS["reasoning"]
    with served(app) as direct:
        server = Server("transformers", template, template.reasoning_end)
        with served(application(direct, MonitorSettings(), print, go_on=GoOn(server))) as address:
            events, _ = ask(address, "m-template", model="m-template")
    assert template.reasoning_end == "</think>"
    asked = model.bodies[-1]
    assert asked["path"] == "/v1/completions" and asked["stop"] == ["</s>"]
    assert asked["prompt"].startswith(f"[user]So?[assistant]<think>\n{START.split()[0]}")
    assert asked["prompt"].endswith(f"{COPY.strip()}\n</think>\n\n") and asked["prompt"].count("<think>") == 1
    assert text_of(events).split() == END.split() and {one["object"] for one in events} == {"chat.completion.chunk"}


def test_what_a_server_is_is_found_out_by_its_models():
    for owner, name in (("llamacpp", "llama.cpp"), ("vllm", "vllm"), ("library", "ollama"), ("someone", "other")):

        async def models(request: Request, owner: str = owner) -> Response:
            if request.url.path == "/props":
                return JSONResponse({"chat_template": "{{ x }}</think>"})
            return JSONResponse({"data": [{"id": "m", "owned_by": owner}]})

        with served(Starlette(routes=[Route("/{path:path}", models)])) as direct:
            found = found_server(direct, "auto")
            assert found.name == name and found.reasoning_end == ("</think>" if name == "llama.cpp" else "")
            assert ("give --server or --template" in found.note()) == (name == "other")
    assert found_server("http://127.0.0.1:9", "auto").name == "other"
    assert reasoning_end_in("no reasoning") == ""


@pytest.mark.parametrize("size", [1, 5, 40])
def test_what_is_held_is_what_may_be_a_copy(size):
    rng = Random(size)
    text = f"{START}{LOOP}"
    held = HeldText()
    for place in range(0, len(text), size):
        held.feed(text[place : place + size])
        assert len(f"{START}{COPY}") + 1 >= held.safe
    assert held.kept == f"{START}{COPY}".rstrip()
    free = HeldText()
    for word in prose(200, rng.randrange(99)).split():
        free.feed(f"{word} ")
    assert len(free.text[free.safe :].split()) <= LAG + 3


def test_lines_of_json_go_on_as_well():
    """As Ollama sends them: a loop in the text, and one in the reasoning."""
    bodies: list[dict[str, Any]] = []

    async def chat(request: Request) -> Response:
        body = json.loads(await request.body())
        bodies.append(body)
        begins = body["messages"][-1]["role"] == "user"
        text = f"{START}{LOOP}" if begins else END
        field = body["model"] if begins else "content"

        async def parts() -> Any:
            for word in text.split():
                message = {"role": "assistant", "content": "", field: f" {word}"}
                yield (json.dumps({"model": "m", "message": message, "done": False}) + "\n").encode()
            end = {"model": "m", "message": {"role": "assistant", "content": ""}, "done": True, "done_reason": "stop"}
            yield (json.dumps(end) + "\n").encode()

        return StreamingResponse(parts(), media_type="application/x-ndjson")

    server = Server("ollama", None, "</think>")
    with served(Starlette(routes=[Route("/{path:path}", chat, methods=["POST"])])) as direct:
        with served(application(direct, MonitorSettings(), print, go_on=GoOn(server, whole=True))) as address:
            for field in ("content", "thinking"):
                body = {
                    "model": field,
                    "messages": [{"role": "user", "content": "So?"}],
                    "options": {"num_predict": 900},
                }
                for whole in ({}, {"stream": False}):
                    got = httpx.post(f"{address}/api/chat", json={**body, **whole}, timeout=60, **LOCAL)
                    lines = [json.loads(line) for line in got.text.splitlines()]
                    said = "".join(line["message"].get(field) or "" for line in lines)
                    more = "".join(line["message"]["content"] for line in lines) if field == "thinking" else ""
                    assert f"{said} {more}".split() == f"{START}{COPY}{END}".split()
                    assert lines[-1]["done"] is True and lines[-1]["done_reason"] == "stop"
                    assert lines[-1]["sinkscope"]["continued"] == 1
                    assert (len(lines) == 1) == bool(whole)
                    asked = bodies[-1]
                    assert asked["options"]["temperature"] == 0.7 and asked["options"]["num_predict"] < 900
