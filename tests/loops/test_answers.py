"""What a model wrote in texts, chats, records and one stream: only that is judged, while it arrives and at its end."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from itertools import zip_longest
from typing import Any

import pytest
from loop_texts import prose
from refusals import refused
from repository import ROOT
from served import served

from sinkscope.files.store import json_lines
from sinkscope.loops import CheckedOutput, LoopCheck, Watch, check, check_file
from sinkscope.loops.text.outputs import split

LOG, SHORT, SLEPT = "INFO retry the same request now\n" * 60, "It waits for a lock.", "I went home and slept. " * 30
ASKED, HELLO = "Write the word hello 100 times.", "hello " * 100
TEA = "one more cup of tea, "
LOOP, FINE = f"{prose(150)} {TEA * 25}", prose(150)


class Slow(io.BytesIO):
    """A pipe that never has more than a few bytes."""

    def read1(self, size: int | None = -1) -> bytes:
        return super().read(min(7, size or 1))


def records_in(*rows: Any) -> tuple[CheckedOutput, ...]:
    return check_file(io.BytesIO(json_lines(rows).encode())).records


# Records


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


RECORDS: dict[str, Any] = {
    "chat": lambda asked, answer: {"messages": [said("system", LOG), said("user", asked), said("assistant", answer)]},
    "instruction": lambda asked, answer: {"instruction": asked, "input": "", "output": answer},
    "log": lambda asked, answer: {"request": {"messages": [said("user", asked)]}, "response": answer},
    "served": lambda asked, answer: {
        "messages": [said("user", asked)],
        "choices": [{"index": 0, "message": said("assistant", answer)}],
    },
    "parts": lambda asked, answer: {"prompt": asked, "message": said("assistant", [{"type": "text", "text": answer}])},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
def test_only_what_the_model_wrote_is_judged_and_what_was_asked_for_is_no_loop(record):
    for asked, answer, verdict in (
        (LOG, SHORT, "clean"),
        ("Why?", SLEPT, "loops"),
        (ASKED, HELLO, "clean"),
        (ASKED.replace("100", "40"), HELLO, "loops"),
    ):
        (found,) = records_in(record(asked, answer))
        assert found.verdict == verdict and found.tokens == len(split(answer)), asked


def test_each_answer_of_a_chat_and_of_a_list_is_an_output():
    turns = [said("user", "so?"), said("assistant", SHORT), said("tool", LOG), said("assistant", SLEPT)]
    for record in ({"messages": turns}, {"output": [SHORT, SLEPT]}):
        found = [(one.name, one.verdict) for one in records_in(record)]
        assert found == [("line 1 answer 1", "clean"), ("line 1 answer 2", "loops")]


def test_reasoning_in_two_fields_is_read_once():
    (once,) = records_in({"message": {"content": "Yes.", "reasoning": FINE, "reasoning_content": FINE}})
    assert once.tokens == len(split(FINE)) + 2


EMPTY = [
    {"choices": [{"message": {"content": ""}}]},
    {"choices": [{"message": {"content": None, "a_field_of_tomorrow": FINE}}]},
    {"model": "m", "response": "", "done": True},
    {"text": "", "tokens": []},
]


@pytest.mark.parametrize("answer", EMPTY, ids=json.dumps)
def test_an_answer_without_text_is_never_clean(answer):
    found = check_file(io.BytesIO(json_lines([{"text": FINE}, answer]).encode()))
    assert [one.verdict for one in found.records] == ["clean", "empty"] and found.exit_code == 1


def test_bad_lines_are_counted_and_named_and_a_field_says_where_answers_are(tmp_path, typed):
    lines = [{"text": FINE}, "{broken", {"error": "slow"}, {"a": 1}, {"text": SLEPT}]
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (tmp_path / "x.jsonl").write_text(text)
    out = typed(f"loops {tmp_path}/x.jsonl --json {tmp_path}/x.json", 3).out
    assert "Skipped 3: x.jsonl line 2 is no output of a model" in out
    assert [one.verdict for one in LoopCheck.load(tmp_path / "x.json").records] == ["clean", "loops"]
    (tmp_path / "y.jsonl").write_text(json.dumps({"log": {"said": [FINE, SLEPT]}, "text": FINE}))
    assert "y.jsonl loops" in typed(f"loops {tmp_path}/y.jsonl --field log.said.1", 3).out
    assert "no field log.x: there are said" in typed(f"loops {tmp_path}/y.jsonl --field log.x", 2).err
    out = typed(f"loops {tmp_path}/x.jsonl {tmp_path}/y.jsonl", 3).out
    assert "Of 3 outputs in 2 files: 1 loops and 2 clean." in out and "x.jsonl line 5" in out


# Streams


def chunk(text: str, index: int = 0, finish: str | None = None, **delta: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": index, "delta": {"content": text, **delta}, "finish_reason": finish}]}


def events(chunks: list[dict[str, Any]]) -> str:
    return "".join([": hello\n\n", *(f"data: {json.dumps(one)}\n\n" for one in chunks), "data: [DONE]\n\n"])


def words(text: str, index: int = 0, field: str = "content") -> list[dict[str, Any]]:
    return [chunk("", index, **{field: f"{word} "}) for word in text.split()]


BEFORE = ("", "\n\n", ": keep-alive\n\n" * 330, "event: message\nid: 7\n")


@pytest.mark.parametrize("before", BEFORE, ids=["nothing", "blanks", "comments", "fields"])
@pytest.mark.parametrize(("end", "field"), [("\n", "content"), ("\r\n", "reasoning_content"), ("\n", "text")])
def test_a_stream_is_judged_as_the_text_in_it_and_said_while_it_comes(field, end, before):
    channel = "reasoning" if field == "reasoning_content" else "text"
    for text, verdict in ((LOOP, "loops"), (FINE, "clean")):
        if field != "text":
            sent = words(text, field=field)
        else:  # completions
            sent = [{"choices": [{"index": 0, "text": f"{word} ", "finish_reason": None}]} for word in text.split()]
        data = before + events([*sent, chunk("", finish="stop"), {"choices": [], "usage": {}}])
        watch, source = Watch(), Slow(data.replace("\n", end).encode())
        told = [(one, source.tell()) for one in watch.read(source)]
        (found,), (plain,) = watch.checked, check(text).records
        assert (found.verdict, found.tokens, found.detected) == (verdict, plain.tokens, plain.detected)
        assert [one.channel for one, _ in told] == [channel] * (verdict == "loops")
        assert all(place < len(data) * 0.9 for _, place in told)


def test_choices_are_watched_apart_and_calls_are_one_text():
    mixed = [one for pair in zip_longest(words(LOOP, 0), words(FINE, 1)) for one in pair if one]
    watch = Watch()
    assert [one.name for one in watch.read(io.BytesIO(events(mixed).encode()))] == ["choice 0"]
    assert sorted(one.verdict for one in watch.checked) == ["clean", "loops"]
    calls: list[dict[str, Any]] = []
    for number in range(60):
        for part in ({"name": "look", "arguments": ""}, {"arguments": '{"at": "the old '}, {"arguments": 'lamp"}'}):
            calls.append(chunk("", tool_calls=[{"index": number, "function": part}]))
    (found,) = check_file(io.BytesIO(events(calls).encode())).records
    assert (found.verdict, found.channel) == ("loops", "calls")


def test_a_source_that_breaks_off_or_is_no_text():
    class Broken(Slow):
        def read1(self, size=-1):
            data = super().read1(size)
            if not data:
                raise ConnectionResetError("reset by peer")
            return data

    watch = Watch()
    assert len(list(watch.read(Broken(LOOP.encode())))) == 1 and "breaks off: reset by peer" in watch.problems[0]
    for data, said_of_it in ((b"\xff\xfe text", "is not UTF-8"), (b" \n", "is empty"), (b'{"a": 1}', "no output")):
        with refused(words=[said_of_it]):
            list(Watch().read(io.BytesIO(data)))


def test_an_alarm_comes_while_the_pipe_is_open():
    command = [sys.executable, "-m", "sinkscope", "loops", "--follow"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(LOOP.encode())
        process.stdin.flush()
        assert b"period 6" in process.stdout.readline()  # it would wait for ever
        process.stdin.close()
        assert process.wait(60) == 3


# A client's own lines


async def server(scope: Any, receive: Any, send: Any) -> None:
    """A server of OpenAI's form whose answer never stops looping."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    body = b": hello\n\n"
    while True:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = events(words(LOOP))[: -len("data: [DONE]\n\n")].encode()
        if (await receive())["type"] == "http.disconnect":
            return


BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/measure/loops.md").read_text(), re.M | re.S)
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("library", ["httpx", "openai"])
def test_the_lines_of_the_page_end_an_answer_that_loops(library, monkeypatch, capsys):
    """Without an end the server would write for ever."""
    pytest.importorskip(library)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (code,) = (block for block in BLOCKS if ADDRESS in block and library in block)
    names: dict[str, Any] = {}
    with served(server) as url:
        exec(code.replace(ADDRESS, url), names)
    assert "".join(names["written"]).startswith(FINE) and len(names["written"]) < 2 * len(LOOP.split())
    assert capsys.readouterr().out.count("cup of tea") > 3
    (channels,) = names["watch"].open.values()
    assert channels["text"].monitor.last.tail.period == len(split(TEA))


def test_the_monitor_of_the_page_finds_what_the_page_says():
    (code,) = (block for block in BLOCKS if "monitor.update" in block)
    exec(code, {})
