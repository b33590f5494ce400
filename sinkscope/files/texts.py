"""Texts in files that people have: one text, or JSON lines with a text or a chat each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName
from sinkscope.files.records import read_rows

TEXTS = ("text", "content", "document", "article", "story", "code", "body")
"""Fields that hold a text."""


Messages = list[dict[str, str]]
"""The messages of a record: who wrote each, its "role", empty if unknown, and its "content"."""


def text_of(messages: Messages) -> str:
    """Return the texts of all messages, with a blank line between."""
    return "\n\n".join(message["content"] for message in messages if message["content"])


TEXT_MISSES = 'give it a field "text"'


def read_texts(path: PathName, field: str | None = None, remedy: str = TEXT_MISSES) -> Iterator[Messages]:
    """Yield the messages of each record of a file of JSON lines, or of one JSON array.

    Args:
        path: The file.
        field: The field that holds the text or the messages. None: "messages", or under one of the names of data sets.
        remedy: As for `messages_of_row`.

    Raises:
        SinkscopeError: The file cannot be read, or no field that is known holds a text.
    """
    for where, row in read_rows(path, "JSON lines, or a JSON array, with texts or chats"):
        yield messages_of_row(row, field, where, remedy)


def messages_of_row(
    row: Any, field: str | None = None, name: str = "the record", remedy: str = TEXT_MISSES
) -> Messages:
    """Return the messages of a record: those of a chat, or a text.

    Args:
        row: A text, a list of messages, or a mapping.
        field: As for `read_texts`.
        name: Name of the record, for errors.
        remedy: What to do about a record without a text under one of the usual names.

    Raises:
        SinkscopeError: There is no text in it.
    """
    value = row
    if isinstance(row, Mapping):
        names = ("messages", *TEXTS) if field is None else (field,)
        value = next(filter(None, map(row.get, names)), None)
    if isinstance(value, str):
        return [{"role": "", "content": value}]
    if isinstance(value, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in value
    ):
        return [{"role": message["role"], "content": words_of(message.get("content"))} for message in value]
    if not isinstance(row, Mapping):
        raise SinkscopeError(f"{name}={row!r:.80}: expected a text, a chat, or an object with one")
    fields = ", ".join(map(str, row)) or "none"
    if field is not None:
        raise SinkscopeError(f"{name}: no text or chat in the field {field!r:.80}; its fields: {fields:.200}")
    raise SinkscopeError(f"{name}: no field text, content or messages; its fields: {fields:.200}; {remedy}")


def words_of(content: Any) -> str:
    """Return the text of a message's content: a string, or parts of which some are text."""
    if isinstance(content, list):
        return "".join(words_of(part.get("text")) for part in content)
    return content if isinstance(content, str) else ""


def is_text_file(path: PathName) -> bool:
    """Return whether the ending of a file says that `read_texts` finds records in it, and not one text."""
    return Path(path).suffix.lower() in (".json", ".jsonl", ".ndjson")
