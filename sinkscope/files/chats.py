"""Who wrote what: the messages of a chat or of an agent's session, and the text, reasoning and calls of a message.

A list of what holds text decides, so that pictures, audio, encrypted reasoning and results of tools are never text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

Role = Literal["assistant", "user", "system", "tool", ""]
TEXT, REASONING = "text", "reasoning"
"""Channels of an answer; the others are its calls of tools, "call 0" and so on."""
ROLES: dict[str, Role] = {
    **dict.fromkeys(
        ("assistant", "model", "gpt", "ai", "bot", "chatgpt", "bing", "bard", "gemini", "chatbot"), "assistant"
    ),
    **dict.fromkeys(("aimessage", "aimessagechunk", "agent", "claude", "llm", "completion"), "assistant"),
    **dict.fromkeys(("user", "human", "prompter", "humanmessage", "customer"), "user"),
    **dict.fromkeys(("system", "developer", "systemmessage", "instruction"), "system"),
    **dict.fromkeys(("tool", "function", "ipython", "observation", "environment", "toolmessage", "toolresult"), "tool"),
    **dict.fromkeys(("tool_result", "function_call_output", "custom_tool_call_output", "functionmessage"), "tool"),
    **dict.fromkeys(("local_shell_call_output", "computer_call_output", "mcp_approval_response"), "tool"),
}
"""How formats name the author of a message, in lower case."""
_AUTHORS = ("role", "from", "author", "sender", "speaker", "source")
_TYPES = ("human", "ai", "system", "tool", "user", "assistant", "gemini", "function")  # of LangChain and agents
_KINDS: dict[Any, Role] = {"request": "user", "response": "assistant"}  # of Pydantic AI
_LISTS = (
    "messages",
    "conversations",
    "conversation",
    "contents",
    "chat_messages",
    "history",
    "chat_history",
    "dialogue",
    "dialog",
    "transcript",
)
"""Fields that hold the messages of a chat."""
ANSWERS = (
    *("tokens", "choices", "candidates", "outputs", "results", "result", "response", "response_body", "body", "output"),
    *("outputBodyJson", "completion", "completions", "generated_text", "generated_texts", "generation", "generations"),
    *("outputText", "output_text", "model_output", "model_response", "model_answer", "prediction", "predictions"),
    *("generated", "reply", "assistant", "answer", "resps", "message", "messages", "conversations", "conversation"),
    *("contents", "chat_messages", "history", "chat_history", "dialogue", "dialog", "transcript", "mapping", "turns"),
    *("text_output", "text", "content", "parts"),
)
"""Fields that hold an answer or what holds it: the first that is filled counts. Ids are more exact than text."""
PROMPTS = (
    "prompt",
    "instruction",
    "question",
    "query",
    "input",
    "inputs",
    "request",
    "request_body",
    "messages",
    "user",
)
"""Fields that hold what was asked for."""
_THOUGHT = ("reasoning", "reasoning_content", "reasoningContent", "reasoningText", "thinking", "reasoning_details")
"""Fields for the same reasoning, of which the first that is filled counts: some servers fill several."""
_CALLS = frozenset(
    "tool_use server_tool_use mcp_tool_use function_call custom_tool_call tool-call toolCall tool_call mcp_call "
    "local_shell_call code_interpreter_call computer_call web_search_call file_search_call function".split()
)
_ARGUMENTS = ("arguments", "input", "args", "partial_json", "code", "action", "parameters")
_REASONING_PARTS = frozenset("thinking reasoning reasoning_text summary_text reasoning.text reasoning.summary".split())
_TEXT_PARTS = frozenset("text output_text input_text refusal text_delta message markdown paragraph".split())


class MessageText(NamedTuple):
    """A text of a message.

    Attributes:
        channel: "text", "reasoning", or "call 0" and so on.
        text: The text.
        is_name: Whether it is the name of a tool, which some servers repeat with each piece of a call.
        kind: Of a reasoning: the field that holds it; the same reasoning may stand in several.
    """

    channel: str
    text: str
    is_name: bool = False
    kind: str = ""


class Message(NamedTuple):
    """A message of a chat.

    Attributes:
        role: Who wrote it; empty if unknown.
        texts: Its texts.
        data: The message as it was given.
    """

    role: Role
    texts: tuple[MessageText, ...]
    data: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Return what it says, without reasoning and calls."""
        return "".join(part.text for part in self.texts if part.channel == TEXT)

    @property
    def everything(self) -> str:
        """Return all its texts; of what a tool gave back, the whole data."""
        if self.role == "tool" or not self.texts:
            return json.dumps(self.data.get("content", self.data.get("output")), ensure_ascii=False, default=str)
        return "\n".join(part.text for part in self.texts)


