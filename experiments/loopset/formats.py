"""Formats of streams and records, by the channels that each can carry, and what the readers make of them.

    python -m experiments.loopset.formats [--out figures/loops_formats.json]

Each format writes an answer with a text, a reasoning and two calls of tools. For each channel that it has, that one
loops and the others do not, in pieces of drawn sizes that alternate where the format lets them; then nothing loops;
then the end comes twice, an error comes in the middle, and the stream is cut off. The checker has to name the one
answer and the channel, and the proxy has to end the answer, or to pass it on byte for byte.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from random import Random
from typing import Any

from experiments.record import Row, record
from experiments.script import run
from sinkscope.files.output import write_atomic
from sinkscope.loops import MonitorSettings, check_file
from sinkscope.loops.servers.answers import StreamWatch

TEXT, THOUGHT, CALL, OTHER = "text", "reasoning", "call 0", "call 1"
CHANNELS = (TEXT, THOUGHT, CALL, OTHER)
LOOP = "I will now check the file again and report what I see there. " * 14
WORDS = "river stone lamp window garden letter morning soldier bridge engine flour violin pocket winter corner".split()
Event = dict[str, Any]
Said = list[tuple[str, str]]
"""Pieces of text, each with its channel."""


@dataclass(frozen=True)
class Format:
    """A format of streams.

    Attributes:
        write: Writes the events of pieces, without the end.
        end: The events that end an answer.
        channels: The channels that it has.
        lines: Whether it has lines of JSON, and else server-sent events.
        mixed: Whether pieces of channels may alternate.
        error: The event that reports an error.
    """

    write: Callable[[Said], list[Event]]
    end: list[Event]
    channels: tuple[str, ...] = CHANNELS
    lines: bool = False
    mixed: bool = False
    error: Event = field(default_factory=lambda: {"error": {"message": "overloaded", "code": 529}})


def _number(channel: str) -> int:
    return int(channel.split()[1])


def _chat(said: Said) -> list[Event]:
    events: list[Event] = [_chunk({"role": "assistant", "content": ""})]
    begun = set[str]()
    for channel, text in said:
        if channel.startswith("call"):
            call: Event = {"index": _number(channel), "function": {"arguments": text}}
            if channel not in begun:
                call |= {"id": f"call_{channel[-1]}", "type": "function"}
                call["function"]["name"] = "look"
            begun.add(channel)
            events.append(_chunk({"tool_calls": [call]}))
        else:
            events.append(_chunk({"content" if channel == TEXT else "reasoning_content": text}))
    return events


def _chunk(delta: Event, finish: str | None = None, **more: Any) -> Event:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


def _completions(said: Said) -> list[Event]:
    return [
        {"id": "c", "model": "m", "choices": [{"index": 0, "text": text, "finish_reason": None}]} for _, text in said
    ]


RESPONSES = {TEXT: "output_text", THOUGHT: "reasoning_summary_text", CALL: "function_call_arguments"}


def _responses(said: Said) -> list[Event]:
    events: list[Event] = [{"type": "response.created", "response": {"id": "r", "model": "m"}}]
    for channel in (CALL, OTHER):
        item = {"type": "function_call", "name": "look", "arguments": "", "call_id": channel}
        if any(one == channel for one, _ in said):
            events.append({"type": "response.output_item.added", "output_index": _number(channel), "item": item})
    for channel, text in said:
        kind = RESPONSES[CALL if channel == OTHER else channel]
        place = _number(channel) if channel.startswith("call") else 5 if channel == TEXT else 6
        events.append({"type": f"response.{kind}.delta", "item_id": f"i{place}", "output_index": place, "delta": text})
    return events


BLOCKS = {
    TEXT: ({"type": "text", "text": ""}, "text_delta", "text"),
    THOUGHT: ({"type": "thinking", "thinking": ""}, "thinking_delta", "thinking"),
    CALL: ({"type": "tool_use", "id": "t", "name": "look", "input": {}}, "input_json_delta", "partial_json"),
}


def _anthropic(said: Said) -> list[Event]:
    events: list[Event] = [{"type": "message_start", "message": {"id": "m", "model": "m", "role": "assistant"}}]
    for index, channel in enumerate(dict.fromkeys(channel for channel, _ in said)):
        block, kind, name = BLOCKS[CALL if channel == OTHER else channel]
        events.append({"type": "content_block_start", "index": index, "content_block": block})
        for one, text in said:
            if one == channel:
                events.append({"type": "content_block_delta", "index": index, "delta": {"type": kind, name: text}})
        events.append({"type": "content_block_stop", "index": index})
    return events


def _ollama(said: Said) -> list[Event]:
    events: list[Event] = []
    for channel, text in said:
        message: Event = {"role": "assistant", "content": ""}
        if channel.startswith("call"):
            message["tool_calls"] = [
                {"function": {"index": _number(channel), "name": "look", "arguments": {"at": text}}}
            ]
        else:
            message["content" if channel == TEXT else "thinking"] = text
        events.append({"model": "m", "message": message, "done": False})
    return events


def _ollama_generate(said: Said) -> list[Event]:
    events: list[Event] = []
    for channel, text in said:
        own = {"response": text} if channel == TEXT else {"response": "", "thinking": text}
        events.append({"model": "m", **own, "done": False})
    return events


def _llama(said: Said) -> list[Event]:
    return [{"index": 0, "content": text, "tokens": [7], "stop": False, "id_slot": 0} for _, text in said]


def _gemini(said: Said) -> list[Event]:
    events: list[Event] = []
    for channel, text in said:
        part: Event = {"text": text, "thought": True} if channel == THOUGHT else {"text": text}
        if channel.startswith("call"):
            part = {"functionCall": {"name": "look", "args": {"at": text}}}
        events.append({"candidates": [{"content": {"parts": [part], "role": "model"}, "index": 0}], "responseId": "r"})
    return events


def _bedrock(said: Said) -> list[Event]:
    events: list[Event] = [{"messageStart": {"role": "assistant"}}]
    for index, channel in enumerate(dict.fromkeys(channel for channel, _ in said)):
        if channel.startswith("call"):
            start = {"toolUse": {"toolUseId": "t", "name": "look"}}
            events.append({"contentBlockStart": {"start": start, "contentBlockIndex": index}})
        for one, text in said:
            delta: Event = {"text": text} if channel == TEXT else {"reasoningContent": {"text": text}}
            if channel.startswith("call"):
                delta = {"toolUse": {"input": text}}
            if one == channel:
                events.append({"contentBlockDelta": {"delta": delta, "contentBlockIndex": index}})
        events.append({"contentBlockStop": {"contentBlockIndex": index}})
    return events


def _cohere(said: Said) -> list[Event]:
    events: list[Event] = [{"type": "message-start", "id": "m"}]
    for channel, text in said:
        if channel.startswith("call"):
            calls = {"function": {"arguments": text}}
            place = _number(channel)
            events.append({"type": "tool-call-delta", "index": place, "delta": {"message": {"tool_calls": calls}}})
        elif channel == THOUGHT:
            events.append({"type": "tool-plan-delta", "delta": {"message": {"tool_plan": text}}})
        else:
            events.append({"type": "content-delta", "index": 0, "delta": {"message": {"content": {"text": text}}}})
    return events


def _vercel(said: Said) -> list[Event]:
    events: list[Event] = [{"type": "start"}]
    for channel, text in said:
        if channel.startswith("call"):
            events.append({"type": "tool-input-delta", "toolCallId": channel, "inputTextDelta": text})
        else:
            events.append({"type": "text-delta" if channel == TEXT else "reasoning-delta", "id": "0", "delta": text})
    return events


def _tgi(said: Said) -> list[Event]:
    return [{"token": {"id": 7, "text": text, "special": False}, "generated_text": None} for _, text in said]


USAGE = {"usage": {"prompt_tokens": 7, "completion_tokens": 8, "total_tokens": 15}}
OVERLOADED: dict[str, Event] = {
    "Responses": {"type": "error", "message": "overloaded"},
    "Anthropic": {"type": "error", "error": {"type": "overloaded_error"}},
    "Ollama": {"error": "overloaded"},
    "Vercel": {"type": "error", "errorText": "overloaded"},
}
OLLAMA = {"model": "m", "message": {"role": "assistant", "content": ""}, "done": True}
FORMATS = {
    "chat completions": Format(_chat, [_chunk({}, "stop"), _chunk({"content": ""}, None, **USAGE)], mixed=True),
    "completions": Format(
        _completions, [{"id": "c", "choices": [{"index": 0, "text": "", "finish_reason": "length"}]}], (TEXT,)
    ),
    "Responses": Format(
        _responses,
        [{"type": "response.completed", "response": {"id": "r"}}],
        mixed=True,
        error=OVERLOADED["Responses"],
    ),
    "Anthropic": Format(_anthropic, [{"type": "message_stop"}], error=OVERLOADED["Anthropic"]),
    "Ollama, chat": Format(_ollama, [OLLAMA], lines=True, mixed=True, error=OVERLOADED["Ollama"]),
    "Ollama, generate": Format(
        _ollama_generate,
        [{"model": "m", "response": "", "done": True}],
        (TEXT, THOUGHT),
        lines=True,
        error=OVERLOADED["Ollama"],
    ),
    "llama.cpp": Format(_llama, [{"index": 0, "content": "", "stop": True, "stop_type": "eos"}], (TEXT,)),
    "Gemini": Format(
        _gemini, [{"candidates": [{"content": {}, "finishReason": "STOP", "index": 0}], "responseId": "r"}]
    ),
    "Bedrock": Format(_bedrock, [{"messageStop": {"stopReason": "end_turn"}}, {"metadata": {"usage": {}}}], lines=True),
    "Cohere": Format(_cohere, [{"type": "message-end", "delta": {"finish_reason": "COMPLETE"}}], mixed=True),
    "Vercel's AI SDK": Format(_vercel, [{"type": "finish"}], mixed=True, error=OVERLOADED["Vercel"]),
    "TGI": Format(
        _tgi, [{"token": {"id": 2, "text": "</s>", "special": True}, "generated_text": "all of it"}], (TEXT,)
    ),
}


def honest(rng: Random, words: int = 150) -> str:
    """A text of random words."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def pieces(texts: dict[str, str], rng: Random, mixed: bool) -> Said:
    """The texts of channels in pieces of drawn sizes, in turn or one channel after another."""
    cut: dict[str, list[tuple[str, str]]] = {}
    for channel, text in texts.items():
        size = rng.choice([5, 12, 40])
        cut[channel] = [(channel, text[place : place + size]) for place in range(0, len(text), size)]
    if not mixed:
        return [piece for channel in cut.values() for piece in channel]
    return [piece for turn in zip_longest(*cut.values()) for piece in turn if piece is not None]


