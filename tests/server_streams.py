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


def events(sent: list[dict[str, Any]]) -> str:
    return "".join([": hello\n\n", *(f"data: {json.dumps(chunk)}\n\n" for chunk in sent), "data: [DONE]\n\n"])