def role_of(data: Any) -> Role | None:
    """Return who wrote a message; None if it is no message, or names no author."""
    if not isinstance(data, Mapping):
        return None
    for field in _AUTHORS:
        value = data.get(field)
        if isinstance(value, Mapping):  # {"author": {"role": ...}}
            value = value.get("role")
        if isinstance(value, str) and value.lower() in ROLES:
            return _checked_role(data, ROLES[value.lower()])
    if data.get("kind") in _KINDS and isinstance(data.get("parts"), list):
        return _KINDS[data["kind"]]
    kind = data.get("type")
    if isinstance(kind, str) and (kind in _TYPES or kind.lower().endswith(("message", "messagechunk", "_output"))):
        return ROLES.get(kind.lower())
    if isinstance(kind, str) and (kind in _CALLS or kind in _REASONING_PARTS):  # items of OpenAI's Responses
        return "assistant"
    if any(isinstance(data.get(field), str) for field in ("role", "from")):
        return ""  # an author of a chat who is no model
    return None


def _checked_role(data: Mapping[str, Any], role: Role) -> Role:
    """The role; what tools give back travels under the name of the user."""
    content = data.get("content") or data.get("parts")
    if role == "user" and isinstance(content, list) and content:
        kinds = [part.get("type") or next(iter(part), "") for part in content if isinstance(part, Mapping)]
        if kinds and all(kind in ("tool_result", "functionResponse", "toolResult") for kind in kinds):
            return "tool"
    return role


def unwrapped(line: Any) -> Any:
    """Return the message in a line of an agent's session, such as Claude Code's and Codex'; else the line."""
    match line:
        case {"type": "response_item", "payload": dict(payload)}:  # Codex
            return payload
        case {"type": str(kind), "message": dict(message)} if kind in (*_TYPES, "message") and role_of(message):
            return message
        case {"type": str(kind), "data": dict(data)} if kind in _TYPES:  # LangChain
            return {"role": kind, **data}
        case {"kwargs": dict(kwargs), "id": [*_, str(kind)]} if kind.lower() in ROLES:  # LangChain, serialised
            return {**kwargs, "role": kind}
        case {"message": {"author": dict(author)} as message, **rest} if "parent" in rest:  # of ChatGPT's export
            return {**message, "role": author.get("role")}
        case {"source": str(source), "action": str(kind), "args": dict(args)}:  # OpenHands
            turn = {"role": source, "content": args.get("content") or args.get("thought") or ""}
            return turn if kind == "message" else {**turn, "tool_calls": [{"name": kind, "arguments": args}]}
        case {"observation": _, "source": _}:
            return {**line, "role": "tool"}
        case {"message": dict(message)} if role_of(line) is None and role_of(message):
            return message
        case {"message.role": str()}:  # OpenInference
            return {name.removeprefix("message."): value for name, value in line.items()}
        case _:
            return line


def messages_in(value: Any) -> list[Message] | None:
    """Return the messages of a list, or of a record that holds one; None if there are none."""
    if isinstance(value, Mapping):
        if isinstance(value.get("mapping"), Mapping):  # ChatGPT's export
            nodes = [unwrapped(node) for node in value["mapping"].values() if isinstance(node, Mapping)]
            return messages_in([node for node in nodes if role_of(node)])
        for field in _LISTS:
            if isinstance(value.get(field), list):
                messages = messages_in(value[field])
                if messages is not None:
                    return messages
        return None
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
        return None
    messages = [message_of(item) for item in value]
    if not any(message is not None for message in messages):
        return None
    return [message for message in messages if message is not None]


def message_of(line: Any) -> Message | None:
    """Return the message in a line of a log or an item of a list; None if it names no author."""
    data = unwrapped(line)
    role = role_of(data)
    if role is None:
        return None
    return Message(role, tuple(texts_in(data)), data)


def prompt_before(messages: Sequence[Message], place: int) -> str:
    """Return the last text of a user before a message."""
    for message in reversed(messages[:place]):
        if message.role == "user" and message.text:
            return message.text
    return ""


