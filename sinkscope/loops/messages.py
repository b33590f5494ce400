"""Chat histories and logs of agents: `message_of` has a case for each form. To add a program, add a case."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

LISTS = ("messages", "conversations", "contents", "input", "history", "items")  # fields with the messages of a session
_ROLES = {  # what programs call who speaks
    "human": "user",
    "gpt": "assistant",
    "ai": "assistant",
    "model": "assistant",
    "agent": "assistant",
    "developer": "system",
    "function": "tool",
    "environment": "tool",
}


class Call(NamedTuple):
    """A call of a tool.

    Attributes:
        key: Its id; empty if it has none.
        name: Name of the tool.
        arguments: Its arguments, as the program wrote them.
    """

    key: str
    name: str
    arguments: Any


class CallResult(NamedTuple):
    """What a tool returned.

    Attributes:
        key: Id of the call; empty if it has none.
        text: The result.
    """

    key: str
    text: str


class Message(NamedTuple):
    """A message of a session.

    Attributes:
        role: "user", "assistant", "tool" or "system".
        text: What is said.
        calls: Calls of tools in it.
        results: Results of tools in it.
    """

    role: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    results: tuple[CallResult, ...] = ()


def message_of(item: dict[str, Any]) -> Message | None:
    """The message in an entry of a history; None if the entry is of no form. The first case that fits is its form.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It has the form of a program but cannot be read.
    """
    match item:
        case {"type": "response_item", "payload": dict(payload)}:  # rollouts of Codex
            return message_of(payload)
        case {"type": "user" | "assistant", "message": dict(message)}:  # logs of Claude Code
            return message_of(message)
        case {"type": "function_call", "name": name, "arguments": arguments}:  # OpenAI's Responses
            call = Call(str(item.get("call_id") or ""), str(name), arguments)
            return Message("assistant", calls=(call,))
        case {"type": "function_call_output", "output": output}:
            return Message("tool", results=(CallResult(str(item.get("call_id") or ""), _text(output)),))
        case {"type": "reasoning"}:
            return Message("assistant", _text(item.get("summary")) + _text(item.get("content")))
        case {"type": "human" | "ai" | "tool" | "system" as role, "data": dict(data)}:  # LangChain's messages_to_dict
            return _spoken(role, data)
        case {"from": str(role), "value": value}:  # ShareGPT
            return Message(_role(role), _text(value))
        case {"role": str(role), "parts": list(parts)}:  # Gemini
            return _parts(_role(role), parts)
        case {"source": "agent", "action": str(action)}:  # OpenHands
            return _openhands(item, action)
        case {"observation": str(), "content": content}:
            return Message("tool", results=(CallResult("", _text(content)),))
        case {"source": "user", "action": "message"}:
            return Message("user", _text((item.get("args") or {}).get("content")))
        case {"role": str(role)}:  # OpenAI, Anthropic, Ollama, Goose, and the many that imitate them
            return _spoken(role, item)
        case _:
            return None


def _spoken(role: str, item: dict[str, Any]) -> Message:
    """A message with `content`, which is a text or a list of blocks, and perhaps calls beside it."""
    role = _role(role)
    content = item.get("content")
    if role == "tool":
        key = item.get("tool_call_id") or item.get("name") or ""
        return Message(role, results=(CallResult(str(key), _text(content)),))
    texts: list[str] = []
    calls: list[Call] = []
    results: list[CallResult] = []
    for block in content if isinstance(content, list) else [content]:
        part = _block(block)
        if isinstance(part, Call):
            calls.append(part)
        elif isinstance(part, CallResult):
            results.append(part)
        else:
            texts.append(part)
    calls += _calls_beside(item)
    thought = item.get("reasoning_content") or item.get("reasoning") or item.get("thinking") or ""
    return Message(role, _text(thought) + "\n".join(filter(None, texts)), tuple(calls), tuple(results))


def _block(block: Any) -> Call | CallResult | str:
    """A block of a content."""
    match block:
        case {"type": "tool_use", "name": name}:  # Anthropic
            return Call(str(block.get("id") or ""), str(name), block.get("input"))
        case {"type": "tool_result"}:
            return CallResult(str(block.get("tool_use_id") or ""), _text(block.get("content")))
        case {"type": "toolRequest", "toolCall": dict(call)}:  # Goose
            value = call.get("value") or {}
            return Call(str(block.get("id") or ""), str(value.get("name")), value.get("arguments"))
        case {"type": "toolResponse"}:
            return CallResult(str(block.get("id") or ""), _text(block.get("toolResult")))
        case _:
            return _text(block)


def _calls_beside(item: dict[str, Any]) -> Iterator[Call]:
    """The calls of a message of OpenAI's form, and of the older one."""
    older = item.get("function_call")
    if older:
        yield Call(str(older["name"]), str(older["name"]), older.get("arguments"))
    for call in item.get("tool_calls") or ():
        about = call.get("function") or call  # LangChain has name and args beside each other
        yield Call(str(call.get("id") or ""), str(about["name"]), about.get("arguments", about.get("args")))


def _parts(role: str, parts: list[Any]) -> Message:
    """A message of Gemini."""
    texts: list[str] = []
    calls: list[Call] = []
    results: list[CallResult] = []
    for part in parts:
        match part:
            case {"functionCall": dict(call)}:
                calls.append(Call(str(call.get("id") or ""), str(call["name"]), call.get("args")))
            case {"functionResponse": dict(result)}:
                results.append(CallResult(str(result.get("id") or ""), _text(result.get("response"))))
            case _:
                texts.append(_text(part))
    return Message(role, "\n".join(filter(None, texts)), tuple(calls), tuple(results))


def _openhands(item: dict[str, Any], action: str) -> Message:
    """An action of an agent: a message, or the call of a tool."""
    arguments = item.get("args") or {}
    if action in ("message", "think", "finish"):
        return Message("assistant", _text(arguments.get("content") or arguments.get("thought")))
    return Message("assistant", calls=(Call("", action, arguments),))


def _role(name: str) -> str:
    return _ROLES.get(name.lower(), name.lower())


def _text(value: Any) -> str:
    """The text in a content, whatever holds it; other contents count as their JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(filter(None, map(_text, value)))
    if isinstance(value, dict):
        for field in ("text", "thinking", "content", "value"):
            if isinstance(value.get(field), str | list):
                return _text(value[field])
    return json.dumps(value, ensure_ascii=False, sort_keys=True)
