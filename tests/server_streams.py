"""What servers send while they generate, one object per chunk (`fixtures/server_streams.json`)."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).with_name("fixtures")


def filled(template: Any, values: dict[str, str]) -> Any:
    """A template of JSON in which "<name>" becomes the value."""
    text = json.dumps(template)
    for name, value in values.items():
        if f"<{name}>" in text:
            text = text.replace(f"<{name}>", json.dumps(value)[1:-1])
    return json.loads(text)


def chunks(text: str) -> list[str]:
    return [f"{word} " for word in text.split()]


def _sent(server: dict[str, Any], text: str) -> list[dict[str, Any]]:
    sent = list(server.get("begin", ()))
    for piece in chunks(text):
        sent.append(filled(server["piece"], {"piece": piece}))
    return sent + filled(server.get("end", []), {"text": text})


SERVERS = {
    name: partial(_sent, server) for name, server in json.loads((FIXTURES / "server_streams.json").read_text()).items()
}
_LOGGED = json.loads((FIXTURES / "log_lines.json").read_text())
LINES: dict[str, Any] = _LOGGED["lines"]
"""Lines of logs and data sets as public formats have them, with <prompt>, <answer> and <id>."""
STREAMS = {name: partial(_sent, server) for name, server in _LOGGED["streams"].items()}
"""Events of servers that stream, which the proxy does not watch."""


def events(sent: list[dict[str, Any]]) -> str:
    return "".join([": hello\n\n", *(f"data: {json.dumps(chunk)}\n\n" for chunk in sent), "data: [DONE]\n\n"])


def chat_chunk(text: str, index: int = 0, finish: str | None = None, id: object = "c") -> dict[str, Any]:
    """A chunk of a chat completion."""
    return {"id": str(id), "choices": [{"index": index, "delta": {"content": text}, "finish_reason": finish}]}


def choices_of(words: dict[int, list[str]], ends: dict[int, int]) -> list[dict[str, Any]]:
    """Chunks, each with an id of its own, with a word of each choice in turn; a choice ends behind so many words."""
    sent: list[dict[str, Any]] = []
    for place in range(max(map(len, words.values()))):
        for index, said in words.items():
            if place < min(len(said), ends.get(index, len(said))):
                end = "stop" if place + 1 == ends.get(index) else None
                sent.append(chat_chunk(f"{said[place]} ", index, end, id=len(sent)))
    return sent