def texts_in(item: Mapping[str, Any]) -> list[MessageText]:
    """Return the texts of a message, a part of one, or an item of OpenAI's Responses; each call has its number."""
    texts: list[MessageText] = []
    for part in _texts(item):
        number = 0
        if part.channel == "call":
            for earlier in texts:
                if earlier.channel.startswith("call"):
                    number = int(earlier.channel.split()[1])
            starts = part.is_name and any(earlier.channel == f"call {number}" for earlier in texts)
            part = part._replace(channel=f"call {number + starts}")
        texts.append(part)
    return texts


def _texts(item: Mapping[str, Any]) -> Iterable[MessageText]:
    """The texts of an item; all calls are "call", and each begins with its name, which may be empty."""
    kind = kind_of_part(item)
    if isinstance(kind, str) and (kind in _CALLS or kind.startswith("tool-")) and "role" not in item:
        yield from call_texts(item)
        return
    if kind in _REASONING_PARTS:
        yield MessageText(REASONING, _reasoning(item), kind=str(kind))
        return
    yield from reasoning_texts(item)
    for field in ("content", "parts"):
        yield from _content(item.get(field))
    for field in ("text", "value", "refusal", "message", "utterance"):
        if field in ("text", "value", "refusal") or isinstance(item.get(field), str):
            yield from _content(item.get(field), item.get("thought") is True)
    audio = item.get("audio")
    if isinstance(audio, Mapping) and isinstance(audio.get("transcript"), str):
        yield MessageText(TEXT, audio["transcript"])
    for call in item.get("tool_calls") or ():
        yield from call_texts(call.get("function") or call)
    for field in ("function_call", "functionCall", "toolUse", "executableCode", "tool_use"):
        if isinstance(item.get(field), Mapping):
            yield from call_texts(item[field])


def reasoning_texts(item: Mapping[str, Any]) -> list[MessageText]:
    """Return the reasoning in the fields of a message: the first that is filled."""
    for field in _THOUGHT:
        if item.get(field):
            text = _reasoning(item[field])
            return [MessageText(REASONING, text, kind=field)] if text else []
    return []


def call_texts(call: Mapping[str, Any]) -> list[MessageText]:
    """Return the name and the arguments of a call, in the channel "call"."""
    name = call.get("name") or call.get("toolName") or call.get("tool_name") or ""
    kind = call.get("type")
    if not name and isinstance(kind, str) and kind.startswith("tool-"):
        name = kind.removeprefix("tool-")
    texts = [MessageText("call", str(name), is_name=True)]
    for field in _ARGUMENTS:
        value = call.get(field)
        if value not in (None, "", {}):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            texts.append(MessageText("call", text))
            break
    return texts


def _content(value: Any, thought: bool = False) -> Iterable[MessageText]:
    """The texts of a field: a string, a part, or a list of parts."""
    if isinstance(value, str):
        yield MessageText(REASONING if thought else TEXT, value)
    elif isinstance(value, list):
        for part in value:
            if isinstance(part, str):
                yield MessageText(TEXT, part)
            elif isinstance(part, Mapping) and _holds_text(part):
                yield from _texts(part)
    elif isinstance(value, Mapping) and _holds_text(value):
        yield from _texts(value)


def kind_of_part(part: Mapping[str, Any]) -> Any:
    """Return what a part of a message says of its kind; None if nothing."""
    return part.get("type") or part.get("part_kind")


def is_item(data: Any) -> bool:
    """Return whether a value is an item of what OpenAI's Responses give back, or a part of a message."""
    kind = data.get("type") if isinstance(data, Mapping) else None
    return kind == "message" or kind in _CALLS or kind in _REASONING_PARTS or kind in _TEXT_PARTS


def _holds_text(part: Mapping[str, Any]) -> bool:
    """Whether a part of a message is of a kind that holds text: a result of a tool, say, does not."""
    kind = kind_of_part(part)
    if kind is None:
        return True
    known = kind in _TEXT_PARTS or kind in _CALLS or kind in _REASONING_PARTS
    return isinstance(kind, str) and (known or kind.startswith("tool-") or kind == "output_audio")


def _reasoning(value: Any) -> str:
    """The text of a reasoning: of details that hold it as text and as a summary, the text."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts: dict[str, list[str]] = {}
        for part in value:
            kind = "text"
            if isinstance(part, Mapping) and "summary" in str(part.get("type")):
                kind = "summary"
            texts.setdefault(kind, []).append(_reasoning(part))
        return "".join(texts.get("text") or texts.get("summary") or ())
    if isinstance(value, Mapping):
        for field in ("text", "thinking", "content", "reasoning", "reasoningText", "summary"):
            if value.get(field):
                return _reasoning(value[field])
    return ""
