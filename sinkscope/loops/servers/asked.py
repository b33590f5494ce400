"""What the body of a request asks a server of models for."""

from __future__ import annotations

from typing import Any, NamedTuple

from sinkscope.files.plain import parse_json
from sinkscope.loops.text.forms import UNREADABLE
from sinkscope.loops.text.outputs import split

LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict", "num_predict")


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
    try:
        data = dict(parse_json(body))
    except UNREADABLE:
        return NOTHING_ASKED
    prompt, answers, prompt_tokens = "", 1, None
    options, wanted = data.get("options"), data.get("stream_options")
    try:
        prompt, answers = _prompt_of(data), _answers_of(data)
    except UNREADABLE:
        pass
    if isinstance(wanted, dict) and wanted.get("include_usage") is True:
        prompt_tokens = _tokens_in(data.get("messages") or data.get("prompt"))
    limits = [place.get(name) for place in (data, options) if isinstance(place, dict) for name in LIMITS]
    limit = next((value for value in limits if type(value) is int and value > 0), None)
    model = data.get("model")
    return Asked(prompt, answers, model if isinstance(model, str) else "", limit, prompt_tokens)


def _prompt_of(data: dict[str, Any]) -> str:
    """The text of the prompt, or of the last message."""
    if data.get("messages"):
        return _text(data["messages"][-1]["content"])
    return _text(data.get("prompt") or data.get("input") or "")


def _answers_of(data: dict[str, Any]) -> int:
    """The number of choices: of a list of prompts each has its own."""
    count = int(data.get("n") or 1)
    prompts = data.get("prompt")
    if not data.get("messages") and isinstance(prompts, list) and isinstance(prompts[0], str):
        return count * len(prompts)
    return count


def _tokens_in(value: Any) -> int:
    """About how many tokens a prompt or messages have: ids count each, and of text the words of `split`."""
    if isinstance(value, str):
        return len(split(value))
    if isinstance(value, dict):
        return _tokens_in(value.get("content") or value.get("text"))
    if isinstance(value, list):
        return sum(map(_tokens_in, value))
    return int(isinstance(value, int))


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
