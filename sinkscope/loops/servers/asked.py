"""What the body of a request asks a server of models for."""

from __future__ import annotations

from collections.abc import Iterator
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
    prompt_tokens = None
    wanted, options = data.get("stream_options"), data.get("options")
    if isinstance(wanted, dict) and wanted.get("include_usage") is True:  # about: words count as tokens
        prompt_tokens = sum(len(split(leaf)) if isinstance(leaf, str) else 1 for leaf in _leaves(messages))
    limits = [place.get(name) for place in (data, options) if isinstance(place, dict) for name in LIMITS]
    limit = next((value for value in limits if type(value) is int and value > 0), None)
    model = data.get("model")
    return Asked(prompt, answers, model if isinstance(model, str) else "", limit, prompt_tokens)


def _leaves(value: Any) -> Iterator[str | int]:
    """The texts and ids in a prompt, a message or several."""
    if isinstance(value, dict):
        yield from _leaves(value.get("content") or value.get("text"))
    elif isinstance(value, list):
        for one in value:
            yield from _leaves(one)
    elif isinstance(value, str | int):
        yield value
