"""What the body of a request asks a server of models for."""

from __future__ import annotations

from typing import Any, NamedTuple

from sinkscope.files.plain import parse_json
from sinkscope.loops.text.forms import UNREADABLE


class Asked(NamedTuple):
    """What is asked.

    Attributes:
        prompt: The prompt, or the last message.
        answers: Number of choices.
    """

    prompt: str = ""
    answers: int = 1


NOTHING_ASKED = Asked()


def asked_in(body: bytes) -> Asked:
    """Return what the body of a request asks for, in the forms of OpenAI, Anthropic, Ollama and llama.cpp."""
    try:
        data = parse_json(body)
        prompts = data.get("prompt") or data.get("input") or ""
        count = int(data.get("n") or 1)
        if data.get("messages"):
            prompts = data["messages"][-1]["content"]
        elif isinstance(data.get("prompt"), list) and isinstance(data["prompt"][0], str):
            count *= len(data["prompt"])  # a choice for each
        return Asked(_text(prompts), count)
    except UNREADABLE:
        return NOTHING_ASKED


def _text(value: Any) -> str:
    """The text in a message, in the last of several, or in its parts; of ids there is none."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if isinstance(value[-1], dict) and "content" in value[-1]:
            return _text(value[-1]["content"])
        return " ".join(_text(part) for part in value)
    if isinstance(value, dict) and isinstance(value.get("text"), str):
        return value["text"]
    return ""
