"""What a model wrote, as a source says it: one text, JSON lines with answers, or the stream of a server.

1. The first line decides: "data:" with JSON begins a stream, and JSON begins lines of records. Under a name of JSON,
   one document may be written in several lines, and is read as if it stood in one. Anything else is one text.
2. Of a record the field that is named counts, or the first of `FIELDS` that is filled; of a chat, what the assistant
   wrote. Streams are those of OpenAI's completions, and of the servers that speak as it does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
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
NO_DATA = (":", "event:", "id:", "retry:")
"""How lines of a stream begin that hold no data: comments, and the other fields of events."""
LONGEST_BEGIN = max(map(len, NO_DATA))
STREAM_BEGINS, JSON_BEGINS = "data: {", ("{", "[")
_STREAM = re.compile(r"data: ?[{\[]")
_SPACE: Any = re.compile(r"\s*")
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError)


class Piece(NamedTuple):
    """A piece of an answer, or its end.

    Attributes:
        answer: Name of the answer.
        content: A text, or token ids.
        channel: "text" or "reasoning", which are watched apart.
        ends: Whether the answer ends here.
        prompt: What was asked; copies that it asks for are no loop.
    """

    answer: str
    content: Any = ""
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
    blocks = _decoded(source)
    begin = _beginning(blocks)
    blocks = chain([begin], blocks)
    if not begin.strip():
        return
    data = _from_data(begin)
    may_be_json = data.startswith(JSON_BEGINS)
    if _STREAM.match(data) or (may_be_json and _is_json(data.partition("\n")[0])):
        yield from _pieces_of_lines(blocks, name, field, skip)
    elif may_be_json and is_text_file(name):
        yield from _pieces_of_document("".join(blocks), name, field, skip)
    else:
        for block in blocks:
            yield Piece(name, block)


def _decoded(source: Any) -> Iterator[str]:
    """Yield the text of a source, block by block as it arrives."""
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    block = source.read1(BLOCK)
    while block:
        yield decode(block)
        block = source.read1(BLOCK)
    yield decode(b"", True)


def _beginning(blocks: Iterator[str]) -> str:
    """Read until the form of a source is known, and return what was read.

    A line that may be JSON has to end first. A text is passed on at once: somebody may be waiting for an alarm.
    """
    blocks_read: list[str] = []
    data = ""
    for block in blocks:
        blocks_read.append(block)
        data = _from_data(data + block)
        if data.startswith(JSON_BEGINS):
            if "\n" not in data:
                blocks_read += _rest_of_line(blocks)
            break
        may_be_a_stream = any(begin.startswith(data) for begin in (STREAM_BEGINS, *NO_DATA))
        if not may_be_a_stream:
            break
    return "".join(blocks_read)


def _from_data(begin: str) -> str:
    """Return what follows blank lines, comments and fields of events without data; of one that goes on, its name."""
    position = _SPACE.match(begin).end()
    while True:
        line_begin = begin[position : position + LONGEST_BEGIN]
        names = [field for field in NO_DATA if line_begin.startswith(field)]
        if not names:
            return begin[position:]
        line_end = begin.find("\n", position)
        if line_end < 0:
            return names[0]
        position = _SPACE.match(begin, line_end).end()


def _rest_of_line(blocks: Iterator[str]) -> Iterator[str]:
    """Yield whole blocks, up to the one in which a line ends."""
    for block in blocks:
        yield block
        if "\n" in block:
            return


def _lines(blocks: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a text that comes in blocks. A long line is joined once, when it ends."""
    parts: list[str] = []
    for block in blocks:
        end_of_line, *next_lines = block.split("\n")
        parts.append(end_of_line)
        for begin_of_line in next_lines:
            yield "".join(parts)
            parts = [begin_of_line]
    yield "".join(parts)


def _pieces_of_lines(
    blocks: Iterable[str], name: str, field: str | None, skip: Callable[[str], None]
) -> Iterator[Piece]:
    """The pieces in lines of JSON, or in a stream."""
    for number, line in enumerate(_lines(blocks), 1):
        yield from _pieces_of_line(line, number, name, field, skip)


def _pieces_of_document(text: str, name: str, field: str | None, skip: Callable[[str], None]) -> Iterator[Piece]:
    """The pieces of a JSON document in several lines, or of lines of which the first is broken."""
    if _is_json(text):
        text = text.replace("\n", " ")  # the same document: line breaks within its texts are escaped
    yield from _pieces_of_lines([text], name, field, skip)


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
    if data in ("", "[DONE]") or line.lstrip().startswith(NO_DATA):
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
        for channel, text in said_in(choice.get("delta") or choice.get("message") or choice):
            yield Piece(name, text, channel)
        if choice.get("finish_reason"):
            yield Piece(name, ends=True)


def _pieces_of_record(row: Any, field: str | None, name: str) -> Iterator[Piece]:
    """The whole answers in a record."""
    answers, prompt = answers_in(at_field(row, field)), asked_in(row)
    for number, answer in enumerate(answers, 1):
        label = name if len(answers) == 1 else f"{name} answer {number}"
        for channel, text in answer:
            yield Piece(label, text, channel, prompt=prompt)
        yield Piece(label, ends=True)


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
    names = ", ".join(value) if isinstance(value, dict) else repr(value)
    raise ValueError(f"it holds no text and no token ids, but {names:.200}: name the field of the answer by --field")


def is_ids(value: Any) -> bool:
    """Return whether a value is a list of token ids."""
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(type(number) is int and 0 <= number < 1 << 32 for number in value)
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
            fields = ", ".join(row) if isinstance(row, dict) else "none"
            raise ValueError(f"no field {field}: there are {fields:.200}") from None
    return row
