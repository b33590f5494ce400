"""`sinkscope loops` on sessions: planted cycles of calls and turns, what is honest, and histories without copies."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_texts import prose
from session_forms import FORMS, Turn, called

from sinkscope.app.cli import main
from sinkscope.errors import SinkscopeError
from sinkscope.loops import MonitorSettings
from sinkscope.loops.text.messages import Message, message_of
from sinkscope.loops.text.sessions import (
    check_history,
    cleaned,
    cycles_of,
    is_session_file,
    masked,
    read_history,
    steps_of,
)

START = [Turn("user", "Find the bug in the parser."), Turn("assistant", "I will read the file first.")]
END = [Turn("assistant", "The bug is in line seven, and I have mended it."), Turn("user", "Thank you.")]
READ = called("read_file", "def parse(text):\n    return text.split()", path="parser.py", request_id="77")
SEARCH = called("search", "no matches", query="bug")


def _verdict(turns: list[Turn], form: str = "openai"):
    name, write = FORMS[form]
    return check_history(read_history(write(turns), name), MonitorSettings(), name).records[0]


@pytest.mark.parametrize("form", FORMS)
def test_twelve_identical_calls_are_a_cycle_in_every_form(form, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    name, write = FORMS[form]
    Path(name).write_text(write([*START, *[READ] * 12]))
    assert main(["loops", name]) == 3
    out = capsys.readouterr().out
    assert f"The session in {name} loops; " in out and " tokens are wasted on repetition." in out
    assert "In session, the assistant repeats itself in messages " in out
    record = _verdict([*START, *[READ] * 12], form)
    assert (record.verdict, record.role, record.repeats) == ("loops", "assistant", 12)
    one = _verdict([*START, READ], form).tokens - _verdict(START, form).tokens
    assert record.wasted == 11 * one
    assert _verdict([*START, *[READ] * 12, *END], form).verdict == "looped"
    assert _verdict([*START, *[READ] * 2, SEARCH, *END], form).verdict == "clean"


def test_what_is_a_cycle_and_what_is_not():
    counted = [called("run_tests", f"attempt {i} failed after 1.{i} s at 12:0{i}:00", target="all") for i in range(8)]
    pages = [called("list", f"page {i}: {prose(5, i)}", page=i, limit=10) for i in range(12)]
    polls = [called("status", f"progress {10 * i} %", job="7") for i in range(10)]
    waits = [called("status", "pending", job="7")] * 3 + [called("status", "done", job="7")]
    edits = [turn for i in range(6) for turn in (called("edit", f"line {i} changed", line=i), READ)]
    assert _verdict([*START, *counted]).verdict == "loops"
    assert _verdict([*START, *[READ, SEARCH] * 4]).verdict == "loops"  # A-B-A-B
    assert _verdict([*START, *[READ, SEARCH, READ] * 4]).verdict == "loops"
    for honest in (pages, polls, waits, edits, [READ] * 3, [READ, SEARCH] * 2):
        assert _verdict([*START, *honest, *END]).verdict == "clean", honest


def test_turns_that_are_said_again_and_texts_that_loop():
    sorry = Turn("assistant", "I am sorry, I cannot find the file. Could you please tell me the name of it again?")
    name = Turn("user", "It is parser.py.")
    assert _verdict([*START, *[name, sorry] * 5]).verdict == "loops"
    said = _verdict([*START, *[name, sorry] * 5, END[1], END[0]])
    assert (said.verdict, said.turns) == ("looped", "4-13")
    looping = Turn("assistant", "one more cup of tea, " * 60)
    assert _verdict([START[0], looping]).verdict == "loops"
    assert _verdict([START[0], looping, *END]).verdict == "looped"
    assert _verdict([Turn("user", "one more cup of tea, " * 60), *END]).verdict == "clean"  # the user may repeat
    short = [turn for i in range(9) for turn in (Turn("user", f"{prose(9, i)}?"), Turn("assistant", "Yes."))]
    assert _verdict(short).verdict == "clean"


def test_ids_times_and_counters_are_masked_and_nothing_else():
    assert masked("job 3f2b8c1e-0000-4000-8000-1234567890ab at 2026-01-02T03:04:05Z took 12 ms") == "job ~ at ~ took ~"
    assert masked("call_8f3a9b2c1d: attempt 3 of 5, item #17, deadbeef1") == "~: ~, item #~, ~"
    assert masked("page 3, 40 % of 120 rows, version 2.1") == "page 3, 40 % of 120 rows, version 2.1"


_turns = st.lists(
    st.sampled_from([READ, SEARCH, *START, *END, Turn("user", "Go on."), Turn("assistant", "I go on and on and on.")]),
    max_size=14,
)


def _kinds(messages: list[Message | None]) -> list[str]:
    return ["result" if message and message.results else message.role for message in messages if message]


@settings(max_examples=60, deadline=None)
@given(
    parts=st.lists(st.tuples(_turns, st.integers(1, 6)), min_size=1, max_size=4), form=st.sampled_from(sorted(FORMS))
)
def test_cleaning_keeps_calls_with_results_neighbours_and_what_it_left(parts, form):
    turns = [START[0], *[turn for some, times in parts for turn in some * times]]
    name, write = FORMS[form]
    history = read_history(write(turns), name)
    before = history.sessions[0]
    text = cleaned(history)
    again = read_history(text, name)
    after = again.sessions[0]
    assert cleaned(again) == text
    assert not cycles_of(steps_of(after))
    places = iter(before.entries)
    assert all(entry in places for entry in after.entries)  # in order, and unchanged
    calls = [call.key for message in after.messages if message for call in message.calls]
    results = [result.key for message in after.messages if message for result in message.results]
    assert len(calls) == len(results) and (calls == results or not all(calls) or not all(results))
    kinds = _kinds(before.messages)
    pairs = set(pairwise(kinds))
    left = _kinds(after.messages)
    assert set(pairwise(left)) <= pairs


@pytest.mark.parametrize("name", ["several.jsonl", "several.json"])
def test_several_sessions(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    sessions = [json.loads(FORMS["openai"][1](turns)) for turns in ([*START, *[READ] * 6], [*START, *END])]
    text = json.dumps(sessions) if name.endswith(".json") else "".join(f"{json.dumps(one)}\n" for one in sessions)
    Path(name).write_text(text)
    assert main(["loops", name, "--clean", f"fewer-{name}"]) == 3
    assert f"Of 2 sessions in {name}, 1 loops and 1 is clean" in capsys.readouterr().out
    left = read_history(Path(f"fewer-{name}").read_text(), name).root
    assert len(left[0]["messages"]) == len(sessions[0]["messages"]) - 10 and left[1] == sessions[1]


def test_outputs_in_json_are_no_session(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("outputs.json").write_text(json.dumps([{"text": "the " * 200}, {"text": prose(60)}]))
    assert main(["loops", "outputs.json"]) == 3
    assert "Of 2 outputs in outputs.json, 1 loops" in capsys.readouterr().out
    Path("a.json").write_text('{"a": ' + "1," * 300)
    assert main(["loops", "a.json", "--format", "text"]) == 3


_names = st.sampled_from(
    "role content type text tool_calls function name arguments id tool_call_id parts functionCall messages input from "
    "value payload message data tool_use tool_result user assistant tool response_item function_call output".split()
)
_json = st.recursive(
    st.none() | st.integers(0, 3) | _names,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(_names, inside, max_size=5),
    max_leaves=20,
)


@settings(max_examples=100, deadline=None)
@given(data=_json, lines=st.booleans())
def test_any_json_is_read_or_refused(data, lines):
    text = json.dumps(data)
    if lines and isinstance(data, list):
        text = "\n".join(map(json.dumps, data)) + "\n"
    is_session_file(text, "x.json")
    try:
        history = read_history(text, "x.json")
    except SinkscopeError as error:
        assert "\n" not in str(error)
        return
    check_history(history, MonitorSettings(), "x.json")
    assert cleaned(read_history(cleaned(history), "x.json")) == cleaned(history)


def test_a_message_of_no_form_is_none():
    assert message_of({"type": "event_msg", "payload": {}}) is None
    with pytest.raises(SinkscopeError, match="is no chat history"):
        read_history('[{"type": "event_msg"}]', "x.json")


def test_calls_without_any_results_are_compared_by_their_arguments():
    def calls(paths: list[str]) -> Any:
        messages = [
            {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": p}}]} for p in paths
        ]
        return check_history(read_history(json.dumps(messages), "x.json"), MonitorSettings(), "x.json").records[0]

    assert calls(["a.py"] * 6).verdict == "loops" and calls([f"{c}.py" for c in "abcdef"]).verdict == "clean"
