"""Lines of logs and data sets as public formats have them, each made of a prompt and an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ID = "req-7f3a"


def chat(prompt: str, answer: str) -> list[dict[str, Any]]:
    """A question and its answer."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def completion(answer: str) -> dict[str, Any]:
    """A chat completion of OpenAI."""
    message = {"role": "assistant", "content": answer}
    return {"id": ID, "object": "chat.completion", "choices": [{"index": 0, "message": message}]}


SHAPES: dict[str, Callable[[str, str], Any]] = {
    "prompt and completion as messages (TRL)": lambda p, a: {
        "id": ID,
        "prompt": chat(p, a)[:1],
        "completion": chat(p, a)[1:],
    },
    "ShareGPT": lambda p, a: {
        "id": ID,
        "conversations": [{"from": "human", "value": p}, {"from": "gpt", "value": a}],
    },
    "Gemini": lambda p, a: {
        "candidates": [{"content": {"parts": [{"text": a}], "role": "model"}, "finishReason": "STOP", "index": 0}],
        "modelVersion": "gemini-2.5-flash",
        "responseId": ID,
    },
    "Vertex batch": lambda p, a: {
        "id": ID,
        "request": {"contents": [{"role": "user", "parts": [{"text": p}]}]},
        "response": {"candidates": [{"content": {"parts": [{"text": a}], "role": "model"}}]},
    },
    "Bedrock Converse": lambda p, a: {
        "requestId": ID,
        "output": {"message": {"role": "assistant", "content": [{"text": a}]}},
        "stopReason": "max_tokens",
        "usage": {"inputTokens": 9, "outputTokens": 400},
    },
    "Bedrock invocation log": lambda p, a: {
        "schemaType": "ModelInvocationLog",
        "requestId": ID,
        "modelId": "anthropic.claude-3-haiku",
        "input": {"inputBodyJson": {"messages": chat(p, a)[:1]}},
        "output": {"outputBodyJson": {"content": [{"type": "text", "text": a}], "role": "assistant"}},
    },
    "Bedrock Titan": lambda p, a: {"requestId": ID, "results": [{"tokenCount": 3, "outputText": a}]},
    "TGI, a list": lambda p, a: [{"id": ID, "generated_text": a}],
    "pipeline of transformers": lambda p, a: [{"id": ID, "generated_text": chat(p, a)}],
    "LiteLLM log": lambda p, a: {
        "id": ID,
        "call_type": "acompletion",
        "model": "llama-3",
        "messages": chat(p, a)[:1],
        "response": completion(a),
    },
    "Anthropic batch": lambda p, a: {
        "custom_id": ID,
        "result": {"type": "succeeded", "message": {"role": "assistant", "content": [{"type": "text", "text": a}]}},
    },
    "Cohere": lambda p, a: {
        "id": ID,
        "message": {"role": "assistant", "content": [{"type": "text", "text": a}]},
        "finish_reason": "COMPLETE",
    },
    "vLLM, offline": lambda p, a: {
        "request_id": ID,
        "prompt": p,
        "outputs": [{"index": 0, "text": a, "token_ids": [1, 2, 3], "finish_reason": "length"}],
    },
    "output as a message (Langfuse)": lambda p, a: {"id": ID, "input": p, "output": chat(p, a)[1]},
    "lm-eval samples": lambda p, a: {"id": ID, "arguments": {"arg_0": p}, "resps": [[a]], "filtered_resps": [a]},
    "MT-bench answers": lambda p, a: {"id": ID, "model_id": "m", "choices": [{"index": 0, "turns": ["Well.", a]}]},
    "OpenAI batch": lambda p, a: {"custom_id": ID, "response": {"status_code": 200, "body": completion(a)}},
    "LangChain messages": lambda p, a: {
        "id": ID,
        "messages": [{"type": "human", "content": p}, {"type": "ai", "content": a}],
    },
    "Helicone": lambda p, a: {
        "request_id": ID,
        "request_body": {"messages": chat(p, a)[:1]},
        "response_body": completion(a),
    },
    "vLLM, benchmark": lambda p, a: {"id": ID, "input_lens": [3], "generated_texts": [a]},
    "UltraFeedback": lambda p, a: {"id": ID, "instruction": p, "completions": [{"model": "x", "response": a}]},
    "Alpaca": lambda p, a: {"id": ID, "instruction": p, "input": "", "output": a},
}
STREAMS: dict[str, Callable[[list[str]], list[Any]]] = {
    "TGI": lambda pieces: [
        *({"token": {"id": 7, "text": text, "special": False}, "generated_text": None} for text in pieces),
        {"token": {"id": 2, "text": "</s>", "special": True}, "generated_text": "".join(pieces)},
    ],
    "Gemini": lambda pieces: [
        {"candidates": [{"content": {"parts": [{"text": t}], "role": "model"}, "index": 0}], "responseId": ID}
        for t in pieces
    ],
    "Bedrock": lambda pieces: [
        {"messageStart": {"role": "assistant"}},
        *({"contentBlockDelta": {"delta": {"text": t}, "contentBlockIndex": 0}} for t in pieces),
        {"contentBlockStop": {"contentBlockIndex": 0}},
        {"messageStop": {"stopReason": "max_tokens"}},
    ],
}
"""Events of servers that stream."""
