"""One streamed answer that goes on where it looped: its copies are dropped, and a continuation joins it as one stream.

1. Events are held while their text may be a copy (`HeldText`).
2. At a loop, the events up to the end of the first copy are passed on, the one at the seam with a part of its text.
3. The events of the continuation get the id of the answer; its usage is summed with what was written before.
"""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from sinkscope.loops.servers.answers import NOTHING_ASKED, Asked, StreamWatch, Work
from sinkscope.loops.servers.held import HeldText
from sinkscope.loops.servers.ways import Server
from sinkscope.loops.text.channels import AnswerWatch
from sinkscope.loops.text.monitor import Settings
from sinkscope.loops.text.pieces import REASONING, TEXT, Piece
from sinkscope.loops.text.reasoning import REASONING_MARKS

MOST_CONTINUATIONS = 2
SAID_IN = {TEXT: ("content", "text", "response"), REASONING: ("reasoning_content", "reasoning", "thinking")}
"""Fields of an event that hold the text of each channel."""
BEGINNING = 200
"""Characters in which a reasoning begins that stands in the text."""


@dataclass
class Unit:
    """An event that is held.

    Attributes:
        raw: Its bytes.
        data: Its JSON; None if it is none.
        channel: The channel of its text; empty without text.
        end: Number of characters of that channel up to its end.
    """

    raw: bytes
    data: dict[str, Any] | None
    channel: str
    end: int


@dataclass(frozen=True)
class Written:
    """What a client has got of an answer before a continuation.

    Attributes:
        texts: The text of each channel.
        pieces: Number of pieces with text, which servers send for each token.
        dropped: Number of pieces that were dropped.
        continued: Number of continuations.
        closed: Whether a reasoning was closed.
        first: The fields that all events of the answer share.
        is_chat: Whether its events are those of a chat.
        origin_prompt: Tokens of the prompt, as far as the server said it.
    """

    texts: dict[str, str] = field(default_factory=dict)
    pieces: int = 0
    dropped: int = 0
    continued: int = 0
    closed: bool = False
    first: dict[str, Any] = field(default_factory=dict)
    is_chat: bool = True


