"""Every format by every channel, for the checker and for the proxy; and formats that have no case of their own."""

from __future__ import annotations

import io
import json
from random import Random
from typing import Any

import pytest
from loop_texts import prose
from server_streams import FIXTURES, filled

from experiments.loopset.formats import CALL, FORMATS, LOOP, OTHER, cases, checked_right, pieces, proxied_right, sent
from sinkscope.loops import MonitorSettings, check_file
from sinkscope.loops.servers.answers import StreamWatch

TABLE = [(name, case.name) for name in FORMATS for case in cases(name)]
FINE = prose(150)
UNSEEN: dict[str, Any] = json.loads((FIXTURES / "unseen_formats.json").read_text())


@pytest.mark.parametrize(("name", "happens"), TABLE)
def test_a_channel_that_loops_is_named_and_nothing_else_loops(name, happens):
    """In pieces of drawn sizes."""
    case = next(case for case in cases(name) if case.name == happens)
    assert checked_right(case, FORMATS[name].lines), "the checker"
    assert proxied_right(case), "the proxy"


def stream_of(form: dict[str, Any], text: str) -> str:
    """A stream of a format: each event has a piece, or all of the text so far."""
    words, sent_text = [f"{word} " for word in text.split()], ""
    for number, word in enumerate(words):
        event = form["piece"].replace("<piece>", json.dumps(word)).replace("<raw>", word)
        sent_text += event.replace("<so far>", json.dumps("".join(words[: number + 1])))
    return sent_text


@pytest.mark.parametrize("name", UNSEEN)
def test_formats_without_a_case_are_read_by_what_they_say(name):
    form = UNSEEN[name]
    for prompt, answer, verdict in (("Why?", LOOP, "loops"), (LOOP, FINE, "clean")):
        if "piece" in form:
            data, file = stream_of(form, answer), "x.sse"
            watch = StreamWatch(MonitorSettings())
            watch.feed(data.encode())
            assert (watch.alarm is not None) == (verdict == "loops")
        else:
            data, file = json.dumps(filled(form["lines"][0], {"prompt": prompt, "answer": answer})), "x.json"
        assert [one.verdict for one in check_file(io.BytesIO(data.encode()), name=file).records] == [verdict]


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **more}


def checked(events: list[dict[str, Any]]) -> list[tuple[str, str, int]]:
    found = check_file(io.BytesIO(sent(FORMATS["chat completions"], events)), name="a.sse").records
    return [(one.verdict, one.channel, one.tokens) for one in found]


SAID = chunk({"role": "assistant", "content": "The harbour was quiet before dawn."})
USAGE = {"usage": {"total_tokens": 15}}
ENDS = {
    "usage beside an empty delta": [chunk({}, "stop"), chunk({"role": "assistant", "content": ""}, None, **USAGE)],
    "a second finish": [chunk({"content": ""}, "stop"), chunk({"content": ""}, "stop", **USAGE)],
    "a second finish with a new id": [chunk({}, "stop"), {**chunk({}, "stop"), "id": "other"}],
    "usage with a new id": [chunk({}, "stop"), {**chunk({"content": ""}), "id": "other", **USAGE}],
    "the word null as the reason until the end": [chunk({}, "null"), chunk({}, "null"), chunk({}, "stop")],
    "no end": [],
}


@pytest.mark.parametrize("end", ENDS)
def test_what_has_no_text_opens_no_answer(end):
    assert checked([SAID, *ENDS[end]]) == [("clean", "text", 7)]


def test_the_word_null_ends_no_answer():
    said = [chunk({"content": f"{word} "}, "null") for word in LOOP.split()]
    assert [one[0] for one in checked([*said, chunk({}, "stop")])] == ["loops"]


def call(index: int | None, text: str, name: str | None = None, id: str | None = None) -> dict[str, Any]:
    about: dict[str, Any] = {"function": {"arguments": text}}
    if index is not None:
        about["index"] = index
    if name is not None:
        about["function"]["name"] = name
    if id is not None:
        about["id"] = id
    return chunk({"tool_calls": [about]})


def test_the_name_of_a_tool_counts_once():
    once = checked([call(0, "", "look"), *(call(0, "{} ") for _ in range(5))])
    assert checked([call(0, "", "look"), *(call(0, "{} ", "look") for _ in range(5))]) == once


@pytest.mark.parametrize(("indices", "ids"), [((0, 1), (None, None)), ((0, 0), ("a", "b")), ((None, None), ("a", "b"))])
def test_calls_are_told_apart_by_index_or_id(indices, ids):
    """Some servers give every call the index 0."""
    texts = {CALL: LOOP, OTHER: FINE}
    events: list[dict[str, Any]] = []
    begun = set[str]()
    for channel, text in pieces(texts, Random(1), mixed=True):
        number = int(channel[-1])
        has_name = channel not in begun
        begun.add(channel)
        events.append(call(indices[number], text, "look" if has_name else None, ids[number]))
    if indices == (0, 0):  # each whole
        events = [call(0, text, "look", ids[int(channel[-1])]) for channel, text in texts.items()]
    assert [one[:2] for one in checked(events)] == [("loops", "call 0")]


def test_one_reasoning_in_two_fields_or_as_text_and_summary_counts_once():
    words = prose(60).split()
    plain = [chunk({"reasoning_content": f"{word} "}) for word in words]
    twice = [chunk({"reasoning_content": f"{word} ", "reasoning": f"{word} "}) for word in words]
    details = [
        chunk({"reasoning": f"{word} ", "reasoning_details": [{"type": "reasoning.text", "text": f"{word} "}]})
        for word in words
    ]
    summary = [
        *plain,
        *(chunk({"reasoning_details": [{"type": "reasoning.summary", "summary": f"{word} "}]}) for word in words),
    ]
    assert checked(plain) == checked(twice) == checked(details) == checked(summary)


def test_pictures_audio_and_base64_are_no_text():
    blob = "iVBORw0KGgoAAAANSUhEUgAA" + "A" * 4000 + "="
    parts = [{"type": "text", "text": "Here it is."}, {"type": "image_url", "image_url": {"url": f"data:{blob}"}}]
    message = {"role": "assistant", "content": parts, "audio": {"data": blob, "transcript": ""}}
    inline = f'{{"rate": 8000, "audio": "{blob}"}} or data:image/png;base64,{"A" * 4000} and the end.'
    for said in (message, {"role": "assistant", "content": inline}):
        data = json.dumps({"choices": [{"index": 0, "message": said}]}).encode()
        (found,) = check_file(io.BytesIO(data), name="x.json").records
        assert found.verdict == "clean" and 4 <= found.tokens < 40


def test_many_equal_calls_in_one_answer_are_a_loop_of_its_calls():
    events: list[dict[str, Any]] = []
    for number in range(60):
        events += [call(number, "", "look", f"id{number}"), call(number, '{"at": "the old '), call(number, 'lamp"}')]
    assert [one[:2] for one in checked(events)] == [("loops", "calls")]
    events = [
        event
        for number in range(60)
        for event in (call(number, "", "look"), call(number, f'{{"at": "{prose(9, number)}"}}'))
    ]
    assert [one[0] for one in checked(events)] != ["loops"]
