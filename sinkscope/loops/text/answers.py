"""What a model wrote, as a source says it: one text, JSON lines with answers, or the stream of a server.

1. The first line decides: "data:" with JSON begins a stream, JSON begins lines of records, as a name of JSON does, and
   anything else is one text.
2. Of a record the field that is named counts, or the first of `FIELDS` that is filled; of a chat, what the assistant
   wrote. Streams are those of OpenAI's completions, and of the servers that speak as it does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sinkscope.files.plain import parse_json
from sinkscope.files.texts import is_text_file, words_of

FIELDS = ("tokens", "choices", "message", "response", "completion", "output", "answer", "generated_text", "text")
"""Fields that hold answers, before "messages"; token ids are more exact than text."""
PROMPTS = ("prompt", "instruction", "question", "request", "messages")
"""Fields that hold what was asked for."""
TEXT, REASONING = "text", "reasoning"
"""The channels of an answer."""
BLOCK = 1 << 16
_NO_DATA = re.compile(r"(?:\s+|(?::|event:|id:|retry:)[^\n]*(?:\n|$))*")
"""What may stand before the first data of a stream: blank lines, comments and the other fields of events."""
_STREAM = re.compile(r"data: ?[{\[]")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)


class Piece(NamedTuple):
    """A piece of an answer, or its end.

    Attributes:
        answer: Name of the answer.
        said: A text, or token ids.
        channel: "text" or "reasoning", which are watched apart.
        ends: Whether the answer ends here.
        prompt: What was asked; copies that it asks for are no loop.
    """

    answer: str
    said: Any = ""
    channel: str = TEXT
    ends: bool = False
    prompt: str = ""


Answer = list[tuple[str, Any]]
"""A whole answer of a record: what is said in each of its channels."""


def pieces_in(source: Any, name: str, field: str | None, skip: Callable[[str], None]) -> Iterator[Piece]:
    """Yield the pieces of a binary file, pipe or response with `read1`, as they arrive.

    Args:
        source: The source.
        name: Its name.
        field: Where the answers are in a record: names, or numbers in a list, with dots between.
        skip: Called with what is wrong with a line that cannot be read.

    Raises:
        UnicodeError: It is not UTF-8.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    rest, form, place, data = "", "", 0, b"-"
    while data:
        data = source.read1(BLOCK)
        rest += decode(data, not data)
        form = form or _form_of(rest, name, is_whole=not data)
        if form == "text":
            yield Piece(name, rest)
            rest = ""
        elif form == "lines":
            *lines, rest = rest.split("\n")
            for line in lines:
                place += 1
                yield from _pieces_of_line(line, place, name, field, skip)
    yield from _pieces_of_line(rest, place + 1, name, field, skip)


def _form_of(begin: str, name: str, is_whole: bool) -> str:
    """What begins so: "text", or "lines" of JSON or of a stream; empty if it may be either."""
    data = _NO_DATA.sub("", begin, count=1)
    first, line_end, _ = data.partition("\n")
    may_be_json = data.startswith(("{", "["))
    if _STREAM.match(data) or (may_be_json and (line_end or is_whole) and (is_text_file(name) or _is_json(first))):
        return "lines"
    waits = not data or "data: {".startswith(data[:7]) or (may_be_json and not line_end)
    return "" if not begin.strip() or (waits and not is_whole) else "text"


def _is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def _pieces_of_line(
    line: str, place: int, name: str, field: str | None, skip: Callable[[str], None]
) -> Iterator[Piece]:
    """The pieces in a line of JSON, or in an event of a stream."""
    data = line.removeprefix("data:").strip()
    if data == "[DONE]" or _NO_DATA.fullmatch(line):
        return
    try:
        row = parse_json(data)
        if line.startswith("data:") and field is None and "choices" in row:
            pieces = [*_pieces_of_choices(row["choices"])]
        else:
            pieces = [*_pieces_of_record(row, field, f"line {place}")]
    except _UNREADABLE as error:
        skip(f"{name} line {place} is no output of a model: {error}; it is {line!r:.60}")
        return
    yield from pieces


def _pieces_of_choices(choices: list[Mapping[str, Any]]) -> Iterator[Piece]:
    """The pieces of answers in a chunk of a stream."""
    for choice in choices:
        name = f"choice {choice.get('index') or 0}"
        for channel, said in said_in(choice.get("delta") or choice.get("message") or choice):
            yield Piece(name, said, channel)
        if choice.get("finish_reason"):
            yield Piece(name, ends=True)


def _pieces_of_record(row: Any, field: str | None, name: str) -> Iterator[Piece]:
    """The whole answers in a record."""
    answers, prompt = answers_in(at_field(row, field)), asked_in(row)
    for number, answer in enumerate(answers, 1):
        own = name if len(answers) == 1 else f"{name} answer {number}"
        for channel, said in answer:
            yield Piece(own, said, channel, prompt=prompt)
        yield Piece(own, ends=True)


def answers_in(value: Any) -> list[Answer]:
    """Return the answers in a value: a text, token ids, messages, or a record with one of these.

    Raises:
        ValueError: There is none.
    """
    if isinstance(value, str) or is_ids(value):
        return [[(TEXT, value)]]
    if isinstance(value, list):  # of answers, or of messages, of which users and tools wrote some
        answers: list[Answer] = []
        for item in value:
            role = item.get("role") if isinstance(item, dict) else None
            if role in (None, "assistant"):
                answers += answers_in(item)
        return answers
    if isinstance(value, dict):
        if value.keys() & {"role", "content", "tool_calls"}:
            return [[*said_in(value)]]
        fields = [value[name] for name in (*FIELDS, "messages") if name in value]
        for field in fields:
            if field not in (None, "", [], {}):
                return answers_in(field)
        if fields:
            return [[]]
    there = ", ".join(value) if isinstance(value, dict) else repr(value)
    raise ValueError(f"it holds no text and no token ids, but {there:.200}: name the field of the answer by --field")


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(type(one) is int and 0 <= one < 1 << 32 for one in value)
    )


def said_in(message: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what is said in a message, or in a piece of one, by channel; one reasoning may stand in two fields."""
    yield REASONING, words_of(message.get("reasoning_content") or message.get("reasoning"))
    yield TEXT, words_of(message.get("content", message.get("text")))


def asked_in(row: Any) -> str:
    """Return what a record, or a list of messages, asks for, in all turns."""
    if isinstance(row, dict):
        return "\n".join(asked_in(row.get(name)) for name in PROMPTS)
    if isinstance(row, list):
        by_users = [item for item in row if isinstance(item, dict) and item.get("role") == "user"]
        return "\n".join(words_of(item.get("content")) for item in by_users)
    return row if isinstance(row, str) else ""


def at_field(row: Any, field: str | None) -> Any:
    """Return what stands in a field of a record.

    Raises:
        ValueError: There is no such field.
    """
    for name in field.split(".") if field else ():
        try:
            row = row[int(name) if isinstance(row, list) else name]
        except (LookupError, TypeError, ValueError):
            there = ", ".join(row) if isinstance(row, dict) else "none"
            raise ValueError(f"no field {field}: there are {there:.200}") from None
    return row
