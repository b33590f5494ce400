"""One streamed answer behind a proxy: what was asked, what may be passed on, whether it loops, and how it is ended."""

from __future__ import annotations

import json
from collections.abc import Collection, Generator, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

from sinkscope.files.chats import Message, message_of, texts_in
from sinkscope.files.events import Events as JoinedEvents
from sinkscope.files.events import Line, Lines
from sinkscope.files.long_json import SHORT, parsing
from sinkscope.files.plain import parse_json
from sinkscope.loops.text.channels import Alarm
from sinkscope.loops.text.forms import Events
from sinkscope.loops.text.lines import EVENTS, values_of_event
from sinkscope.loops.text.logged import UnknownEvents
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.outputs import split
from sinkscope.loops.text.pieces import TEXT, TURNS, UNREADABLE, Origin, Piece, origin_of, pieces_of_texts
from sinkscope.loops.text.streams import Watch

NOT_STREAMED = "not streamed"
NO_ANSWER = "no event of a form that is known"
TOO_LONG = "a line above 16 MB"
REASON = "repetition_detected"
"""Value of `stop_reason`, as vLLM's own detection says it."""
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict", "num_predict")


MOST_PROMPT = 1 << 14
"""Characters at the beginning and at the end of a prompt that are read."""


class Asked(NamedTuple):
    """What is asked.

    Attributes:
        prompt: The prompt, or the last message.
        answers: Number of choices.
        model: Name of the model; empty if the request has none.
        limit: Most tokens of a choice; None if the request has no limit.
        prompt_tokens: If the stream has to end with its usage: about how many tokens are in all messages. Else None.
    """

    prompt: str = ""
    answers: int = 1
    model: str = ""
    limit: int | None = None
    prompt_tokens: int | None = None


NOTHING_ASKED = Asked()


def asked_in(body: bytes) -> Asked:
    """Return what the body of a request asks for, in the forms of OpenAI, Anthropic, Ollama and llama.cpp."""
    return at_once(asking(body))


def asking(body: bytes) -> Work[Asked]:
    """Return what `asked_in` does; of a long body in slices."""
    try:
        value: Any = parse_json(body) if len(body) <= SHORT else (yield from parsing(body.decode()))
        data = dict(value)
    except UNREADABLE:
        return NOTHING_ASKED
    messages = data.get("messages") or data.get("prompt") or data.get("input")
    last, answers = messages, 1
    if type(data.get("n")) is int:
        answers = max(1, data["n"])
    if isinstance(messages, list) and messages:
        if isinstance(messages[-1], dict):
            last = messages[-1]
        elif isinstance(messages[0], str):  # prompts, each with its own answers
            answers *= len(messages)
    prompt = " ".join(text for text in _leaves(last) if isinstance(text, str))
    if len(prompt) > 2 * MOST_PROMPT:  # what is asked for stands at its ends
        prompt = f"{prompt[:MOST_PROMPT]} {prompt[-MOST_PROMPT:]}"
    prompt_tokens = None
    wanted, options = data.get("stream_options"), data.get("options")
    if isinstance(wanted, dict) and wanted.get("include_usage") is True:
        prompt_tokens = yield from _words_in(messages)
    limits = [place.get(name) for place in (data, options) if isinstance(place, dict) for name in LIMITS]
    limit = next((value for value in limits if type(value) is int and value > 0), None)
    model = data.get("model")
    return Asked(prompt, answers, model if isinstance(model, str) else "", limit, prompt_tokens)


def _words_in(messages: Any) -> Work[int]:
    """About how many tokens a prompt has: words count as tokens."""
    count = 0
    for leaf in _leaves(messages):
        text = leaf if isinstance(leaf, str) else "0"
        for place in range(0, len(text), MOST_PROMPT):
            count += len(split(text[place : place + MOST_PROMPT]))
            yield
    return count


def _leaves(value: Any) -> Iterator[str | int]:
    """The texts and ids in a prompt, a message or several."""
    if isinstance(value, dict):
        yield from _leaves(value.get("content") or value.get("text"))
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str | int):
        yield value


