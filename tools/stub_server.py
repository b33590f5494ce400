"""A server without a model that speaks as Ollama and as OpenAI, and whose streamed answers loop.

    python -m tools.stub_server [--port 11499] [--tokens 2000]

It is there to try `sinkscope loops --proxy`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from experiments.script import run

STORY = (
    "Once there was a small boat that wanted to see the sea. It went down the river, past the mill and the old bridge, "
    "and at night it heard the waves for the first time. "
)
AGAIN = "And then it went home. "
DEFAULT_TOKENS = 2000


def words_of(tokens: int) -> list[str]:
    """The words of an answer."""
    words = STORY.split()
    while len(words) < tokens:
        words += AGAIN.split()
    return words


def application(tokens: int = DEFAULT_TOKENS, pause: float = 0.002) -> Starlette:
    """The ASGI application.

    Args:
        tokens: Words of an answer that loops.
        pause: Seconds between two words.
    """

    async def written(events: bool, field: str) -> AsyncIterator[str]:
        words = words_of(tokens)
        for place, word in enumerate([*words, ""]):
            last = place == len(words)
            text = "" if last else f"{word} "
            if events:
                delta = {"text": text} if field == "text" else {"delta": {"content": text}}
                choice = {"index": 0, **delta, "finish_reason": "stop" if last else None}
                yield f"data: {json.dumps({'id': 'stub-1', 'model': 'stub', 'choices': [choice]})}\n\n"
            else:
                said = (
                    {"response": text} if field == "response" else {"message": {"role": "assistant", "content": text}}
                )
                yield json.dumps({"model": "stub", **said, "done": last}) + "\n"
            await asyncio.sleep(pause)
        if events:
            yield "data: [DONE]\n\n"

    async def answer(request: Request) -> Response:
        path = request.url.path
        if path in ("/api/chat", "/api/generate"):
            field = "response" if path.endswith("generate") else "message"
            return StreamingResponse(written(False, field), media_type="application/x-ndjson")
        if path in ("/v1/chat/completions", "/v1/completions"):
            field = "delta" if path.endswith("chat/completions") else "text"
            return StreamingResponse(written(True, field), media_type="text/event-stream")
        return JSONResponse({"error": f"no path {path}"}, 404)

    return Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])


def main(*, port: int = 11499, tokens: int = DEFAULT_TOKENS) -> None:
    """Serve until Ctrl-C.

    Args:
        port: Port on this machine.
        tokens: Words of an answer that loops.
    """
    uvicorn.run(application(tokens), host="127.0.0.1", port=port, log_level="critical")


if __name__ == "__main__":
    run(main)
