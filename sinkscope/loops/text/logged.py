"""Outputs in lines of logs and data sets: `answers_in` finds them under the names that public formats give them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkscope.loops.text.forms import Piece, on_one_line, pieces_of, pieces_of_output, said_in

ANSWERS = (
    *("tokens", "choices", "candidates", "outputs", "results", "result", "response", "response_body", "body", "output"),
    *("outputBodyJson", "completion", "completions", "generated_text", "generated_texts", "generation", "generations"),
    *("outputText", "answer", "resps", "message", "messages", "conversations", "turns", "text", "content", "parts"),
)
"""Fields that hold an answer or what holds it: the first that is filled counts. Ids are more exact than text."""
SEPARATE = ("resps", "turns", "generated_texts")
"""Fields whose strings are answers, and not the tokens of one."""
MODELS = ("assistant", "model", "gpt", "ai", "bot", "chatgpt", "bing", "bard")
"""How messages name a model as their author."""


def streamed(data: Mapping[str, Any]) -> list[Piece] | None:
    """Return the pieces of an event of TGI, Gemini or Bedrock's Converse; None if it is none."""
    match data:
        case {"token": {"text": str(text)}}:  # TGI's last event repeats the whole text
            is_word = not data["token"].get("special")
            return [Piece("stream 0", text=text * is_word, last=data.get("generated_text") is not None)]
        case {"candidates": [*candidates]} if "responseId" in data or not all(map(_has_ended, candidates)):  # Gemini
            pieces: list[Piece] = []
            for one in candidates:
                name = f"choice {int(one.get('index') or 0)}"
                if "responseId" in data:
                    name += f" of {on_one_line(str(data['responseId']))}"
                text = said_in(one.get("content") or {})
                pieces.append(Piece(name, text=text, last=bool(one.get("finishReason"))))
            return pieces
        case {"contentBlockDelta": {"delta": dict(delta)} as block}:  # Bedrock's Converse; each block is a stream
            return [Piece(f"block {int(block.get('contentBlockIndex') or 0)}", text=said_in(delta))]
        case {"contentBlockStop": dict(block)}:
            return [Piece(f"block {int(block.get('contentBlockIndex') or 0)}", last=True, part=True)]
        case {"messageStart": _} | {"messageStop": _} | {"contentBlockStart": _} | {"metadata": {"usage": _}}:
            return []
        case _:
            return None


def _has_ended(candidate: Any) -> bool:
    return isinstance(candidate, dict) and bool(candidate.get("finishReason"))


def pieces_of_answers(answers: Sequence[Any], name: str) -> list[Piece]:
    """Return the pieces of whole answers; of several, each has a number in its name."""
    pieces: list[Piece] = []
    for number, answer in enumerate(answers, 1):
        pieces += pieces_of_output(answer, name if len(answers) == 1 else f"{name} answer {number}")
    return pieces


def answers_in(value: Any, field: str = "") -> list[Any]:
    """Return the whole answers in a value: each a text, or a list of tokens.

    Args:
        value: What stands in a field.
        field: Name of the field.

    Raises:
        ValueError: No field that is known holds one.
    """
    answers: list[Any] = []
    if isinstance(value, list) and value and isinstance(value[0], dict | list):
        if field in ("content", "parts"):  # of one message
            return [said_in({"content": value})]
        for one in _of_models(value):
            answers += answers_in(one, field)
        return answers
    if isinstance(value, list) and field in SEPARATE:
        return list(value)
    if not isinstance(value, dict):
        return [value]
    if "role" in value or "from" in value:  # a message
        return [said_in(value)]
    for name in ANSWERS:
        if value.get(name) not in (None, "", [], {}):
            return answers_in(value[name], name)
    if not any(name in value for name in ANSWERS):
        there = on_one_line(", ".join(value), 200) or "nothing"
        raise ValueError(f"no field that is known holds an answer, there are {there}: name yours by --field")
    return [""]


def _of_models(values: Sequence[Any]) -> list[Any]:
    """The messages of a dialogue that a model wrote; of values that are no messages, all."""
    authors: list[Any] = []
    for one in values:
        kind = one.get("type") if isinstance(one, dict) else None
        authors.append(kind if kind in ("ai", "human", "system", "tool") else None)  # of LangChain
        if isinstance(one, dict) and ("role" in one or "from" in one):
            authors[-1] = one.get("role") or one.get("from")
    if not any(authors):
        return [*values]
    return [one for one, author in zip(values, authors, strict=True) if author in MODELS]


def at_field(data: Any, path: str) -> list[Any]:
    """Return the answers in a field of a line.

    Args:
        data: The line.
        path: Names of fields with dots between, and numbers of items: "response.choices", "turns.1".

    Raises:
        ValueError: There is no such field; the message says which there are.
    """
    value, place = data, "the line"
    for name in path.split("."):
        there: dict[str, Any] = {}
        if isinstance(value, dict | list):
            there = dict(value) if isinstance(value, dict) else {str(number): one for number, one in enumerate(value)}
        if name not in there:
            raise ValueError(f"no field {path}: {place} has {on_one_line(', '.join(there) or 'no fields', 200)}")
        value, place = there[name], name
    return answers_in(value, place)


def pieces_of_line(data: Any, place: int, field: str | None = None, *, whole: bool = True) -> list[Piece]:
    """Return what a line of JSON or an event adds to outputs.

    Args:
        data: The JSON.
        place: Number of the line.
        field: Where its answers are, as `at_field` takes it. None: in one of the forms of servers, logs or data sets.
        whole: Whether every line has to add something; else it is an event, of which many add nothing.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It reports an error, or cannot be read.
    """
    if not isinstance(data, dict):
        raise ValueError("expected an object")
    if field is not None:
        return pieces_of_answers(at_field(data, field), f"line {place}")
    if data.get("error"):
        raise ValueError(f"the server reports an error, {on_one_line(str(data['error']), 200)}")
    pieces = pieces_of(data, place)
    if pieces is None:
        pieces = streamed(data)
    if pieces is None and whole:
        return pieces_of_answers(answers_in(data), f"line {place}")
    return pieces or []
