"""Texts in files that people have: one text, or JSON lines with a text or a chat each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName
from sinkscope.files.records import read_rows

TEXTS = ("text", "content", "document", "article", "story", "code", "body")
"""Fields that hold a text."""


class Message(NamedTuple):
    """Who wrote a message, empty if unknown, and what it says."""

    role: str
    text: str


class TextRecord(NamedTuple):
    """A record of a file: its number, from 1, and its messages."""

    place: int
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """Return the texts of all messages, with a blank line between."""
        return "\n\n".join(message.text for message in self.messages if message.text)


def read_texts(path: PathName, field: str | None = None) -> Iterator[TextRecord]:
    """Yield the records of a file of JSON lines.

    Args:
        path: The file.
        field: The field that holds the text or the messages. None: "messages", or under one of the names of data sets.

    Raises:
        SinkscopeError: The file cannot be read, or no field that is known holds a text.
    """
    for place, (where, row) in enumerate(read_rows(path, "JSON lines with texts or chats"), 1):
        yield TextRecord(place, messages_of_row(row, field, where))


def messages_of_row(row: Any, field: str | None = None, name: str = "the record") -> tuple[Message, ...]:
    """Return the messages of a record: those of a chat, or a text.

    Args:
        row: A text, a list of messages, or a mapping.
        field: As for `read_texts`.
        name: Name of the record, for errors.

    Raises:
        SinkscopeError: There is no text in it.
    """
    value = row
    if isinstance(row, Mapping):
        names = ("messages", *TEXTS) if field is None else (field,)
        value = next(filter(None, map(row.get, names)), None)
    if isinstance(value, str):
        return (Message("", value),)
    if isinstance(value, list) and all(isinstance(one, Mapping) and isinstance(one.get("role"), str) for one in value):
        return tuple(Message(one["role"], words_of(one.get("content"))) for one in value)
    known = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    raise SinkscopeError(f"{name} holds no text that is known, there are {known:.200}: name the field of the texts")


def words_of(content: Any) -> str:
    """Return the text of a message's content: a string, or parts of which some are text."""
    if isinstance(content, list):
        return "".join(words_of(part.get("text")) for part in content)
    return content if isinstance(content, str) else ""


def is_text_file(path: PathName) -> bool:
    """Return whether the ending of a file says that `read_texts` finds records in it, and not one text."""
    return Path(path).suffix.lower() in (".json", ".jsonl", ".ndjson")