def sent(form: Format, events: Sequence[Event]) -> bytes:
    """The bytes of events."""
    if form.lines:
        return "".join(f"{json.dumps(event)}\n" for event in events).encode()
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()


@dataclass(frozen=True)
class Case:
    """A stream and what it is.

    Attributes:
        name: What happens in it: a channel that loops, or what ends it.
        data: Its bytes.
        verdict: The verdict on its answer.
        channel: The channel of the verdict; empty: any.
    """

    name: str
    data: bytes
    verdict: str
    channel: str = ""


def cases(name: str, seed: int = 0) -> Iterator[Case]:
    """The cases of a format."""
    form, rng = FORMATS[name], Random(f"{name} {seed}")
    whole_calls = name in ("Ollama, chat", "Gemini")  # each call comes in one piece
    fine = {channel: honest(rng) for channel in form.channels}

    def events(texts: dict[str, str]) -> list[Event]:
        said = pieces(
            {one: text for one, text in texts.items() if not (whole_calls and one.startswith("call"))}, rng, form.mixed
        )
        said += [(one, text) for one, text in texts.items() if whole_calls and one.startswith("call")]
        return form.write(said)

    for channel in form.channels:
        yield Case(channel, sent(form, [*events({**fine, channel: LOOP}), *form.end]), "loops", channel)
    whole = events(fine)
    yield Case("nothing", sent(form, [*whole, *form.end]), "clean")
    yield Case("two ends", sent(form, [*whole, *form.end, *form.end]), "clean")
    half = events({TEXT: LOOP})
    yield Case("an error behind a loop", sent(form, [*half, form.error]), "loops", TEXT)
    yield Case("an error", sent(form, [*events({TEXT: fine[TEXT]}), form.error]), "clean")
    data = sent(form, [*events({TEXT: fine[TEXT]}), *form.end])
    yield Case("cut off", data[: len(data) * 2 // 3], "clean")
    data = sent(form, events({TEXT: LOOP}))
    yield Case("cut off in a loop", data[: len(data) * 2 // 3], "loops", TEXT)


def checked_right(case: Case, lines: bool) -> bool:
    """Whether the checker finds the one answer, its verdict and its channel."""
    records = check_file(io.BytesIO(case.data), name="a.jsonl" if lines else "a.sse").records
    if len(records) != 1:
        return False
    return records[0].verdict == case.verdict and case.channel in ("", records[0].channel)


def proxied_right(case: Case) -> bool:
    """Whether the proxy ends a looping answer, names the channel, and passes all others on unchanged."""
    watch, passed, place = StreamWatch(MonitorSettings()), b"", 0
    rng = Random(len(case.data))
    while place < len(case.data) and watch.alarm is None:
        size = rng.choice([1, 50, 1000])
        passed += watch.feed(case.data[place : place + size])
        place += size
    if case.verdict == "loops":
        found = watch.alarm is not None and watch.alarm.channel == case.channel
        return (
            found
            and bool(watch.ending() or b"contentBlock" in case.data)
            and case.data.startswith(passed.rstrip(b"\n"))
        )
    return watch.alarm is None and passed + watch.end() == case.data


def main(*, out: Path = Path("figures/loops_formats.json"), seeds: int = 5) -> None:
    """Make what the module describes.

    Args:
        out: The JSON.
        seeds: Number of drawn sizes of pieces.
    """
    rows: list[Row] = []
    for name, form in FORMATS.items():
        row: Row = {"format": name, "channels": list(form.channels)}
        for seed in range(seeds):
            for case in cases(name, seed):
                both = checked_right(case, form.lines), proxied_right(case)
                checker, proxy = row.setdefault(case.name, [0, 0])
                row[case.name] = [checker + both[0], proxy + both[1]]
        rows.append(row)
        print(row)
    write_atomic(out, record("loops-formats", {"seeds": seeds, "formats": rows}, {}, dtype="text"))


if __name__ == "__main__":
    run(main)