T = TypeVar("T")
Work = Generator[None, None, T]
"""Work that yields after each slice, so that others can act in between."""
SLICE = 512
"""Characters of a text that are watched in one slice."""


def at_once(work: Work[T]) -> T:
    """Do all of some work, and return its result."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            return done.value


def sliced(piece: Piece) -> Iterator[Piece]:
    """Cut a piece with a long text into parts, of which the last ends the piece; a turn of a dialogue stays whole."""
    if len(piece.text) <= SLICE or piece.channel == TURNS:
        yield piece
        return
    last = (len(piece.text) - 1) // SLICE * SLICE
    for place in range(0, last, SLICE):
        yield piece._replace(text=piece.text[place : place + SLICE], ends=False)
    yield piece._replace(text=piece.text[last:])


def _values(text: str, in_event: bool) -> Work[list[Any]]:
    """The values in a line of JSON or in the data of an event; a long one is parsed in slices."""
    if len(text) <= SHORT or text.lstrip()[:1] not in ("{", "["):
        return values_of_event(text) if in_event else [parse_json(text)]
    value = yield from parsing(text)
    return value if in_event and isinstance(value, list) else [value]


class StreamWatch:
    """The bytes of one answer: what may be passed on, and whether it loops.

    Bytes are passed on unchanged, a line at a time, so that a stream that is cut ends after a whole event. What the
    body is, events or JSON, is said by its first line.

    Attributes:
        alarm: The loop, once every output that has not ended loops.
        suspect: The first repetition with which the answer goes on: it may be honest, or other outputs do not loop.
        unread: Why the answer, or a line of it, was not watched; empty if it was.

    Args:
        settings: Settings of the monitor.
        events: Whether the answer has server-sent events; otherwise lines of JSON. None: its first line says it.
        asked: What was asked.
    """

    def __init__(self, settings: Settings, events: bool | None = None, asked: Asked = NOTHING_ASKED) -> None:
        self.alarm: Alarm | None = None
        self.suspect: Alarm | None = None
        self.unread = ""
        self._watch = Watch(settings, asked.prompt)
        self._lines = Lines()
        self._joined = JoinedEvents()
        self._events = events
        self._forms = Events()
        self._unknown = UnknownEvents()
        self._last: dict[str, Any] = {}
        self._response: dict[str, Any] = {}  # of OpenAI's Responses
        self._blocks: dict[int, None] = {}  # of Anthropic: those that are open
        self._asked = asked
        self._written: dict[str, int] = {}  # pieces of text of each output, which servers send for each token
        self._origin = Origin()
        self._alarms: dict[str, Alarm] = {}
        self.is_whole = False

    @property
    def held(self) -> bytes:
        """Return the line that is not complete."""
        return self._lines.held

    def feed(self, data: bytes) -> bytes:
        """Take bytes of the answer, and give those that may be passed on. After an alarm there are no more."""
        return at_once(self.feeding(data))

    def end(self) -> bytes:
        """Give the rest of an answer that has ended."""
        return at_once(self.rest())

    def feeding(self, data: bytes) -> Work[bytes]:
        """Take bytes as `feed` does, and yield after each slice of work."""
        return (yield from self._pass_on(self._lines.feed(data)))

    def rest(self) -> Work[bytes]:
        """Give the rest as `end` does, and yield after each slice of work."""
        rest = yield from self._pass_on(self._lines.end())
        if self.alarm is None and self._events:
            yield from self._read(self._joined.end())
        if self._lines.too_long:
            self.unread = TOO_LONG
        elif not self._written and not self.unread:
            self.unread = NO_ANSWER if self._events else NOT_STREAMED
        self.alarm = None if self.is_whole else self.alarm  # nothing is left to cut
        return rest

    def _pass_on(self, lines: Iterable[Line]) -> Work[bytes]:
        passed: list[bytes] = []
        for line in lines:
            yield
            if line.text is not None and self.unread in ("", TOO_LONG):
                before = self._joined.begun
                yield from self._take(line.text)
                if self.alarm is not None and not self.is_whole:
                    if not (before and self._joined.begun):  # else the line begins the next event
                        passed.append(line.raw)
                    return b"".join(passed) + b"\n\n" * bool(self._events)  # the end of the event
            passed.append(line.raw)
        return b"".join(passed)

    def _take(self, text: str) -> Work[None]:
        """Read a line."""
        stripped = text.strip().lstrip("\ufeff")
        if self._events is None and stripped:
            self._events = stripped.startswith(EVENTS)
            if not self._events and not stripped.startswith(("{", "[")):
                self.unread = NOT_STREAMED
                return
        if self._events:
            yield from self._read(self._joined.add(text.lstrip("\ufeff")))
        elif stripped:
            yield from self._read([stripped])

    def report(self) -> dict[str, Any] | None:
        """Return what is told of the answer, without its text; None if it does not repeat itself."""
        alarm = self.alarm or next(iter(self._alarms.values()), self.suspect)
        if alarm is None:
            return None
        saved = None
        if self.alarm is not None and self._asked.limit is not None:
            saved = sum(max(0, self._asked.limit - self._written.get(name, 0)) for name in self._watch.open)
        told = alarm._replace(origin=Origin(self._origin.id, self.model)).about()
        return {**told, "cut": self.alarm is not None, "saved": saved}

    @property
    def model(self) -> str:
        """Name of the model: as the answer says, else as the request does."""
        return self._origin.model or self._asked.model

    def ending(self) -> bytes:
        """Return the events that end the answer after an alarm; they say where the loop is, without its text."""
        about: dict[str, Any] = {"verdict": "loops"}
        if self.alarm is not None:
            about["token"] = self.alarm.token
            if self.alarm.tail is not None:
                about["period"] = self.alarm.tail.period
            if self.alarm.channel != TEXT:
                about["channel"] = self.alarm.channel
        places = dict.fromkeys(int(name.split()[1]) for name in self._watch.open if name.startswith("choice"))
        events = last_events(self._last, self._response, about, places or self._blocks)
        read, written, is_chunk = self._asked.prompt_tokens, sum(self._written.values()), "choices" in self._last
        if read is not None and is_chunk:  # the request wants to know about how many tokens were read and written
            usage = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
            told: dict[str, Any] = {"usage": usage, "sinkscope": {"usage": "estimated"}}
            if self._last.get("usage"):  # some servers say it in every chunk
                told = {"usage": self._last["usage"]}
            events.append({**self._last, "choices": [], **told})
        lines: list[str] = []
        for event in events:
            text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            if not self._events:
                lines.append(f"{text}\n")
            elif isinstance(event.get("type"), str):
                lines.append(f"event: {event['type']}\ndata: {text}\n\n")
            else:
                lines.append(f"data: {text}\n\n")
        if events and self._events and is_chunk:
            lines.append("data: [DONE]\n\n")
        return "".join(lines).encode("utf-8", "replace")

    def _read(self, texts: Iterable[str]) -> Work[None]:
        """Feed the monitors with values of JSON. The answer loops when every output that has not ended loops."""
        for text in texts:
            if self.alarm is not None:
                return
            try:
                pieces: list[Piece] = []
                values = yield from _values(text, bool(self._events))
                for value in values:
                    pieces += self._unknown.pieces(value) if isinstance(value, str) else self._pieces(dict(value))
            except UNREADABLE:
                if not self._events and not self._written:  # JSON on several lines
                    self.unread = NOT_STREAMED
                continue  # what is no output of a model is passed on
            for piece in pieces:
                self._written[piece.answer] = self._written.get(piece.answer, 0) + bool(piece.text)
                for part in sliced(piece):
                    self._hear(part)
                    yield
            waiting = self._watch.open.keys()
            if waiting and waiting <= self._alarms.keys() and len(self._written) >= self._asked.answers:
                self.alarm = max((self._alarms[name] for name in waiting), key=lambda alarm: alarm.token)

    def _hear(self, piece: Piece) -> None:
        for alarm in self._watch.take(piece):
            if alarm.cut:
                self._alarms.setdefault(alarm.stream, alarm)
            else:
                self.suspect = self.suspect or alarm

    def _pieces(self, data: dict[str, Any]) -> list[Piece]:
        """The pieces in an event, and what its end will need to know."""
        kind = data.get("type")
        if data.get("choices") != []:  # an event with the usage has no choice
            self._last = data
        if kind == "response.created":
            self._response = dict(data["response"])
        if kind == "content_block_start":
            self._blocks[int(data.get("index") or 0)] = None
        if kind == "content_block_stop":
            self._blocks.pop(int(data.get("index") or 0), None)
        if not any(self._origin):
            self._origin = origin_of(data) or self._origin
        # It is one answer, although some servers give each chunk a new id.
        pieces = self._forms.pieces({**data, "id": None}, 0)
        if pieces is not None:
            self._unknown.is_known = self._unknown.is_known or bool(pieces)
            self.is_whole = any("message" in choice and "delta" not in choice for choice in data.get("choices") or ())
            return pieces
        if self._events:
            return self._unknown.pieces(data)
        message = message_of(data)
        if message is None and data.get("object") == "response":
            message = Message("assistant", tuple(texts_in({"content": data.get("output")})), data)
        if message is None or message.role != "assistant":
            return []
        self.is_whole = True
        return pieces_of_texts(message.texts, "answer")


def last_events(
    last: dict[str, Any], response: dict[str, Any], about: dict[str, Any], places: Collection[int]
) -> list[dict[str, Any]]:
    """Return the last events of a stream as data: the length is the reason, because the text has no end.

    Args:
        last: The last event that arrived.
        response: The response as OpenAI's Responses announced it.
        about: Value of the field `sinkscope`, which says why the stream was cut.
        places: Numbers of the choices or blocks that have not ended.

    Returns:
        The events; none if the form of the stream is not known.
    """
    match last:
        case {"choices": [dict(choice), *_]}:
            content: dict[str, Any] = {"text": ""} if "text" in choice else {"delta": {}}
            cut = {"finish_reason": "length", "stop_reason": REASON}
            choices = [{"index": index, **content, **cut} for index in places or (0,)]
            return [{**last, "choices": choices, "sinkscope": about}]
        case {"type": str(kind)} if kind.startswith("response."):
            state = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
            number = int(last.get("sequence_number") or 0) + 1
            response = {**response, **state, "sinkscope": about}
            kind = "response.incomplete"
            return [{"type": kind, "sequence_number": number, "response": response}]
        case {"type": str(kind)} if kind.endswith(("-delta", "-start")):  # Cohere, and Vercel's AI SDK
            end = {"type": "finish"}
            if isinstance(last.get("delta"), dict):
                end = {"type": "message-end", "delta": {"finish_reason": "MAX_TOKENS"}}
            return [{**end, "sinkscope": about}]
        case {"candidates": [*_]}:
            end = {"content": {"parts": [{"text": ""}], "role": "model"}, "finishReason": "MAX_TOKENS"}
            return [{**last, "candidates": [{**end, "index": index} for index in places or (0,)], "sinkscope": about}]
        case {"token": dict()}:
            token = {"id": 0, "text": "", "logprob": None, "special": True}
            return [{"token": token, "generated_text": "", "details": {"finish_reason": "length"}, "sinkscope": about}]
        case {"type": str(kind)} if kind.startswith(("content_block", "message_", "ping")):
            blocks = [{"type": "content_block_stop", "index": index} for index in places]
            delta = {"stop_reason": "max_tokens", "stop_sequence": None}
            usage = {"output_tokens": about.get("token", 0)}
            change = {"type": "message_delta", "delta": delta, "usage": usage, "sinkscope": about}
            return [*blocks, change, {"type": "message_stop"}]
        case {"done": _}:
            content = {"response": ""}
            if "message" in last:
                content = {"message": {"role": "assistant", "content": ""}}
            return [{**last, **content, "done": True, "done_reason": "length", "sinkscope": about}]
        case {"content": str(), "stop": bool()}:
            return [{**last, "content": "", "stop": True, "stop_type": "limit", "sinkscope": about}]
        case _:
            return []
