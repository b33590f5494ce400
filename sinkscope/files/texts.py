"""Texts in files that people have: a text, JSON, lines of JSON, CSV and parquet, also packed by gzip.

Each record gives messages with their authors: a chat has several, a prompt with its answer two, and a text one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from io import TextIOWrapper
from pathlib import Path
from typing import Any, NamedTuple

from sinkscope.errors import SinkscopeError
from sinkscope.files.chats import ANSWERS, PROMPTS, Message, MessageText, Role, message_of, messages_in
from sinkscope.files.opener import open_regular, reason_of
from sinkscope.files.output import PathName, path_of
from sinkscope.files.plain import parse_json
from sinkscope.files.tables import CSV, is_parquet, rows_of_csv, rows_of_parquet, suffix_of, unpacked

JSON = (".json", ".jsonl", ".ndjson")
TEXTS = ("text", "content", "document", "passage", "article", "story", "code", "body", "page_content")
"""Fields that hold a text of no author."""


class TextRecord(NamedTuple):
    """A record of a file.

    Attributes:
        place: Its number, from 1.
        messages: Its messages, at least one; the role of a text without an author is empty.
    """

    place: int
    messages: tuple[Message, ...]

    @property
    def text(self) -> str:
        """Return the texts of all messages, with a blank line between."""
        return "\n\n".join(message.text for message in self.messages if message.text)


def read_texts(path: PathName, field: str | None = None) -> Iterator[TextRecord]:
    """Yield the records of a file.

    Args:
        path: A file. What it holds is said by its first bytes where it is packed or parquet, and else by its ending;
            one with an unknown ending is a text.
        field: The field or column that holds the text, or the messages; "a.b" is a field of a field. None: under one of
            the names of chats and data sets.

    Raises:
        SinkscopeError: The file cannot be read, or no field that is known holds a text.
    """
    remedy = "give another file"
    file = path_of(path, remedy)
    try:
        with closing(open_regular(file, file.name, remedy)) as source:
            for place, row in enumerate(_rows(unpacked(source), file.name), 1):
                yield TextRecord(place, messages_of_row(row, field, f"{file.name} record {place}"))
    except (OSError, EOFError) as error:
        raise SinkscopeError(f"cannot read {file.name}: {reason_of(error)}; {remedy}") from None
    except UnicodeDecodeError:
        raise SinkscopeError(f"{file.name} is not UTF-8 text: convert it, or give another file") from None


def _rows(source: Any, name: str) -> Iterator[Any]:
    """The records of a file as they are: dicts, lists of messages, or the whole text."""
    if is_parquet(source, name):
        yield from rows_of_parquet(source, name)
        return
    with closing(TextIOWrapper(source, encoding="utf-8-sig")) as lines:
        if suffix_of(name) in CSV:
            yield from rows_of_csv(lines, name)
            return
        text = lines.read()
    if suffix_of(name) not in JSON:
        yield text
        return
    yield from _rows_of_json(text, name)


def _rows_of_json(text: str, name: str) -> Iterator[Any]:
    """The records in one value of JSON, a list of them, or lines."""
    try:
        values = [parse_json(text)]
    except ValueError:
        values = []
        for place, line in enumerate(text.splitlines(), 1):
            if line.strip():
                try:
                    values.append(parse_json(line))
                except ValueError as error:
                    raise SinkscopeError(f"{name} line {place} is no JSON: {error}") from None
    talk = [message_of(value) for value in values]
    if len(values) > 1 and all(talk):  # a message a line
        yield values
        return
    for value in values:
        is_chat = isinstance(value, list) and messages_in(value) is not None
        yield from [value] if is_chat or not isinstance(value, list) else value


def messages_of_row(row: Any, field: str | None = None, name: str = "the record") -> tuple[Message, ...]:
    """Return the messages of a record: those of a chat, a prompt and its answer, or a text.

    Args:
        row: A text, a list of messages, or a mapping.
        field: As for `read_texts`.
        name: Name of the record, for errors.

    Raises:
        SinkscopeError: There is no text in it.
    """
    value = row if field is None else _value_at(row, field, name)
    if isinstance(value, str):
        return (_message("", value),)
    messages = messages_in(value)
    if messages is not None:
        return tuple(messages)
    if isinstance(value, Mapping):
        texts = _texts_of(value)
        if texts:
            return texts
    known = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
    raise SinkscopeError(f"{name} holds no text that is known, there are {known[:200]}: name the field of the texts")


def _value_at(row: Any, field: str, name: str) -> Any:
    """The value of a field, which may be a field of a field."""
    value = row
    for part in [field] if isinstance(row, Mapping) and field in row else field.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = ", ".join(value) if isinstance(value, Mapping) else "no fields"
            raise SinkscopeError(f"{name} has no field {field}: there are {known}")
        value = value[part]
    return value


def _texts_of(record: Mapping[Any, Any]) -> tuple[Message, ...]:
    """A prompt and its answer, or one text, under the names that records give them; nothing if it has none."""
    fields = {str(key).lower().replace(" ", "_"): value for key, value in record.items() if isinstance(value, str)}
    prompt = [name for name in PROMPTS if fields.get(name)]
    answer = [name for name in ANSWERS if name not in TEXTS and fields.get(name)]
    if answer:
        asked = [_message("user", "\n".join(fields[name] for name in prompt))] if prompt else []
        return (*asked, _message("assistant", fields[answer[0]]))
    texts = [name for name in TEXTS if name in fields] or (prompt if len(prompt) == 1 else [])
    if not texts and len(record) == 1:
        texts = [*fields]
    return tuple(_message("", fields[name]) for name in texts[:1])


def _message(role: Role, text: str) -> Message:
    return Message(role, (MessageText("text", text),), {"content": text})


def is_text_file(path: PathName) -> bool:
    """Return whether the ending of a file says that `read_texts` finds records in it, and not one text."""
    name = Path(path).name
    return suffix_of(name) in (*JSON, *CSV, ".parquet", ".pq")