class GoOnWatch(StreamWatch):
    """The bytes of an answer that may be continued, or of a continuation.

    Args:
        settings: Settings of the monitor.
        asked: What was asked.
        before: What the client has got before; None for the first part of an answer.
        server: The server, and the marks of a reasoning.
    """

    def __init__(
        self,
        settings: Settings,
        asked: Asked = NOTHING_ASKED,
        before: Written | None = None,
        server: Server | None = None,
    ) -> None:
        super().__init__(settings, asked=asked)
        self.before = before or Written()
        self.server = server or Server()
        self._is_first = before is None
        self._units: deque[Unit] = deque()
        self._raw: list[bytes] = []
        self._value: dict[str, Any] | None = None
        self._seen = (0, "")  # pieces of text, and channel of the last one
        self.held_texts: dict[str, HeldText] = {}
        self.has_calls = False
        self.passed_pieces = 0
        self._passed_end = {channel: len(text) for channel, text in self.before.texts.items()}
        if before is not None:
            self._written[self._name] = before.pieces
        for channel, text in self.before.texts.items():
            held = self.held_texts[channel] = HeldText()
            held.feed(text)
            self._watch.open.setdefault(self._name, AnswerWatch(settings, 0))
            list(self._watch.take(Piece(self._name, channel, text)))

    @property
    def asked(self) -> Asked:
        """Return what was asked."""
        return self._asked

    @property
    def is_spent(self) -> bool:
        """Return whether the answer was continued as often as it may be."""
        return self.before.continued >= MOST_CONTINUATIONS

    def comment(self) -> bytes:
        """Return what is said at a seam."""
        if not self._events:
            return b""
        return b": sinkscope: the copies of a loop were dropped here, and the answer goes on\n\n"

    @property
    def _name(self) -> str:
        """Name of the answer in the continuation, as its first event will have it."""
        return "choice 0" if "object" in self.before.first else "stream 0"

    @property
    def in_reasoning(self) -> bool:
        """Return whether the answer is still in its reasoning, in a channel of its own or between marks in its text."""
        channel = self._seen[1] or TEXT
        if channel == REASONING:
            return True
        text = self.held_texts[TEXT].text if TEXT in self.held_texts else ""
        end = self.server.reasoning_end
        if not end or end in text:
            return False
        return self.server.opens_reasoning or REASONING_MARKS.get(end, end) in text[:BEGINNING]

    def feeding(self, data: bytes) -> Work[bytes]:
        """Take bytes of the answer, and give those that are known to be no copy; yield after each slice of work."""
        for line in self._lines.feed(data):
            if line.text is None:
                self._raw.append(line.raw)
                continue
            had_begun, self._value = self._joined.begun, None
            yield from self._take(line.text)
            if had_begun and self._joined.begun and self._value is not None:  # the line begins the next event
                self._close()
            self._raw.append(line.raw)
            if not self._joined.begun:
                self._close()
            if self.alarm is not None:
                break
        return b"".join(self._release())

    def flush(self) -> bytes:
        """Give everything that is held, before an answer that is not continued ends."""
        units, self._units = [*self._units], deque()
        return b"".join(map(self._passed, units))

    def rest(self) -> Work[bytes]:
        """Give the rest of an answer that has ended; yield after each slice of work."""
        for line in self._lines.end():
            self._raw.append(line.raw)
            if line.text is not None:
                yield from self._take(line.text)
        if self._events:
            yield from self._read(self._joined.end())
        self._close()
        if self._is_first:
            yield from super().rest()
        self.alarm = None
        return self.flush()

    def ending(self) -> bytes:
        """Return the events that end the answer after an alarm, with the id of the answer."""
        if not self._is_first:
            self._last = self._joined_event({**self._last, "usage": None}, whole=True) or self._last
        return super().ending()

    def _pieces(self, data: dict[str, Any]) -> list[Piece]:
        """The pieces in an event; each text is held, and the event is remembered."""
        pieces = super()._pieces(data)
        self._value = data
        for piece in pieces:
            self.has_calls = self.has_calls or piece.channel.startswith("call")
            if piece.text and piece.channel in (TEXT, REASONING):
                self.held_texts.setdefault(piece.channel, HeldText()).feed(piece.text)
                self._seen = (1, piece.channel)
        return pieces

    def _close(self) -> None:
        """End the event whose lines were collected."""
        raw, self._raw = b"".join(self._raw), []
        if not raw:
            return
        has_text, channel = self._seen
        end = len(self.held_texts[channel].text) if channel in self.held_texts else 0
        self._units.append(Unit(raw, self._value, channel if has_text else "", end))
        self._value = None
        self._seen = (0, channel)

    def _release(self) -> list[bytes]:
        """The bytes of the events whose text is safe, and of those without text before the next."""
        passed: list[bytes] = []
        while self._units:
            unit = self._units[0]
            if unit.channel and unit.end > self.held_texts[unit.channel].safe and self._watch.open:
                break
            passed.append(self._passed(self._units.popleft()))
        return passed

    def _passed(self, unit: Unit, text: str | None = None) -> bytes:
        """The bytes of an event for the client: in a continuation with the id of the answer; or a part of its text."""
        self.passed_pieces += bool(unit.channel)
        if unit.channel:
            self._passed_end[unit.channel] = unit.end
        if unit.data is None:
            return unit.raw
        if self._is_first and text is None:
            if not self.before.first:
                self.before = _with_first(self.before, unit.data)
            return unit.raw
        data = unit.data if text is None else with_text(unit.data, unit.channel, text)
        if not self._is_first:
            joined = self._joined_event(data)
            if joined is None:
                return b""
            data = joined
        written = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        return (f"data: {written}\n\n" if self._events else f"{written}\n").encode("utf-8", "replace")

    def _joined_event(self, data: dict[str, Any], whole: bool = False) -> dict[str, Any] | None:
        """An event of a continuation as one of the answer; None if the answer has said it, unless all are wanted."""
        data = {**data, **self.before.first}
        choices: list[dict[str, Any]] = []
        for choice in data.get("choices") or ():
            if "text" in choice and self.before.is_chat:
                content = {"content": choice["text"]} if choice["text"] else {}
                choice = {**{name: value for name, value in choice.items() if name != "text"}, "delta": content}
            if isinstance(choice.get("delta"), dict):
                delta = {name: value for name, value in choice["delta"].items() if name != "role"}
                choice = {**choice, "delta": delta}
                if not any(delta.values()) and not choice.get("finish_reason") and not data.get("usage") and not whole:
                    return None
            choices.append(choice)
        if "choices" in data:
            data["choices"] = choices
        if isinstance(data.get("usage"), dict):
            data["usage"] = summed(data["usage"], self.before.pieces)
        ends = (
            any(choice.get("finish_reason") for choice in choices)
            or data.get("done") is True
            or data.get("stop") is True
        )
        if ends:
            data["sinkscope"] = self.about()
        return data

    def about(self) -> dict[str, Any]:
        """Return what is said of the seams at the end of the answer."""
        about: dict[str, Any] = {"continued": self.before.continued, "dropped": self.before.dropped}
        if self.before.closed:
            about["reasoning"] = "closed"
        return about

    def seam(self, closing: str = "") -> tuple[bytes, Written]:
        """Return the bytes up to the seam, and what the client has got then. The rest is dropped.

        Args:
            closing: What closes the reasoning, for the client, if it stands in the text.
        """
        channel = self._seen[1] or TEXT
        text = self.held_texts[channel].kept
        floor = self._passed_end.get(channel, 0)
        if len(text) < floor:
            text = self.held_texts[channel].text[:floor]
        dropped = sum(unit.channel == channel and unit.end > len(text) for unit in self._units)
        passed, last = self._up_to(text, channel)
        self._units.clear()
        if closing and channel == TEXT and last is not None:
            passed.append(self._passed(Unit(b"", last.data, TEXT, 0), f"\n{closing}\n\n"))
        texts = {name: held.text for name, held in self.held_texts.items()}
        texts[channel] = f"{text}\n{closing}\n\n" if channel == TEXT and closing else text
        before = self.before
        written = Written(
            texts=texts,
            pieces=before.pieces + self.passed_pieces,
            dropped=before.dropped + max(0, dropped),
            continued=before.continued + 1,
            closed=before.closed or bool(closing),
            first=before.first or _with_first(before, self._last).first,
            is_chat=before.is_chat if before.first else _with_first(before, self._last).is_chat,
        )
        return b"".join(passed), written

    def _up_to(self, text: str, channel: str) -> tuple[list[bytes], Unit | None]:
        """What is passed of the units that are held, up to the end of a text, and the unit in which that lies."""
        passed: list[bytes] = []
        first = next((unit for unit in self._units if unit.channel == channel), None)
        begin = 0 if first is None else first.end - len(_text_of(first.data, channel))
        for unit in self._units:
            if unit.channel == channel:
                if unit.end > len(text):
                    part = text[begin:]
                    return [*passed, self._passed(unit, part)] if part else passed, unit
                begin = unit.end
            passed.append(self._passed(unit))
        return passed, None


