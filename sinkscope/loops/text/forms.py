"""What servers stream, as pieces with addresses: `Events.pieces` asks one reader after another, by kind of server.

Their cases name the events that carry text or end an answer; whatever else is sent carries none. To add a server, add a
case.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sinkscope.files.chats import REASONING, TEXT, MessageText, call_texts, reasoning_texts, texts_in
from sinkscope.loops.text.pieces import Piece, on_one_line, pieces_of_texts

RESPONSES = {
    "response.output_text.delta": TEXT,
    "response.text.delta": TEXT,
    "response.refusal.delta": TEXT,
    "response.output_audio_transcript.delta": TEXT,
    "response.audio_transcript.delta": TEXT,
    "response.reasoning_text.delta": REASONING,
    "response.reasoning.delta": REASONING,
    "response.reasoning_summary_text.delta": REASONING,
    "response.function_call_arguments.delta": "call",
    "response.mcp_call_arguments.delta": "call",
    "response.mcp_call.arguments.delta": "call",
    "response.custom_tool_call_input.delta": "call",
    "response.code_interpreter_call_code.delta": "call",
}
"""The events of OpenAI's Responses and Realtime that carry text, and its channel."""
RESPONSE_ENDS = frozenset(f"response.{end}" for end in ("completed", "failed", "incomplete", "cancelled", "done"))
BLOCKS = {"text_delta": TEXT, "thinking_delta": REASONING, "input_json_delta": "call"}
"""The deltas of Anthropic's blocks that carry text, and their channel."""
TYPED = {
    "text-delta": TEXT,  # Vercel's AI SDK
    "reasoning-delta": REASONING,
    "tool-input-delta": "call",
    "TEXT_MESSAGE_CONTENT": TEXT,  # AG-UI
    "THINKING_TEXT_MESSAGE_CONTENT": REASONING,
    "REASONING_MESSAGE_CONTENT": REASONING,
    "TOOL_CALL_ARGS": "call",
    "message.delta": TEXT,  # LM Studio
    "reasoning.delta": REASONING,
}
"""Types of events whose text is in "delta", "inputTextDelta" or "content"."""
TYPED_ENDS = frozenset({"finish", "RUN_FINISHED", "RUN_ERROR", "chat.end"})
COHERE = {"content-delta": TEXT, "tool-plan-delta": REASONING, "tool-call-start": "call", "tool-call-delta": "call"}
HOLDS_ANSWERS = frozenset("candidates output content message messages response text completion answer".split())
NOT_ENDED = ("", "null", "none", "None")
"""What servers send as the reason to finish until there is one."""


