"""What servers send while they generate, one object per chunk."""

from __future__ import annotations

import json
from typing import Any


def chunks(text: str) -> list[str]:
    return [f"{word} " for word in text.split()]


def cumulative(text: str) -> list[str]:
    words = chunks(text)
    return ["".join(words[: place + 1]) for place in range(len(words))]


def _choices(text: str, completion: bool) -> list[dict[str, Any]]:
    head = {"id": "cmpl-1", "object": "chunk", "created": 1, "model": "m"}
    sent: list[dict[str, Any]] = []
    for piece in chunks(text):
        said: dict[str, Any] = {"text": piece} if completion else {"delta": {"content": piece}}
        sent.append({**head, "choices": [{"index": 0, **said, "finish_reason": None}]})
    last: dict[str, Any] = {"text": ""} if completion else {"delta": {}}
    return [*sent, {**head, "choices": [{"index": 0, **last, "finish_reason": "stop"}]}]


SERVERS = {  # what each server sends for a text, one object per chunk
    "openai-chat": lambda text: _choices(text, False),
    "openai-completions": lambda text: _choices(text, True),
    "responses": lambda text: [
        {"type": "response.created", "response": {"id": "r"}},
        *[{"type": "response.output_text.delta", "output_index": 0, "delta": piece} for piece in chunks(text)],
        {"type": "response.output_text.done", "output_index": 0, "text": text},
        {"type": "response.output_item.done", "output_index": 0, "item": {}},
        {"type": "response.completed", "response": {"id": "r"}},
    ],
    "anthropic": lambda text: [
        {"type": "message_start", "message": {"id": "m"}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        *[
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}
            for piece in chunks(text)
        ],
        {"type": "content_block_stop", "index": 0},
        {"type": "message_stop"},
    ],
    "sglang": lambda text: [
        {"text": whole, "meta_info": {"id": "a", "finish_reason": None, "completion_tokens": place}}
        for place, whole in enumerate(cumulative(text))
    ],
    "sglang-increments": lambda text: [
        {"text": piece, "meta_info": {"id": "a", "finish_reason": None}} for piece in chunks(text)
    ],
    "tgi": lambda text: [
        {"index": place, "token": {"id": sum(piece.encode()), "text": piece, "logprob": -1.0}, "generated_text": None}
        for place, piece in enumerate(chunks(text))
    ],
    "ollama-chat": lambda text: [
        {"model": "m", "message": {"role": "assistant", "content": piece}, "done": False} for piece in chunks(text)
    ],
    "ollama-generate": lambda text: [{"model": "m", "response": piece, "done": False} for piece in chunks(text)],
    "llama.cpp": lambda text: [{"content": piece, "stop": False} for piece in chunks(text)],
}


def events(sent: list[dict[str, Any]], end: str = "\n") -> str:
    return f": hello{end}{end}" + "".join(f"data: {json.dumps(c)}{end}{end}" for c in sent) + f"data: [DONE]{end}{end}"