def summed(usage: dict[str, Any], before: int) -> dict[str, Any]:
    """Return the usage of a whole answer: what was written before is a part of the continuation's prompt."""
    read, written = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    read = max(0, read - before)
    total = read + written + before
    return {**usage, "prompt_tokens": read, "completion_tokens": written + before, "total_tokens": total}


def with_text(data: dict[str, Any], channel: str, text: str) -> dict[str, Any]:
    """Return an event with another text in a channel."""
    places: list[dict[str, Any]] = [data]
    data = {**data}
    if isinstance(data.get("message"), dict):
        data["message"] = {**data["message"]}
        places = [data["message"]]
    elif data.get("choices"):
        choice = {**data["choices"][0]}
        data["choices"] = [choice]
        places = [choice]
        if isinstance(choice.get("delta"), dict):
            choice["delta"] = {**choice["delta"]}
            places = [choice["delta"]]
    else:
        places = [data]
    for place in places:
        for name in SAID_IN[channel]:
            if isinstance(place.get(name), str) and place[name]:
                place[name] = text
                return data
        place[SAID_IN[channel][0]] = text
    return data


def _text_of(data: dict[str, Any] | None, channel: str) -> str:
    """The text of a channel in an event."""
    place: Any = data or {}
    if isinstance(place.get("message"), dict):
        place = place["message"]
    elif place.get("choices"):
        choice = place["choices"][0]
        place = choice.get("delta") if isinstance(choice.get("delta"), dict) else choice
    return next((place[name] for name in SAID_IN[channel] if isinstance(place.get(name), str) and place[name]), "")


def _with_first(before: Written, data: dict[str, Any]) -> Written:
    """What the events of an answer share, from its first event."""
    shared = {name: data[name] for name in ("id", "object", "created", "model", "created_at") if name in data}
    choice = next(iter(data.get("choices") or ()), {})
    is_chat = "text" not in choice
    return replace(before, first=shared, is_chat=is_chat)
