"""What a model wrote in texts, chats, records and one stream: only that is judged, while it arrives and at its end."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from typing import Any

import pytest
from loop_texts import prose
from refusals import refused
from repository import ROOT
from served import served

from sinkscope.files.store import json_lines
from sinkscope.loops import LoopCheck, Piece, Watch, check, check_file
from sinkscope.loops.text.answers import pieces_in
from sinkscope.loops.text.outputs import split

LOG, SHORT, SLEPT = "INFO retry the same request now\n" * 60, "It waits for a lock.", "I went home and slept. " * 30
ASKED, HELLO = "Write the word hello 100 times.", "hello " * 100
TEA = "one more cup of tea, "
LOOP, FINE = f"{prose(150)} {TEA * 25}", prose(150)


def records_in(*rows: Any) -> tuple[Any, ...]:
    return check_file(io.BytesIO(json_lines(rows).encode())).records


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


RECORDS: dict[str, Any] = {
    "chat": lambda asked, answer: {"messages": [said("system", LOG), said("user", asked), said("assistant", answer)]},
    "instruction": lambda asked, answer: {"instruction": asked, "input": "", "output": answer},
    "log": lambda asked, answer: {"request": {"messages": [said("user", asked)]}, "response": answer},
    "served": lambda asked, answer: {"messages": [said("user", asked)], "choices": [{"message": said("", answer)}]},
    "parts": lambda asked, answer: {"prompt": asked, "message": said("assistant", [{"type": "text", "text": answer}])},
}


@pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)
@pytest.mark.parametrize(
    ("asked", "answer", "verdict"),
    [
        (LOG, SHORT, "clean"),
        ("Why?", SLEPT, "loops"),
        (ASKED, HELLO, "clean"),
        ("Write hello 40 times.", HELLO, "loops"),
    ],
)
def test_only_what_the_model_wrote_is_judged_and_what_was_asked_for_is_no_loop(record, asked, answer, verdict):
    (found,) = records_in(record(asked, answer))
    assert found.verdict == verdict and found.tokens == len(split(answer))


def test_each_answer_of_a_chat_and_of_a_list_is_an_output():
    turns = [said("user", "so?"), said("assistant", SHORT), said("tool", LOG), said("assistant", SLEPT)]
    for record in ({"messages": turns}, {"output": [SHORT, SLEPT]}):
        found = [(one.name, one.verdict) for one in records_in(record)]
        assert found == [("line 1 answer 1", "clean"), ("line 1 answer 2", "loops")]
    (once,) = records_in({"message": {"content": "Yes.", "reasoning": FINE, "reasoning_content": FINE}})
    assert once.tokens == len(split(FINE)) + 2, "a reasoning in two fields is read once"


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [{"message": {"content": None, "a_field_of_tomorrow": FINE}}]},
        {"model": "m", "response": "", "done": True},
        {"text": "", "tokens": []},
    ],
)
def test_an_answer_without_text_is_never_clean(answer):
    found = check_file(io.BytesIO(json_lines([{"text": FINE}, answer]).encode()))
    assert [one.verdict for one in found.records] == ["clean", "empty"] and found.exit_code == 1


def test_bad_lines_are_counted_and_named_and_a_field_says_where_answers_are(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    good = json_lines([{"text": FINE}, {"error": "slow"}, {"a": 1}, {"text": SLEPT}])
    (tmp_path / "x.jsonl").write_text(good.replace("\n", "\n{broken\n", 1))
    out = typed("loops x.jsonl --json x.json", 3).out
    assert "Skipped 3: x.jsonl line 2 is no output of a model" in out
    assert [one.verdict for one in LoopCheck.load("x.json").records] == ["clean", "loops"]
    (tmp_path / "y.jsonl").write_text(json.dumps({"log": {"said": [FINE, SLEPT]}, "text": FINE}))
    assert "y.jsonl loops" in typed("loops y.jsonl --field log.said.1", 3).out
    assert "no field log.x: there are said" in typed("loops y.jsonl --field log.x", 2).err
    out = typed("loops x.jsonl y.jsonl", 3).out
    assert "Of 3 outputs in 2 files: 1 loops and 2 clean." in out and "x.jsonl line 5" in out


class Slow(io.BytesIO):
    """A pipe that never has more than a few bytes, and then breaks off, if it is to."""

    breaks = False

    def read1(self, size: int | None = -1) -> bytes:
        data = super().read(min(7, size or 1))
        if not data and self.breaks:
            raise ConnectionResetError("reset by peer")
        return data


def events(text: str, channel: str = "content", end: str = "\n", index: int = 0) -> str:
    """The words of an answer, as a server sends them."""
    sent = [f": hello{end}{end}"]
    for word in text.split():
        own = {"text": f"{word} "} if channel == "text" else {"delta": {channel: f"{word} "}}
        sent.append(f"data: {json.dumps({'choices': [{'index': index, **own}]})}{end}{end}")
    return "".join(sent)


@pytest.mark.parametrize(("text", "verdict"), [(LOOP, "loops"), (FINE, "clean")])
@pytest.mark.parametrize(
    ("field", "before", "end"),
    [
        ("content", "event: message\r\nid: 7\r\n", "\r\n"),
        ("reasoning_content", "\n\n", "\n"),
        ("text", ": keep-alive\n\n" * 330, "\n"),  # completions
    ],
)
def test_a_stream_is_judged_as_the_text_in_it_and_said_while_it_comes(field, before, end, text, verdict):
    over = {"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": {}}
    data = f"{before}{events(text, field, end)}"
    data += "".join(f"data: {word}{end}{end}" for word in (*map(json.dumps, over), "[DONE]"))
    watch, source = Watch(), Slow(data.encode())
    told = [(one.channel, source.tell() < len(data) * 0.9) for one in watch.read(source)]
    (found,), (plain,) = watch.checked, check(text).records
    assert (found.verdict, found.tokens, found.detected) == (verdict, plain.tokens, plain.detected)
    assert told == [("reasoning" if field == "reasoning_content" else "text", True)] * (verdict == "loops")


def test_a_long_line_is_joined_once():
    """A line that is joined anew with every block takes half a minute here."""
    line = json_lines([{"padding": "x" * 1_000_000, "output": SLEPT}, {"output": FINE}])
    started = time.perf_counter()
    assert [answer.verdict for answer in check_file(Slow(line.encode())).records] == ["loops", "clean"]
    assert time.perf_counter() - started < 5


def test_an_indented_line_is_read_at_once():
    """A search that tries every way to divide the spaces never ends."""
    assert check_file(io.BytesIO((" " * 4000 + json.dumps({"output": SLEPT})).encode())).records[0].verdict == "loops"


@pytest.mark.parametrize("begin", [": keep-alive\n" * 20_000, "\n" * 200_000, " " * 200_000, ":" * 200_000])
def test_what_stands_before_an_answer_is_read_once(begin):
    started = time.perf_counter()
    pieces = [*pieces_in(Slow(begin.encode()), "x.txt", None, print)]
    assert "".join(piece.content for piece in pieces) == (begin if begin.strip() else "")
    assert time.perf_counter() - started < 3


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"prompt": "Why?", "output": [SLEPT, FINE]}, None),
        ([{"response": SLEPT}, {"response": FINE}], None),
        ({"log": {"answers": [SLEPT, FINE]}}, "log.answers"),
    ],
)
def test_a_document_in_several_lines_is_read_as_in_one(value, field, tmp_path):
    checked: list[LoopCheck] = []
    for name, indent in (("in_one.json", None), ("in_several.json", 40)):
        (tmp_path / name).write_text(json.dumps(value, indent=indent))
        checked.append(check_file(tmp_path / name, field=field))
    assert checked[0].records == checked[1].records
    assert [answer.verdict for answer in checked[1].records] == ["loops", "clean"]


def test_a_file_that_cannot_be_read_takes_no_verdict_from_the_others(tmp_path, monkeypatch, typed):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop.txt").write_text(SLEPT)
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "broken.jsonl").write_text("{broken\n{broken\n")
    out = typed("loops empty.txt latin.txt gone.txt broken.jsonl loop.txt --json x.json", 3).out
    checked = LoopCheck.load("x.json")
    verdicts = {answer.name: answer.verdict for answer in checked.records}
    assert verdicts == {
        "empty.txt": "empty",
        "latin.txt": "empty",
        "gone.txt": "empty",
        "broken.jsonl": "empty",
        "loop.txt": "loops",
    }
    assert "Of 5 outputs in 5 files: 1 loops and 4 empty." in out and "empty.txt is empty" in out
    for problem in ("latin.txt is not UTF-8", "cannot read gone.txt", "broken.jsonl line 1 is no output"):
        assert sum(said.startswith(problem) for said in checked.problems) == 1, problem
    assert "empty.txt is empty" in typed("loops empty.txt latin.txt", 2).err, "nothing was read at all"


def test_choices_are_watched_apart():
    watch = Watch()
    assert [one.name for one in watch.read(io.BytesIO((events(LOOP) + events(FINE, index=1)).encode()))] == ["choice 0"]
    assert sorted(one.verdict for one in watch.checked) == ["clean", "loops"]


def test_a_source_that_breaks_off_or_is_no_text():
    watch, source = Watch(), Slow(LOOP.encode())
    source.breaks = True
    assert len(list(watch.read(source))) == 1 and "breaks off: reset by peer" in watch.problems[0]
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


async def server(scope: Any, receive: Any, send: Any) -> None:
    """A server of OpenAI's form whose answer never stops looping."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    while True:
        await send({"type": "http.response.body", "body": events(LOOP).encode(), "more_body": True})
        if (await receive())["type"] == "http.disconnect":
            return


