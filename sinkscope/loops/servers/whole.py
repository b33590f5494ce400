"""Answers that are not streamed: asked for as a stream, so that they are watched, and given to the client whole.

1. A request for a whole answer becomes one for a stream (`as_stream`).
2. The events of the stream are collected, and become the whole answer that the server would have sent (`WholeAnswer`).
"""

from __future__ import annotations

import json
from typing import Any

from sinkscope.files.events import Events, Lines
from sinkscope.files.plain import parse_json
from sinkscope.loops.servers.ways import Request, Server
from sinkscope.loops.text.lines import EVENTS
from sinkscope.loops.text.pieces import UNREADABLE

OPENAI = ("/chat/completions", "/completions")
OLLAMA = ("/api/chat", "/api/generate")


def as_stream(request: Request, server: Server) -> bytes | None:
    """Return the body of a request for a stream in place of a whole answer; None if it asks for no whole answer.

    Args:
        request: The request.
        server: The server: some refuse to be asked for the usage, which they send anyway.
    """
    body = dict(request.body)
    if request.path.endswith(OPENAI) and not body.get("stream"):
        body["stream"] = True
        if server.name != "transformers":
            body["stream_options"] = {"include_usage": True}
        return json.dumps(body).encode()
    if request.path.endswith(OLLAMA) and body.get("stream") is False:
        return json.dumps({**body, "stream": True}).encode()
    return None


class WholeAnswer:
    """Collects the events of an answer.

    Attributes:
        error: What the server reported as an error; None if nothing.
    """

    def __init__(self) -> None:
        self.error: Any = None
        self._lines = Lines()
        self._joined = Events()
        self._is_events: bool | None = None
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def feed(self, data: bytes) -> None:
        """Take bytes of the stream."""
        for line in self._lines.feed(data):
            self._line(line.text or "")

    def whole(self) -> bytes:
        """Return the whole answer as JSON."""
        for line in self._lines.end():
            self._line(line.text or "")
        for data in self._joined.end():
            self._event(data)
        answer = {**self._answer}
        if self._choices:
            kind = str(answer.get("object", "")).removesuffix(".chunk")
            choices = [_without_places(self._choices[index]) for index in sorted(self._choices)]
            answer = {**answer, "object": kind, "choices": choices}
        return json.dumps(answer, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")

    def _line(self, text: str) -> None:
        if self._is_events is None and text.strip():
            self._is_events = text.startswith(EVENTS)
        for data in self._joined.add(text) if self._is_events else [text]:
            self._event(data)

    def _event(self, text: str) -> None:
        try:
            data = dict(parse_json(text))
        except UNREADABLE:
            return
        if data.get("error"):
            self.error = data
        for name, value in data.items():
            if name not in ("choices", "message", "response", "thinking") and (
                value is not None or name not in self._answer
            ):
                self._answer[name] = value
        for choice in data.get("choices") or ():
            self._choice(choice)
        for name in ("response", "thinking"):
            if isinstance(data.get(name), str):
                self._answer[name] = self._answer.get(name, "") + data[name]
        if isinstance(data.get("message"), dict):
            _join(self._answer.setdefault("message", {}), data["message"])

    def _choice(self, choice: dict[str, Any]) -> None:
        """Join a choice of a chunk to the choice."""
        index = int(choice.get("index") or 0)
        whole = self._choices.setdefault(index, {"index": index})
        for name, value in choice.items():
            if name == "delta":
                _join(whole.setdefault("message", {"role": "assistant", "content": None}), value or {})
            elif name == "text":
                whole["text"] = whole.get("text", "") + (value or "")
            elif name == "logprobs" and isinstance(value, dict):
                _join(whole.setdefault("logprobs", {}) or {}, value)
            elif value is not None or name not in whole:
                whole[name] = value


def _join(whole: dict[str, Any], delta: dict[str, Any]) -> None:
    """Join a delta to what came before: texts and lists grow, and calls are joined by their index."""
    for name, value in delta.items():
        if name == "tool_calls":
            calls = whole.setdefault("tool_calls", [])
            for call in value or ():
                place = call.get("index")
                known = [earlier for earlier in calls if earlier.get("index") == place] if place is not None else []
                if known:
                    function = dict(call.get("function") or {})
                    before = known[0].setdefault("function", {})
                    before["arguments"] = before.get("arguments", "") + (function.get("arguments") or "")
                else:
                    calls.append({**call, "function": dict(call.get("function") or {})})
        elif isinstance(value, str) and isinstance(whole.get(name), str) and name != "role":
            whole[name] += value
        elif isinstance(value, list) and isinstance(whole.get(name), list):
            whole[name] += value
        elif value is not None or name not in whole:
            whole[name] = value


def _without_places(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice whose calls have no index, which only chunks have."""
    message = choice.get("message")
    if isinstance(message, dict) and message.get("tool_calls"):
        calls = [{name: value for name, value in call.items() if name != "index"} for call in message["tool_calls"]]
        return {**choice, "message": {**message, "tool_calls": calls}}
    return choice
