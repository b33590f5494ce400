"""Parsing a long JSON value in slices, so that others can act in between; ijson parses.

Fields that hold no text of a model, such as log probabilities, are left out: millions of small objects would take long
to free. A value of few parts, such as one long string, is parsed at once, which is fast.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from sinkscope.files.plain import parse_json

SHORT = 1 << 18
"""Characters up to which a value is parsed at once."""
_FEW_PARTS = 20_000
_SLICE = 1 << 15
_MOST_PARTS = 200_000
_LEFT_OUT = frozenset(
    "logprobs top_logprobs prompt_logprobs completion_probabilities embedding bytes b64_json token_ids tokens".split()
)
"""Fields whose values are replaced by None."""


class _Builder:
    """Builds a value from ijson's events, without what is left out."""

    def __init__(self) -> None:
        from ijson.common import ObjectBuilder

        self._builder: Any = ObjectBuilder()
        self._depth = 0  # of what is left out
        self._skips = False  # whether the next value is
        self._parts = 0

    @property
    def value(self) -> Any:
        return self._builder.value

    def send(self, parsed: tuple[str, Any]) -> None:
        """Take an event."""
        event, value = parsed
        begins, ends = event in ("start_map", "start_array"), event in ("end_map", "end_array")
        if self._depth:
            self._depth += begins - ends
            return
        if self._skips:
            self._skips = False
            self._builder.event("null", None)
            self._depth += begins
            return
        self._parts += begins
        if self._parts > _MOST_PARTS:
            raise ValueError(f"it has more than {_MOST_PARTS:,} parts")
        self._skips = event == "map_key" and value in _LEFT_OUT
        self._builder.event(event, value)


def parsing(text: str) -> Generator[None, None, Any]:
    """Parse a long JSON value, and yield after each slice.

    Raises:
        ValueError: It is not JSON, has too many parts, or holds bytes that are no UTF-8.
    """
    import ijson

    content, parts = text.encode(), 0
    yield
    for mark in '",[{':
        parts += text.count(mark)
    yield
    if parts < _FEW_PARTS:
        return parse_json(content)
    built = _Builder()
    events: Any = ijson.sendable_list()
    parser: Any = ijson.basic_parse_coro(events, use_float=True)
    try:
        for place in range(0, len(content), _SLICE):
            parser.send(content[place : place + _SLICE])
            for each in events:
                built.send(each)
            del events[:]
            yield
        parser.close()
    except ijson.JSONError as error:
        raise ValueError(str(error).partition("\n")[0]) from None
    for each in events:
        built.send(each)
    return built.value
