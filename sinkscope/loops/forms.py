"""What servers send while they generate, one reader for each form: `pieces_of` finds the form of an object.

To add a server, write a function from an object to its pieces (None: the object is of another form) and add it to
`FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from sinkscope.files.plain import visible
from sinkscope.loops.outputs import FIELDS
from sinkscope.loops.signals import is_token_id

StreamForm = Literal["auto", "text", "jsonl", "sse"]
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
    """The pieces of outputs in an object; None if it is of no form.

    Args:
        data: A line of JSON, or the data of a server-sent event.
        place: Number of the line.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It has the form of a server but cannot be read.
    """
    for reader in FORMS:
        outputs = reader(data, place)
        if outputs is not None:
            return outputs
    return None


def _openai(data: dict[str, Any], place: int) -> list[Piece] | None:
    """Chat completions and completions, of OpenAI and the servers that imitate it."""
    if "choices" not in data:
        return None
    outputs: list[Piece] = []
    for choice in data["choices"] or ():
        outputs += _choice(choice, data.get("id"))
    return outputs


def _choice(choice: dict[str, Any], origin: object) -> list[Piece]:
    """A choice of a chunk, with its tokens where it has log probabilities."""
    name = f"choice {int(choice.get('index') or 0)}"
    if origin:
        name = f"{name} of {shown(str(origin))}"
    last = choice.get("finish_reason") is not None
    tokens = _logged_tokens(choice.get("logprobs") or {}, name)
    if tokens:
        return [*tokens, Piece(name, last=last)]
    delta = choice.get("delta") or choice.get("message") or choice  # completions have their text in the choice
    parts = [delta.get("reasoning") or delta.get("reasoning_content"), delta.get("content"), delta.get("text")]
    for call in delta.get("tool_calls") or ():
        parts.append((call.get("function") or {}).get("arguments"))
    return [Piece(name, text="".join(part or "" for part in parts), last=last)]


def _logged_tokens(logprobs: dict[str, Any], name: str) -> list[Piece]:
    """The tokens that come with log probabilities, of completions or of chat completions."""
    outputs = [Piece(name, token, token) for token in logprobs.get("tokens") or ()]
    for token in logprobs.get("content") or ():
        outputs.append(Piece(name, str(token.get("bytes") or token["token"]), token["token"]))
    return outputs


def _responses(data: dict[str, Any], place: int) -> list[Piece] | None:
    """Events of OpenAI's Responses."""
    kind = str(data.get("type", ""))
    if not kind.startswith("response."):
        return None
    name = f"output {int(data.get('output_index') or 0)}"
    if kind.endswith(".delta") and isinstance(data.get("delta"), str):
        return [Piece(name, text=data["delta"])]
    if kind == "response.output_item.done":
        return [Piece(name, last=True)]
    return []


def _anthropic(data: dict[str, Any], place: int) -> list[Piece] | None:
    """Events of Anthropic's messages; each block of content is a stream."""
    kind = str(data.get("type", ""))
    name = f"block {data.get('index', 0)}"
    if kind == "content_block_delta":
        delta = data["delta"]
        text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
        return [Piece(name, text=text)]
    if kind == "content_block_stop":
        return [Piece(name, last=True)]
    if kind.startswith(("message_", "content_block_")) or kind == "ping":
        return []
    return None


def _sglang(data: dict[str, Any], place: int) -> list[Piece] | None:
    """SGLang's /generate, whose text is the whole output so far, or what is new if the server is told so."""
    about = data.get("meta_info")
    if not isinstance(about, dict) or "text" not in data:
        return None
    name = f"output {shown(str(about.get('id') or data.get('index') or 0))}"
    return [Piece(name, text=data["text"], last=bool(about.get("finish_reason")), cumulative=True)]


def _tgi(data: dict[str, Any], place: int) -> list[Piece] | None:
    """Text Generation Inference's /generate_stream: a token with its id, text and log probability."""
    token = data.get("token")
    if not isinstance(token, dict):
        return None
    name = "output 0"
    last = data.get("generated_text") is not None
    return [Piece(name, int(token["id"]), str(token["text"])), Piece(name, last=last)]


def _ollama(data: dict[str, Any], place: int) -> list[Piece] | None:
    """Ollama's /api/chat; /api/generate has the field `response`, which is read below."""
    message = data.get("message")
    if not isinstance(message, dict) or "done" not in data:
        return None
    text = (message.get("thinking") or "") + (message.get("content") or "")
    return [Piece("stream 0", text=text, last=bool(data["done"]))]


def _fields(data: dict[str, Any], place: int) -> list[Piece] | None:
    """A JSON line: a whole output, unless it has an `index` or is a piece by its field (llama.cpp, Ollama)."""
    present = [field for field in FILE_FIELDS if field in data]
    if not present:
        return None
    field = present[0]
    for candidate in present:
        if data[candidate] not in (None, "", []):
            field = candidate
            break
    whole = field in FIELDS and "index" not in data
    name = f"line {place}" if whole else f"stream {shown(str(data.get('index', 0)))}"
    last = whole or bool(data.get("stop") or data.get("done") or data.get("finish_reason"))
    value = data[field]
    if isinstance(value, str) and field != "token":
        return [Piece(name, text=value, last=last)]
    tokens = value if isinstance(value, list) else [value]
    if value is None:
        tokens = []
    outputs: list[Piece] = []
    for token in tokens:
        if not isinstance(token, str) and not is_token_id(token):
            raise ValueError(f"{shown(repr(token))} is no token")
        outputs.append(Piece(name, token, str(token)))
    return [*outputs, Piece(name, last=last)]


FORMS: tuple[Callable[[dict[str, Any], int], list[Piece] | None], ...] = (
    _openai,
    _responses,
    _anthropic,
    _sglang,
    _tgi,
    _ollama,
    _fields,
)
"""A reader for each form, in the order in which they are tried."""
