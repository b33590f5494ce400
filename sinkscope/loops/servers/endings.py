"""How a stream of each form in `sinkscope.loops.text.forms` is ended early, in a way that ordinary clients accept."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

REASON = "repetition_detected"
"""Value of `stop_reason`, as vLLM's own detection says it."""


class Ending:
    """Remembers what the last events of a stream need.

    Args:
        events: Whether the stream has server-sent events; otherwise lines of JSON.
    """

    def __init__(self, events: bool) -> None:
        self._events = events
        self._last: dict[str, Any] = {}
        self._response: dict[str, Any] = {}  # of OpenAI's Responses

    def see(self, data: dict[str, Any]) -> None:
        """Look at an event."""
        match data:
            case {"choices": []}:
                return  # an event with the usage has no choice
            case {"type": "response.created", "response": dict(response)}:
                self._response = response
            case _:
                pass
        self._last = data

    def made(self, about: dict[str, Any], places: Collection[int], usage: dict[str, int] | None = None) -> bytes:
        """Return the last events of the stream: the length is given as the reason, because the text has no end.

        Args:
            about: Value of the field `sinkscope`, which says why the stream was cut.
            places: Numbers of the choices or blocks that have not ended.
            usage: About how many tokens were read and written; None if the request does not ask for them.
        """
        events = self._last_events(about, places)
        if usage is not None and "choices" in self._last:
            said = self._last.get("usage")  # some servers say it in every chunk
            estimate = {"usage": usage, "sinkscope": {"usage": "estimated"}}
            events.append({**self._last, "choices": [], **({"usage": said} if said else estimate)})
        lines: list[str] = []
        for event in events:
            text = json.dumps(event, ensure_ascii=False, separators=(",", ":"))
            if not self._events:
                lines.append(f"{text}\n")
            elif isinstance(event.get("type"), str):
                lines.append(f"event: {event['type']}\ndata: {text}\n\n")
            else:
                lines.append(f"data: {text}\n\n")
        if events and self._events and "choices" in self._last:
            lines.append("data: [DONE]\n\n")
        return "".join(lines).encode("utf-8", "replace")

    def _last_events(self, about: dict[str, Any], places: Collection[int]) -> list[dict[str, Any]]:
        """The last events as data; none if the form of the stream is not known."""
        last = self._last
        match last:
            case {"choices": [dict(choice), *_]}:
                said: dict[str, Any] = {"text": ""} if "text" in choice else {"delta": {}}
                cut = {"finish_reason": "length", "stop_reason": REASON}
                choices = [{"index": index, **said, **cut} for index in places or (0,)]
                return [{**last, "choices": choices, "sinkscope": about}]
            case {"type": str(kind)} if kind.startswith("response."):
                state = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
                number = int(last.get("sequence_number") or 0) + 1
                response = {**self._response, **state, "sinkscope": about}
                kind = "response.incomplete"
                return [{"type": kind, "sequence_number": number, "response": response}]
            case {"type": str()}:
                blocks = [{"type": "content_block_stop", "index": index} for index in places]
                delta = {"stop_reason": "max_tokens", "stop_sequence": None}
                usage = {"output_tokens": about.get("token", 0)}
                change = {"type": "message_delta", "delta": delta, "usage": usage, "sinkscope": about}
                return [*blocks, change, {"type": "message_stop"}]
            case {"done": _}:
                said = {"response": ""}
                if "message" in last:
                    said = {"message": {"role": "assistant", "content": ""}}
                return [{**last, **said, "done": True, "done_reason": "length", "sinkscope": about}]
            case {"content": str(), "stop": bool()}:
                return [{**last, "content": "", "stop": True, "stop_type": "limit", "sinkscope": about}]
            case _:
                return []
