"""Chat histories and logs of agents: what an entry says, the calls in it and their results.

All forms are read by one rule: an object with a name and arguments is a call, some fields hold results, and all else is
text. To add a program, add what it calls these things.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

LISTS = ("messages", "conversations", "contents", "input", "history", "items")  # fields with the messages of a session
_INSIDE = {  # entries of logs that hold the message in a field, by their type: Codex, Claude Code, LangChain
    "response_item": "payload",
    **dict.fromkeys(("user", "assistant"), "message"),
    **dict.fromkeys(("human", "ai", "tool", "system"), "data"),
}
_ROLES = {  # what programs call who speaks; without a role, the sender (ShareGPT), type or source of an entry says it
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "ai", "model", "agent", "function_call", "reasoning"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "environment", "function_call_output"), "tool"),
}
_SPOKEN = ("thinking", "reasoning", "reasoning_content", "summary", "content", "value", "parts")
_CALLS = ("tool_calls", "function_call")  # of a message, beside what is said
_CALL = ("function", "functionCall", "toolCall")  # of a call or block: OpenAI, Gemini, Goose
_ARGUMENTS = ("arguments", "args", "input")
_RESULTS = ("functionResponse", "toolResult")  # of a block: Gemini, Goose
_RETURNED = ("content", "output", "response")  # of a result
_SAID = ("message", "think", "finish")  # actions of OpenHands that call no tool


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
    """The message in an entry of a history; None if the entry is none.

    Raises:
        ValueError, TypeError, LookupError, AttributeError: It looks like a message but cannot be read.
    """
    kind = item.get("type")
    inside = item.get(_INSIDE.get(str(kind), ""))
    if isinstance(inside, dict):
        return message_of({"role": kind, **inside} if kind in _ROLES else inside)
    role = _role(item)
    if role is None:
        return None
    if role == "tool":
        return Message(role, results=(_result(item, item),))
    if "action" in item:  # OpenHands
        arguments = item.get("args") or {}
        if role == "assistant" and item["action"] not in _SAID:
            return Message(role, calls=(Call("", str(item["action"]), arguments),))
        return Message(role, _text(arguments.get("content") or arguments.get("thought")))
    spoken: list[Any] = [item.get(field) for field in _SPOKEN]
    if kind == "function_call":
        spoken = [item]
    texts: list[str] = []
    calls: list[Call] = []
    results: list[CallResult] = []
    for part in _parts([*spoken, *(item.get(field) for field in _CALLS)]):
        if isinstance(part, Call):
            calls.append(part)
        elif isinstance(part, CallResult):
            results.append(part)
        else:
            texts.append(part)
    return Message(role, "\n".join(filter(None, texts)), tuple(calls), tuple(results))


def _role(item: dict[str, Any]) -> str | None:
    """Who speaks; None if nothing says so."""
    if isinstance(item.get("role"), str):
        return _ROLES.get(item["role"].lower(), item["role"].lower())
    if isinstance(item.get("observation"), str):
        return "tool"
    source = item.get("source") if "action" in item else None
    return _ROLES.get(str(item.get("from") or source or item.get("type")).lower())


def _parts(value: Any) -> Iterator[Call | CallResult | str]:
    """The calls, results and texts in a content."""
    if isinstance(value, list):
        for one in value:
            yield from _parts(one)
        return
    if not isinstance(value, dict):
        yield _text(value)
        return
    for field in _RESULTS:
        if field in value:
            yield _result(value, value[field])
            return
    if value.get("type") == "tool_result":
        yield _result(value, value)
        return
    call = value
    for field in _CALL:
        if isinstance(value.get(field), dict):
            call = value[field].get("value") or value[field]
    arguments = [call[field] for field in _ARGUMENTS if field in call]
    if "name" in call and (arguments or call is not value):
        key = value.get("id") or value.get("call_id") or call.get("id") or ""
        yield Call(str(key), str(call["name"]), arguments[0] if arguments else None)
    else:
        yield _text(value)


def _result(item: dict[str, Any], value: Any) -> CallResult:
    """The result in an entry or block, by the id of its call, or else by the name of the tool."""
    keys = [item.get(field) for field in ("tool_call_id", "tool_use_id", "call_id", "id", "name") if item.get(field)]
    returned = [value[field] for field in _RETURNED if isinstance(value, dict) and field in value]
    return CallResult(str([*keys, ""][0]), _text(returned[0] if returned else value))


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