IN_CLIENT, MONITOR = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/measure/loops.md").read_text(), re.M | re.S)


def by_httpx(url: str) -> tuple[Watch, list[str]]:
    """The lines of the page."""
    names: dict[str, Any] = {}
    exec(IN_CLIENT.replace("http://127.0.0.1:8000", url), names)
    return names["watch"], names["written"]


def by_openai(url: str) -> tuple[Watch, list[str]]:
    watch, written = Watch(), list[str]()
    client = pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="none")
    with client.chat.completions.create(model="m", stream=True, messages=[said("user", "Hi")]) as stream:
        for chunk in stream:
            written.append(chunk.choices[0].delta.content or "")
            if [*watch.take(Piece("answer", written[-1]))]:
                break
    return watch, written


@pytest.mark.parametrize("client", [by_httpx, by_openai])
def test_a_client_ends_an_answer_that_loops(client, monkeypatch):
    """Without an end the server would write for ever."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with served(server) as url:
        watch, written = client(url)
    assert "".join(written).startswith(FINE) and len(written) < 2 * len(LOOP.split())
    (channels,) = watch.open.values()
    assert channels["text"].monitor.last.tail.period == len(split(TEA))


def test_the_monitor_of_the_page_finds_what_the_page_says():
    exec(MONITOR, {})
