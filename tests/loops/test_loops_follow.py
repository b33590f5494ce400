"""`sinkscope loops --follow`: planted loops in streams, at the token where the monitor fed by hand triggers."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from loop_texts import prose
from server_streams import SERVERS, chat_chunk, choices_of, chunks, events

from sinkscope.errors import SinkscopeWarning
from sinkscope.files.store import json_lines
from sinkscope.loops import Alarm, PaperSettings, Watch, check, check_file
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.outputs import split

LOOP = "one more cup of tea, "
TEXT = f"{prose(150)} {LOOP * 25}"
PAPER = PaperSettings()


def said(text: str) -> list[dict[str, Any]]:
    """Chunks of a chat completion."""
    return [chat_chunk(piece) for piece in chunks(text)]


class Slow(io.BytesIO):
    """A pipe that never has more than a few bytes."""

    def read1(self, size: int | None = -1) -> bytes:
        return super().read(min(7, size or 1))


def _follow(data: str, settings: Settings | None = None) -> list[Alarm]:
    return list(Watch(settings).follow(Slow(data.encode())))


def test_an_answer_has_one_alarm_although_it_loops_ten_times():
    again = " ".join(f"{prose(400, number)} {'round and round it goes ' * 60}" for number in range(9))
    (alarm,) = _follow(f"{TEXT} {again}")
    assert alarm.tail.period == len(split(LOOP)) and sorted(split(alarm.text)) == sorted(split(LOOP))
    code = "x = x + 1\n" * 40
    doubt, loop = _follow("\n".join(f"{code}{prose(400, number)}" for number in range(5)) + f" {LOOP * 60}")
    assert (doubt.cut, loop.cut) == (False, True)  # what is worse is told after what may be honest


ORIGINS = {
    "openai": ("cmpl-1", "m"),
    "responses": ("r", None),
    "anthropic": ("m", None),
    "ollama": (None, "m"),
    "llama.cpp": (None, None),
}


@pytest.mark.parametrize("server", SERVERS)
def test_json_has_a_line_for_each_alarm_with_time_model_and_id(server, tmp_path, typed):
    sent = SERVERS[server](TEXT)
    (tmp_path / "a.txt").write_text(json_lines(sent) if server.startswith("ollama") else events(sent))
    (told,) = map(json.loads, typed(f"loops {tmp_path}/a.txt --follow --json -", 3).out.splitlines())
    assert (told["id"], told["model"]) == ORIGINS[server.split("-")[0]]
    assert (told["verdict"], told["period"]) == ("loops", 6) and "cup of" in told["text"]
    assert datetime.fromisoformat(told["time"]).tzinfo is not None


def test_choices_are_watched_apart():
    said = {1: [*prose(150).split(), *["the", "lamp", "and", "then"] * 30], 0: prose(270, 1).split()}
    sent = [{**chunk, "id": "chatcmpl-1"} for chunk in choices_of(said, {0: 270, 1: 270})]
    watch = Watch()
    (alarm,) = watch.follow(io.BytesIO(events(sent).encode()))
    assert alarm.stream == "choice 1 of chatcmpl-1" and alarm.tail.period == 4
    assert (len(watch.checked), len(watch.open)) == (2, 0)


def test_json_lines_are_records_or_pieces():
    ids = [*range(400), *[7, 8, 9] * 100]
    records = json_lines([{"text": prose(50)}, {"tokens": ids}, {"output": TEXT}])
    assert [a.stream for a in _follow(records)] == ["line 2", "line 3"]
    (alarm,) = _follow(json_lines([{"tokens": ids}]), settings=PAPER)
    assert alarm.stream == "line 1" and alarm.token == check(ids, settings=PAPER).records[0].detected
    (alarm,) = _follow(json_lines([{"tokens": ["\x1b[2J", "b\n"] * 200}]))
    assert str(alarm).isprintable() and "\\x1b[2Jb\\n" in str(alarm)


@pytest.mark.parametrize(
    "bad",
    [
        '{"choices": null}',
        '{"choices": [{"index": 0, "delta": 5}]}',
        '{"error": {"message": "slow"}}',
    ],
)
def test_a_line_that_cannot_be_read_does_not_end_the_watch(bad):
    sent = events(said(TEXT)).split("data: ")
    sent.insert(5, f"{bad}\n\n")
    watch = Watch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SinkscopeWarning)
        (alarm,) = watch.follow(io.BytesIO("data: ".join(sent).encode()))
    assert alarm.tail is not None and watch.skipped <= 1


HEADERS = "HTTP/1.1 100 Continue\n\nHTTP/1.1 200 OK\nServer: x\nContent-Type: text/event-stream\n\n"
BEFORE = {
    "nothing": "",
    "keep-alive": ": keep-alive\n\n" * 330,
    "headers": HEADERS,
    "all": HEADERS + ": OPENROUTER PROCESSING\n\n" * 200,
}
ENDS = {"CR": "\r", "CRLF": "\r\n", "LF": "\n"}


@pytest.mark.parametrize(("before", "end"), [*((before, "LF") for before in BEFORE), *(("all", end) for end in ENDS)])
def test_what_comes_before_an_answer_and_how_lines_end_change_nothing(before, end):
    """In a file and in a pipe."""
    for text, verdict in ((TEXT, "loops"), (prose(100), "clean")):
        data = (BEFORE[before] + events(said(text))).replace("\n", ENDS[end]).encode()
        piped = [alarm.tail.period for alarm in Watch().follow(Slow(data))]
        assert piped == [6] * (verdict == "loops")
        (record,) = check_file(io.BytesIO(data), name="x.txt").records
        assert record.verdict == verdict


@pytest.mark.parametrize("blanks", ["", "\n" * 330, HEADERS])
def test_lines_of_json_behind_blank_lines_and_headers_are_read(blanks):
    pieces = [{"response": piece, "done": False} for piece in chunks(TEXT)]
    (alarm,) = _follow(blanks + json_lines(pieces))
    assert alarm.stream == "stream 0"


def test_new_ids_and_empty_reasons_to_finish_end_no_answer():
    watch = Watch()
    sent = [chat_chunk(piece, finish="", id=number) for number, piece in enumerate(chunks(TEXT))]
    (alarm,) = watch.follow(io.BytesIO(events(sent).encode()))
    assert alarm.tail is not None and [one.verdict for one in watch.checked] == ["loops"]


def test_answers_that_follow_each_other_stay_apart_where_ids_are_of_answers():
    whole = [{"id": f"cmpl-{n}", "choices": [{"text": prose(90, n), "finish_reason": "stop"}]} for n in range(6)]
    watch = Watch()
    assert not list(watch.follow(io.BytesIO(json_lines(whole).encode()))) and len(watch.checked) == 6
    mixed = []
    for one, other in zip(chunks(TEXT), chunks(prose(len(chunks(TEXT)))), strict=True):
        mixed += [chat_chunk(one, id="a"), chat_chunk(other, id="b")]
    watch = Watch()
    assert len(list(watch.follow(io.BytesIO(events(mixed).encode())))) == 1
    assert sorted(one.verdict for one in watch.checked) == ["clean", "loops"]


def test_what_may_be_honest_is_told_and_is_no_loop(tmp_path, typed):
    (tmp_path / "a.txt").write_text('  {"id": 1, "name": "item", "done": false},\n' * 20)
    told = typed(f"loops {tmp_path}/a.txt --follow").out
    assert told.startswith("perhaps honest repetition in a.txt at token ") and told.count("\n") == 1
    assert typed(f"loops {tmp_path}/a.txt").out.endswith("a.txt is suspicious.\n")


LINE = "The lamp was opened again and the river went on to the sea.\n"


@pytest.mark.parametrize(("options", "code"), [("", 3), ("--cut none", 0), ("--cut exact --follow", 3)])
def test_checker_and_follow_say_the_same(options, code, tmp_path, typed):
    (tmp_path / "a.txt").write_text(LINE * 10)
    typed(f"loops {tmp_path}/a.txt {options}", code)
    typed(["loops", str(tmp_path / "a.txt"), "--prompt", "Write ten lines.", *options.split()], 0)
    (tmp_path / "b.txt").write_text("".join(f"{i}. Mona Ali\n" for i in range(41, 141)))
    typed(f"loops {tmp_path}/b.txt {options}", 3 if options == "" else 0)


def test_a_stream_that_breaks_off_keeps_its_alarms():
    class Broken(Slow):
        def read1(self, size=-1):
            data = super().read1(size)
            if not data:
                raise ConnectionResetError("reset by peer")
            return data

    with pytest.warns(SinkscopeWarning, match="breaks off: reset by peer"):
        assert len(list(Watch().follow(Broken(TEXT.encode()), form="text"))) == 1


def test_text_before_bytes_that_are_no_text_counts():
    with pytest.warns(SinkscopeWarning, match="not UTF-8 text"):
        assert len(list(Watch().follow(io.BytesIO(TEXT.encode() + b"\xff"), form="text"))) == 1


def test_outputs_that_have_ended_are_not_kept_for_ever():
    watch = Watch()
    assert not list(watch.follow(io.BytesIO(b'{"text": "a"}\n' * 999), form="jsonl")) and len(watch.checked) < 99


def test_exit_codes_and_the_first_loop(tmp_path, typed):
    for text, code in ((prose(900), 0), (f"{TEXT} {prose(600, 1)} {'round it goes ' * 90}", 3)):
        (tmp_path / "a.txt").write_text(text)
        assert typed(f"loops {tmp_path}/a.txt --follow --first", code).out.count("\n") == bool(code)


@pytest.fixture
def process():
    command = [sys.executable, "-m", "sinkscope", "loops", "--follow"]
    pipe = subprocess.PIPE
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a shell lets its background ignore Ctrl-C
    started = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, preexec_fn=heed)
    yield started
    started.kill()
    started.wait()


def test_an_alarm_comes_while_the_pipe_is_open_and_ctrl_c_leaves_cleanly(process):
    detected = check(TEXT).records[0].detected
    words = TEXT.split(" ")
    sent = 0
    os.set_blocking(process.stdout.fileno(), False)
    seen = b""
    while not seen and sent < len(words):
        process.stdin.write(f"{words[sent]} ".encode())
        sent += 1
        if len(split(" ".join(words[:sent]))) >= (detected or 0):
            for _ in range(600):
                if seen := process.stdout.read() or b"":
                    break
                time.sleep(0.05)
            break
    assert f"at token {detected}: period {len(split(LOOP))}".encode() in seen and process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and process.stderr.read().strip() == b"interrupted"
