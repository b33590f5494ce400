"""Twelve real forms of sessions: each writes a list of neutral turns as a program writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Turn(NamedTuple):
    """A neutral turn: what a user or an assistant says, or a call and its result."""

    role: str
    text: str = ""
    tool: str = ""
    arguments: dict[str, Any] | None = None
    result: str = ""


def called(tool: str, result: str, **arguments: Any) -> Turn:
    return Turn("assistant", "", tool, arguments, result)


def _openai(turns: list[Turn], text_arguments: bool = True) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not turn.tool:
            messages.append({"role": turn.role, "content": turn.text})
            continue
        arguments = json.dumps(turn.arguments) if text_arguments else turn.arguments
        call = {"id": f"call_{place:06d}a", "type": "function", "function": {"name": turn.tool, "arguments": arguments}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": turn.result})
    return messages


def openai_chat(turns: list[Turn]) -> str:
    return json.dumps({"model": "m", "messages": [{"role": "system", "content": "Help."}, *_openai(turns)]})


def openai_list(turns: list[Turn]) -> str:
    return json.dumps(_openai(turns))


def openai_lines(turns: list[Turn]) -> str:
    return "".join(json.dumps(message) + "\n" for message in _openai(turns))


def functions(turns: list[Turn]) -> str:
    """The older form with `function_call` and the role `function`."""
    messages: list[dict[str, Any]] = []
    for turn in turns:
        if not turn.tool:
            messages.append({"role": turn.role, "content": turn.text})
            continue
        call = {"name": turn.tool, "arguments": json.dumps(turn.arguments)}
        messages.append({"role": "assistant", "content": None, "function_call": call})
        messages.append({"role": "function", "name": turn.tool, "content": turn.result})
    return json.dumps({"messages": messages})


def _anthropic(turns: list[Turn]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not turn.tool:
            messages.append({"role": turn.role, "content": [{"type": "text", "text": turn.text}]})
            continue
        key = f"toolu_{place:08d}x"
        use = {"type": "tool_use", "id": key, "name": turn.tool, "input": turn.arguments}
        messages.append({"role": "assistant", "content": [use]})
        result = {"type": "tool_result", "tool_use_id": key, "content": [{"type": "text", "text": turn.result}]}
        messages.append({"role": "user", "content": [result]})
    return messages


def anthropic(turns: list[Turn]) -> str:
    return json.dumps({"model": "m", "system": "Help.", "messages": _anthropic(turns)})


def claude_code(turns: list[Turn]) -> str:
    lines: list[dict[str, Any]] = [{"type": "summary", "summary": "A session", "leafUuid": "u"}]
    for place, message in enumerate(_anthropic(turns)):
        head = {"uuid": f"u{place}", "timestamp": f"2026-01-01T00:00:{place % 60:02d}Z", "sessionId": "s"}
        lines.append({"type": message["role"], "message": message, **head})
    return "".join(json.dumps(line) + "\n" for line in lines)


def _responses(turns: list[Turn]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not turn.tool:
            kind = "output_text" if turn.role == "assistant" else "input_text"
            content = [{"type": kind, "text": turn.text}]
            items.append({"type": "message", "role": turn.role, "content": content})
            continue
        key = f"call_{place:08d}"
        arguments = json.dumps(turn.arguments)
        items.append({"type": "function_call", "call_id": key, "name": turn.tool, "arguments": arguments})
        items.append({"type": "function_call_output", "call_id": key, "output": turn.result})
    return items


def responses(turns: list[Turn]) -> str:
    return json.dumps({"model": "m", "input": _responses(turns)})


def codex(turns: list[Turn]) -> str:
    lines: list[dict[str, Any]] = [{"timestamp": "t", "type": "session_meta", "payload": {"id": "s", "cwd": "."}}]
    for item in _responses(turns):
        lines.append({"timestamp": "t", "type": "response_item", "payload": item})
    return "".join(json.dumps(line) + "\n" for line in lines)


def gemini(turns: list[Turn]) -> str:
    contents: list[dict[str, Any]] = []
    for turn in turns:
        if not turn.tool:
            role = {"assistant": "model"}.get(turn.role, turn.role)
            contents.append({"role": role, "parts": [{"text": turn.text}]})
            continue
        contents.append({"role": "model", "parts": [{"functionCall": {"name": turn.tool, "args": turn.arguments}}]})
        answer = {"name": turn.tool, "response": {"output": turn.result}}
        contents.append({"role": "user", "parts": [{"functionResponse": answer}]})
    return json.dumps({"contents": contents})


def ollama(turns: list[Turn]) -> str:
    messages = _openai(turns, text_arguments=False)
    for message in messages:
        message.pop("tool_call_id", None)
        for call in message.get("tool_calls", []):
            del call["id"], call["type"]
    return json.dumps({"model": "llama3.2", "messages": messages, "stream": True})


def langchain(turns: list[Turn]) -> str:
    messages: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not turn.tool:
            kind = "ai" if turn.role == "assistant" else "human"
            messages.append({"type": kind, "data": {"content": turn.text}})
            continue
        call = {"name": turn.tool, "args": turn.arguments, "id": f"call_{place:06d}", "type": "tool_call"}
        messages.append({"type": "ai", "data": {"content": "", "tool_calls": [call]}})
        messages.append({"type": "tool", "data": {"content": turn.result, "tool_call_id": call["id"]}})
    return json.dumps(messages)


def goose(turns: list[Turn]) -> str:
    lines: list[dict[str, Any]] = [{"type": "session", "working_dir": ".", "description": "d"}]
    for place, turn in enumerate(turns):
        if not turn.tool:
            lines.append({"role": turn.role, "created": place, "content": [{"type": "text", "text": turn.text}]})
            continue
        value = {"status": "success", "value": {"name": turn.tool, "arguments": turn.arguments}}
        asked = {"type": "toolRequest", "id": f"req_{place:06d}", "toolCall": value}
        lines.append({"role": "assistant", "created": place, "content": [asked]})
        value = {"status": "success", "value": [{"type": "text", "text": turn.result}]}
        answer = {"type": "toolResponse", "id": asked["id"], "toolResult": value}
        lines.append({"role": "user", "created": place, "content": [answer]})
    return "".join(json.dumps(line) + "\n" for line in lines)


def openhands(turns: list[Turn]) -> str:
    events: list[dict[str, Any]] = []
    for place, turn in enumerate(turns):
        if not turn.tool:
            source = "agent" if turn.role == "assistant" else "user"
            events.append({"id": place, "source": source, "action": "message", "args": {"content": turn.text}})
            continue
        events.append({"id": place, "source": "agent", "action": turn.tool, "args": turn.arguments})
        events.append({"id": place, "source": "environment", "observation": turn.tool, "content": turn.result})
    return json.dumps(events)


FORMS: dict[str, tuple[str, Callable[[list[Turn]], str]]] = {
    "openai": ("chat.json", openai_chat),
    "openai-list": ("list.json", openai_list),
    "openai-lines": ("lines.jsonl", openai_lines),
    "functions": ("old.json", functions),
    "anthropic": ("anthropic.json", anthropic),
    "claude-code": ("session.jsonl", claude_code),
    "responses": ("responses.json", responses),
    "codex": ("rollout.jsonl", codex),
    "gemini": ("gemini.json", gemini),
    "ollama": ("ollama.json", ollama),
    "langchain": ("langchain.json", langchain),
    "goose": ("goose.jsonl", goose),
    "openhands": ("events.json", openhands),
}