class Events:
    """The events of one stream; earlier events tell to which channel later ones belong."""

    def __init__(self) -> None:
        self._named = set[tuple[str, str]]()  # calls whose name was read
        self._thoughts: dict[tuple[str, int], str] = {}  # answer and item -> which form of one reasoning is read
        self._calls: dict[str, dict[Any, int]] = {}  # answer -> number of each call by its index and id

    def pieces(self, data: Mapping[str, Any], place: int) -> list[Piece] | None:
        """Return the pieces in an event or a line; None if it has the form of none.

        Args:
            data: The event, or a line of JSON.
            place: Number of the line.

        Raises:
            ValueError, TypeError, LookupError, AttributeError: It has the form of a server but cannot be read.
        """
        match data:
            case {"choices": choices}:  # OpenAI's chat completions and completions, and the servers that imitate them
                return self._choices(choices or (), data.get("id"), f"line {place}")
            case {"type": str(kind)}:
                pieces = self._of_type(data, kind)
            case _:
                pieces = None
        for read in (self._of_local_server, self._of_cloud, _of_agent):
            if pieces is None:
                pieces = read(data)
        return pieces

    def _choices(self, choices: Iterable[Any], origin: object, line: str) -> list[Piece] | None:
        """The choices of a chunk or of a whole answer; None: they are answers of MT-bench."""
        pieces: list[Piece] = []
        for choice in choices:
            if "turns" in choice:
                return None
            pieces += self._choice(choice, origin, line)
        return pieces

    def _of_type(self, data: Mapping[str, Any], kind: str) -> list[Piece] | None:
        """An event that names its type."""
        if kind.startswith("response."):
            return self._response(data, kind)
        if kind.startswith(("content_block_", "message_")) or kind == "ping":
            return self._block(data, kind)
        if kind in TYPED or kind in TYPED_ENDS:
            return self._typed(data, kind)
        if kind in COHERE or kind == "message-end":
            return self._cohere(data, kind)
        return None

    def _of_local_server(self, data: Mapping[str, Any]) -> list[Piece] | None:
        """An event of a server with one answer in a stream."""
        match data:
            case {"message": dict(message), "done": done}:  # Ollama's /api/chat
                return self._message(message, "stream 0", bool(done))
            case {"response": str(text), "done": done}:  # Ollama's /api/generate
                return self._message({**data, "content": text}, "stream 0", bool(done))
            case {"content": str(text), "stop": bool(stop)}:  # llama.cpp's /completion
                return [Piece(f"stream {int(data.get('index') or 0)}", text=text, ends=stop)]
            case {"token": {"text": str(text)}}:  # TGI, whose last event repeats the whole text
                is_word = not data["token"].get("special")
                return [Piece("stream 0", text=text * is_word, ends=data.get("generated_text") is not None)]
            case {"token": str(text), "finish_reason": reason}:  # KoboldCpp
                return [Piece("stream 0", text=text, ends=has_ended(reason))]
            case _:
                return None

    def _of_cloud(self, data: Mapping[str, Any]) -> list[Piece] | None:
        """An event of Gemini, Bedrock's Converse or OpenAI's Assistants."""
        match data:
            case {"candidates": [*candidates]} if "responseId" in data or not all(map(_is_last, candidates)):
                return self._candidates(candidates, data.get("responseId"))
            case {"contentBlockStart": dict(block)} | {"contentBlockDelta": dict(block)}:
                return self._converse(block)
            case {"messageStop": _}:
                return [Piece("message", ends=True)]
            case {"messageStart": _} | {"contentBlockStop": _} | {"metadata": {"usage": _}}:
                return []
            case {"object": "thread.message.delta", "delta": dict(delta)}:
                return self._pieces(texts_in(delta), f"message {data.get('id', 0)}")
            case _:
                return None

    def _pieces(self, texts: list[MessageText], answer: str, ends: bool = False, prefix: str = "") -> list[Piece]:
        """The pieces of texts, without names and reasoning that were read before; a call's number goes on."""
        pieces: list[Piece] = []
        for part in texts:
            if part.channel == REASONING and part.kind:
                if self._thoughts.setdefault((answer, 0), part.kind) != part.kind:
                    continue
            text = part.text
            if part.is_name:
                if not text or (answer, part.channel) in self._named:
                    continue
                self._named.add((answer, part.channel))
                text = f"{text} "
            pieces.append(Piece(answer, part.channel, text))
        if ends:
            self._calls.pop(answer, None)
            self._thoughts = {key: kind for key, kind in self._thoughts.items() if key[0] != answer}
            self._named = {call for call in self._named if call[0] != answer}
            pieces.append(Piece(answer, ends=True))
        return pieces

    def _message(self, delta: Mapping[str, Any], answer: str, ends: bool) -> list[Piece]:
        """A delta of a chat: its own fields, and the calls by the index that each names."""
        calls = delta.get("tool_calls") or ()
        texts = texts_in(
            {name: value for name, value in delta.items() if name not in ("tool_calls", "reasoning_details")}
        )
        if delta.get("reasoning_details") and not reasoning_texts({**delta, "reasoning_details": None}):
            texts = [*_detailed(delta["reasoning_details"]), *texts]
        for call in calls:
            texts += [
                part._replace(channel=self._call(call, answer)) for part in call_texts(call.get("function") or call)
            ]
        return self._pieces(texts, answer, ends)

    def _call(self, call: Mapping[str, Any], answer: str) -> str:
        """The channel of a call: by its index, else by its id; a name without either begins another.

        Some servers give all calls the index 0, each with an id and a name of its own.
        """
        function = call.get("function") or call
        index, own, has_name = call.get("index", function.get("index")), call.get("id"), bool(function.get("name"))
        known = self._calls.setdefault(answer, {})
        keys = [("index", index)] if index is not None else [("last", None)]
        if own is not None:
            keys.append(("id", own))
        number = known.get(keys[-1])
        goes_on = index is not None or not has_name
        if own is not None:
            goes_on = index is not None and not has_name
        if number is None and goes_on:
            number = known.get(keys[0])
        if number is None:
            number = len(set(known.values()))
        for key in (*keys, ("last", None)):
            known[key] = number
        return f"call {number}"

    def _placed(self, texts: list[MessageText], answer: str, place: int) -> list[MessageText]:
        """Texts of a block or item whose place is known; calls are counted in the order in which they begin."""
        placed: list[MessageText] = []
        for part in texts:
            if part.channel.startswith("call"):
                known = self._calls.setdefault(answer, {})
                part = part._replace(channel=f"call {known.setdefault(('place', place), len(known))}")
            placed.append(part)
        return placed

    def _choice(self, choice: Mapping[str, Any], origin: object, line: str) -> list[Piece]:
        """A choice of a chunk or of a whole answer."""
        name = f"choice {int(choice.get('index') or 0)}"
        if "message" in choice and "delta" not in choice:
            return pieces_of_texts(texts_in(choice["message"] or {}), f"{line} {name}")
        if origin:
            name = f"{name} of {on_one_line(str(origin))}"
        delta = choice["delta"] if "delta" in choice else {"text": choice.get("text"), **_thoughts_of(choice)}
        if delta is None:
            delta = {}
        if not isinstance(delta, Mapping):
            raise ValueError(f"expected a delta, and found {on_one_line(repr(delta))}")
        return self._message(delta, name, has_ended(choice.get("finish_reason")))

    def _response(self, data: Mapping[str, Any], kind: str) -> list[Piece]:
        """An event of OpenAI's Responses or Realtime; its items are channels of one answer."""
        answer = f"response {data.get('response_id') or ''}".strip()
        number = int(data.get("output_index") or 0)
        channel = RESPONSES.get(kind)
        if kind == "response.output_item.added":
            item = data.get("item") or {}
            return self._pieces(
                self._placed([MessageText("call", str(item.get("name") or ""), is_name=True)], answer, number), answer
            )
        if kind in RESPONSE_ENDS:
            return self._pieces([], answer, ends=True)
        if channel is None or not isinstance(data.get("delta"), str):
            return []
        if channel == "call":
            return self._pieces(self._placed([MessageText(channel, data["delta"])], answer, number), answer)
        if channel == REASONING and self._thoughts.setdefault((answer, number), kind) != kind:
            return []
        return [Piece(answer, channel, data["delta"])]

    def _block(self, data: Mapping[str, Any], kind: str) -> list[Piece]:
        """An event of Anthropic's messages; each block belongs to a channel."""
        number = int(data.get("index") or 0)
        if kind == "content_block_start":
            block = data.get("content_block") or {}
            return self._pieces(self._placed(texts_in({"content": [block]}), "message", number), "message")
        if kind == "content_block_delta":
            delta = data["delta"]
            channel = BLOCKS.get(delta.get("type") or ("text_delta" if "text" in delta else ""))
            if channel is None:
                return []
            text = delta.get("text") or delta.get("thinking") or delta.get("partial_json") or ""
            return self._pieces(self._placed([MessageText(channel, text)], "message", number), "message")
        if kind == "message_stop":
            return self._pieces([], "message", ends=True)
        return []

    def _typed(self, data: Mapping[str, Any], kind: str) -> list[Piece]:
        """An event of Vercel's AI SDK, AG-UI or LM Studio."""
        if kind in TYPED_ENDS:
            return self._pieces([], "stream 0", ends=True)
        text = next(
            (data[name] for name in ("delta", "inputTextDelta", "content") if isinstance(data.get(name), str)), ""
        )
        channel = TYPED[kind]
        if channel == "call":
            call = {"id": data.get("toolCallId") or data.get("id")}
            channel = self._call(call, "stream 0")
        return [Piece("stream 0", channel, text)]

    def _cohere(self, data: Mapping[str, Any], kind: str) -> list[Piece]:
        """An event of Cohere's chat."""
        if kind == "message-end":
            return self._pieces([], "message", ends=True)
        message = (data.get("delta") or {}).get("message") or {}
        if COHERE[kind] == "call":
            call = message.get("tool_calls") or {}
            texts = self._placed(call_texts(call.get("function") or {}), "message", int(data.get("index") or 0))
            return self._pieces(texts, "message")
        if COHERE[kind] == REASONING:
            return [Piece("message", REASONING, str(message.get("tool_plan") or ""))]
        return self._pieces(texts_in(message), "message")

    def _candidates(self, candidates: list[Any], origin: object) -> list[Piece]:
        """Candidates of Gemini, which sends each call whole."""
        pieces: list[Piece] = []
        for candidate in candidates:
            name = f"choice {int(candidate.get('index') or 0)}"
            if origin is not None:
                name += f" of {on_one_line(str(origin))}"
            texts: list[MessageText] = []
            for piece in texts_in(candidate.get("content") or {}):
                place = len(self._calls.get(name, ())) - (not piece.is_name)
                texts += self._placed([piece], name, place)
            pieces += self._pieces(texts, name, bool(candidate.get("finishReason")))
        return pieces

    def _converse(self, block: Mapping[str, Any]) -> list[Piece]:
        """An event of a block of Bedrock's Converse."""
        number = int(block.get("contentBlockIndex") or 0)
        inner = block.get("delta") or block.get("start") or {}
        return self._pieces(self._placed(texts_in({"content": [inner]}), "message", number), "message")


def _of_agent(data: Mapping[str, Any]) -> list[Piece] | None:
    """An event of Dify, or what is told of tokens behind the end of an answer."""
    match data:
        case {"event": "message" | "agent_message", "answer": str(text)}:
            return [Piece("stream 0", text=text)]
        case {"usageMetadata": _} | {"usage": dict()} if not data.keys() & HOLDS_ANSWERS:
            return []
        case {"event": "message_end"}:
            return [Piece("stream 0", ends=True)]
        case _:
            return None


def has_ended(reason: object) -> bool:
    """Return whether a reason to finish is one."""
    return bool(reason) and reason not in NOT_ENDED


def _detailed(details: Any) -> list[MessageText]:
    """The pieces of a reasoning in details, as text or as a summary."""
    pieces: list[MessageText] = []
    for detail in details if isinstance(details, list) else ():
        for text in texts_in(detail):
            pieces.append(text._replace(kind=str(detail.get("type"))))
    return pieces


def _thoughts_of(choice: Mapping[str, Any]) -> dict[str, Any]:
    return {"reasoning": choice.get("reasoning") or choice.get("reasoning_content")}


def _is_last(candidate: Any) -> bool:
    return isinstance(candidate, dict) and bool(candidate.get("finishReason"))
