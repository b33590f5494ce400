"""What servers send while they generate: `pieces_of` has a case for each form. To add a server, add a case."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from sinkscope.files.plain import visible
from sinkscope.loops.text.outputs import FIELDS
from sinkscope.loops.text.signals import is_token_id

StreamForm = Literal["auto", "text", "jsonl", "sse", "session"]
SHOWN_CHARACTERS = 60
_PIECE_FIELDS = ("token", "content", "response")  # of a JSON line that adds to an output; FIELDS are whole ones
FILE_FIELDS = (*FIELDS, *_PIECE_FIELDS)


class Piece(NamedTuple):
    """A token of a stream, or a piece of its text.

    Attributes:
        stream: Name of the stream.
        key: Identifies equal tokens: an id, its bytes, or its text. None if `text` is arbitrary text.
        text: Text of the token.
        last: Whether the stream ends here.
        cumulative: Whether the text may be all of the output so far, instead of what is new.
    """

    stream: str
    key: object = None
    text: str = ""
    last: bool = False
    cumulative: bool = False


def shown(text: str, limit: int = SHOWN_CHARACTERS) -> str:
    """The text on one line, without control characters, shortened in the middle."""
    if len(text) > limit:
        text = f"{text[: limit // 2]}...{text[-limit // 2 :]}"
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def pieces_of(data: dict[str, Any], place: int) -> list[Piece] | None:
    """The pieces of outputs in an object; None if it is of no form. The first case that fits is its form.

    Args:
        data: A line of JSON, or the data of a server-sent event.
        place: Number of the line.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It has the form of a server but cannot be read.
    """
    match data:
        case {"choices": choices}:  # chat completions and completions, of OpenAI and the servers that imitate it
            outputs: list[Piece] = []
            for choice in choices or ():
                outputs += _choice(choice, data.get("id"))
            return outputs
        case {"type": str(kind)} if kind.startswith("response."):
            return _response(data, kind)
        case {"type": "content_block_delta"}:  # Anthropic's messages; each block is a stream
            delta = data["delta"]
            text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            return [Piece(f"block {data.get('index', 0)}", text=text)]
        case {"type": "content_block_stop"}:
            return [Piece(f"block {data.get('index', 0)}", last=True)]
        case {"type": str(kind)} if kind.startswith(("message_", "content_block_", "ping")):
            return []
        case {"meta_info": dict(about), "text": text}:  # SGLang's /generate
            name = f"output {shown(str(about.get('id') or data.get('index') or 0))}"
            return [Piece(name, text=text, last=bool(about.get("finish_reason")), cumulative=True)]
        case {"token": {"id": key, "text": text}}:  # Text Generation Inference's /generate_stream
            return [Piece("output 0", int(key), str(text), last=data.get("generated_text") is not None)]
        case {"message": dict(message), "done": done}:  # Ollama's /api/chat; /api/generate has the field `response`
            text = (message.get("thinking") or "") + (message.get("content") or "")
            return [Piece("stream 0", text=text, last=bool(done))]
        case _:
            return _fields(data, place)


def _response(data: dict[str, Any], kind: str) -> list[Piece]:
    """An event of OpenAI's Responses."""
    name = f"output {int(data.get('output_index') or 0)}"
    if kind == "response.output_item.done":
        return [Piece(name, last=True)]
    if kind.endswith(".delta") and isinstance(data.get("delta"), str):
        return [Piece(name, text=data["delta"])]
    return []


def _choice(choice: dict[str, Any], origin: object) -> list[Piece]:
    """A choice of a chunk, with its tokens where it has log probabilities."""
    name = f"choice {int(choice.get('index') or 0)}"
    if origin:
        name = f"{name} of {shown(str(origin))}"
    last = choice.get("finish_reason") is not None
    logged = choice.get("logprobs") or {}
    tokens = [Piece(name, token, token) for token in logged.get("tokens") or ()]  # of completions
    for token in logged.get("content") or ():  # of chat completions
        tokens.append(Piece(name, str(token.get("bytes") or token["token"]), token["token"]))
    if tokens:
        return [*tokens, Piece(name, last=last)]
    delta = choice.get("delta") or choice.get("message") or choice  # completions have their text in the choice
    parts = [delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content"), delta.get("text")]
    for call in delta.get("tool_calls") or ():
        parts.append((call.get("function") or {}).get("arguments"))
    return [Piece(name, text="".join(part or "" for part in parts), last=last)]


def _fields(data: dict[str, Any], place: int) -> list[Piece] | None:
    """A JSON line: a whole output, unless it has an `index` or is a piece by its field (llama.cpp, Ollama)."""
    present = [field for field in FILE_FIELDS if field in data]
    if not present:
        return None
    filled = [field for field in present if data[field] not in (None, "", [])]
    field = (filled or present)[0]
    whole = field in FIELDS and "index" not in data
    name = f"line {place}" if whole else f"stream {shown(str(data.get('index', 0)))}"
    last = whole or bool(data.get("stop") or data.get("done") or data.get("finish_reason"))
    value = data[field]
    if isinstance(value, str) and field != "token":
        return [Piece(name, text=value, last=last)]
    if not isinstance(value, list):
        value = [] if value is None else [value]
    outputs: list[Piece] = []
    for token in value:
        if not isinstance(token, str) and not is_token_id(token):
            raise ValueError(f"{shown(repr(token))} is no token")
        outputs.append(Piece(name, token, str(token)))
    return [*outputs, Piece(name, last=last)]
