"""The forms of outputs and of what servers send: `pieces_of` has a case for each. To add a server, add a case."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from sinkscope.files.plain import visible
from sinkscope.loops.text.signals import id_list

StreamForm = Literal["auto", "text", "jsonl", "sse"]
SHOWN_CHARACTERS = 60
_THOUGHT = ("reasoning", "reasoning_content", "reasoningContent", "reasoningText", "thinking", "reasoning_details")
"""Fields for the same reasoning, of which the first that is filled counts: some servers fill several."""
_SAID = tuple("summary content parts text value refusal name arguments input partial_json".split())
EVENTS = ("data:", "event:", "id:", "retry:", ":")
"""How server-sent events may begin."""
_IDS = ("custom_id", "id", "request_id", "requestId", "responseId", "question_id", "doc_id")
"""The first one that is there: of a batch's line the client's own."""
_MODELS = ("model", "modelVersion", "modelId", "model_id")
MOST_OF_NAME = 200  # characters of an id, or of a model's name
UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading a line that is no output of a model may raise."""


class Origin(NamedTuple):
    """Where an output comes from: the id of its answer or record, and its model; empty if unknown."""

    id: str = ""
    model: str = ""


def origin_of(data: Any) -> Origin | None:
    """Return what a line of JSON or an event says about where it comes from; None if it says nothing."""
    if not isinstance(data, dict):
        return None
    values: list[str] = []
    for fields in (_IDS, _MODELS):
        found = ""
        for place in (data, data.get("message"), data.get("response")):
            for field in fields:
                value = place.get(field) if isinstance(place, dict) else None
                if not found and isinstance(value, str | int) and not isinstance(value, bool):
                    found = str(value)[:MOST_OF_NAME]
        values.append(found)
    return Origin(*values) if any(values) else None


class Piece(NamedTuple):
    """A token of a stream, or a piece of its text.

    Attributes:
        stream: Name of the stream.
        key: Identifies equal tokens: an id, its bytes, or its text. None if `text` is arbitrary text.
        text: Text of the token.
        last: Whether the stream ends here.
        part: Whether the stream is a part of an answer that may hold no text, such as hidden reasoning.
        origin: Where it comes from, if known.
    """

    stream: str
    key: object = None
    text: str = ""
    last: bool = False
    part: bool = False
    origin: Origin | None = None


def on_one_line(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """Return the text on one line, without control characters, shortened in the middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def pieces_of(data: dict[str, Any], place: int) -> list[Piece] | None:
    """Return the pieces of outputs in what a server sends; None if it has no form. The first case that fits counts.

    Args:
        data: A line of JSON, or the data of a server-sent event.
        place: Number of the line.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It has the form of a server but cannot be read.
    """
    line = f"line {place}"
    match data:
        case {"choices": choices}:  # chat completions and completions, of OpenAI and the servers that imitate it
            outputs: list[Piece] = []
            for choice in choices or ():
                if "turns" in choice:  # answers of MT-bench
                    return None
                outputs += _choice(choice, data.get("id"), line)
            return outputs
        case {"type": str(kind)} if kind.startswith("response."):
            return _response(data, kind)
        case {"type": "content_block_delta"}:  # Anthropic's messages; each block is a stream
            return [Piece(f"block {int(data.get('index') or 0)}", text=said_in(data["delta"]))]
        case {"type": "content_block_stop"}:
            return [Piece(f"block {int(data.get('index') or 0)}", last=True, part=True)]
        case {"type": str(kind)} if kind.startswith(("message_", "content_block_", "ping")):
            return []
        case {"message": dict(message), "done": done}:  # Ollama's /api/chat
            return [Piece("stream 0", text=said_in(message), last=bool(done))]
        case {"response": str(text), "done": done}:  # Ollama's /api/generate
            return [Piece("stream 0", text=said_in(data) + text, last=bool(done))]
        case {"content": str(text), "stop": bool(stop)}:  # llama.cpp's /completion
            return [Piece(f"stream {int(data.get('index') or 0)}", text=text, last=stop)]
        case {"output": [dict(), *_] as items} | {"content": [dict(), *_] as items}:  # whole: Responses, Anthropic
            return [Piece(line, text="\n".join(map(said_in, items)), last=True)]
        case {"response": {"body": dict(body)}}:  # a line of OpenAI's batches
            return pieces_of(body, place)
        case {"role": str()}:  # a message of a chat
            return [Piece(line, text=said_in(data), last=True)]
        case _:
            return None


def said_in(item: Mapping[str, Any]) -> str:
    """Return what a message, a part of one, or an item of Responses says: its reasoning, its text, its calls."""
    parts: list[str] = []
    thought = [field for field in _THOUGHT if item.get(field)]
    for field in (*thought[:1], *_SAID):
        value = item.get(field)
        if isinstance(value, str):
            parts.append(value)
        elif isinstance(value, list):
            parts += [part if isinstance(part, str) else said_in(part) for part in value]
        elif isinstance(value, dict) and field not in ("arguments", "input"):
            parts.append(said_in(value))
        elif value is not None:  # arguments
            parts.append(json.dumps(value, ensure_ascii=False))
    calls = [call.get("function") for call in item.get("tool_calls") or ()]
    for call in (*calls, item.get("function_call")):
        parts.append(said_in(call) if call else "")
    return "".join(parts)


def _response(data: dict[str, Any], kind: str) -> list[Piece]:
    """An event of OpenAI's Responses."""
    name = f"output {int(data.get('output_index') or 0)}"
    if kind == "response.output_item.done":
        return [Piece(name, last=True, part=True)]
    if kind.endswith(".delta") and isinstance(data.get("delta"), str):
        return [Piece(name, text=data["delta"])]
    return []


def _choice(choice: dict[str, Any], origin: object, line: str) -> list[Piece]:
    """A choice of a chunk or of a whole answer."""
    name = f"choice {int(choice.get('index') or 0)}"
    whole = "message" in choice
    if whole:
        name = f"{line} {name}"
    elif origin:
        name = f"{name} of {on_one_line(str(origin))}"
    last = whole or bool(choice.get("finish_reason"))  # some servers send "" until the end
    return [Piece(name, text=said_in(choice.get("delta") or choice.get("message") or choice), last=last)]


def pieces_of_output(value: Any, name: str) -> list[Piece]:
    """Return the pieces of a whole output: a text, or tokens that are ids or texts.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(value, str):
        return [Piece(name, text=value, last=True)]
    tokens = id_list(value)
    if not isinstance(tokens, list | tuple):
        raise ValueError(f"expected a string, or a list of tokens, and found {on_one_line(repr(value))}")
    outputs: list[Piece] = []
    for token in tokens:
        is_id = type(token) is int and 0 <= token < 1 << 32  # a bool is no token
        if not is_id and not isinstance(token, str):
            raise ValueError(f"{on_one_line(repr(token))} is no token: expected a string, or an id from 0 to 2**32 - 1")
        outputs.append(Piece(name, token, token if isinstance(token, str) else f"{token} "))
    return [*outputs, Piece(name, last=True)]
