"""A piece of an answer has one address: its answer and the channel in it, whatever format it came in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from sinkscope.files.chats import REASONING, TEXT, MessageText
from sinkscope.files.plain import visible
from sinkscope.loops.text.signals import id_list

StreamForm = Literal["auto", "text", "jsonl", "sse", "csv", "parquet"]
TURNS, CALLS = "turns", "calls"
"""Channels of a whole conversation, and of all calls of an answer one after another."""
SHOWN_CHARACTERS = 60
_IDS = ("custom_id", "id", "request_id", "requestId", "responseId", "question_id", "doc_id", "conversation_id", "uuid")
"""The first one that is there: of a batch's line the client's own."""
_MODELS = ("model", "modelVersion", "modelId", "model_id")
MOST_OF_NAME = 200  # characters of an id, or of a model's name
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a line that is no output of a model may raise."""

__all__ = ["REASONING", "TEXT", "Origin", "Piece", "on_one_line", "origin_of", "pieces_of_output", "pieces_of_texts"]


class Origin(NamedTuple):
    """Where an output comes from: the id of its answer or record, and its model; empty if unknown."""

    id: str = ""
    model: str = ""


class Piece(NamedTuple):
    """A token of an answer, or a piece of its text. A piece without text opens nothing.

    Attributes:
        answer: Name of the answer.
        channel: "text", "reasoning", or one call of a tool: "call 0" and so on.
        text: Text of the piece.
        ends: Whether the answer ends here.
        key: Identifies equal tokens: an id, or its text. None if `text` is arbitrary text.
        prompt: What was asked for in the same record.
        context: In the channel "turns": what the model was told before.
        origin: Where it comes from, if known.
        group: Value of the field by which answers are grouped.
    """

    answer: str
    channel: str = TEXT
    text: str = ""
    ends: bool = False
    key: object = None
    prompt: str = ""
    context: str = ""
    origin: Origin | None = None
    group: str = ""


def origin_of(data: Any) -> Origin | None:
    """Return what a line of JSON or an event says about where it comes from; None if it says nothing."""
    if not isinstance(data, dict):
        return None
    values: list[str] = []
    for fields in (_IDS, _MODELS):
        name = ""
        for place in (data, data.get("message"), data.get("response")):
            for field in fields:
                value = place.get(field) if isinstance(place, dict) else None
                if not name and isinstance(value, str | int) and not isinstance(value, bool):
                    name = str(value)[:MOST_OF_NAME]
        values.append(name)
    return Origin(*values) if any(values) else None


def on_one_line(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Return the text on one line, without control characters, shortened in the middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def pieces_of_texts(texts: Iterable[MessageText], answer: str, prompt: str = "") -> list[Piece]:
    """Return the pieces of a whole answer."""
    pieces = [
        Piece(answer, part.channel, f"{part.text} " if part.is_name else part.text, prompt=prompt) for part in texts
    ]
    return [*pieces, Piece(answer, ends=True, prompt=prompt)]


def pieces_of_output(value: Any, name: str, prompt: str = "") -> list[Piece]:
    """Return the pieces of a whole output: a text, or tokens that are ids or texts.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str):
        return [Piece(name, text=value, ends=True, prompt=prompt)]
    tokens = id_list(value)
    if not isinstance(tokens, list | tuple):
        raise ValueError(f"expected a string, or a list of tokens, and found {on_one_line(repr(value))}")
    outputs: list[Piece] = []
    for token in tokens:
        is_id = type(token) is int and 0 <= token < 1 << 32  # a bool is no token
        if not is_id and not isinstance(token, str):
            raise ValueError(f"{on_one_line(repr(token))} is no token: expected a string, or an id from 0 to 2**32 - 1")
        text = token if isinstance(token, str) else f"{token} "
        outputs.append(Piece(name, text=text, key=token, prompt=prompt))
    return [*outputs, Piece(name, ends=True, prompt=prompt)]
