"""The user's own text: a plain text, or records of a file (chats, data sets), in the chat template of the model.

1. Read the records. A text is one record; a chat has messages with their authors; a data set has a field of text.
2. Write each chat in the model's own template; texts of no author stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError, first_line, warn
from sinkscope.files.plain import parse_json, pathless, visible
from sinkscope.files.texts import TextRecord, is_text_file, messages_of_row, read_texts
from sinkscope.models.text import typical_text

LONGEST = 4_000_000
"""Characters of a file of records that are read: more than any measurement needs."""
BETWEEN = "\n\n"


@dataclass(frozen=True)
class OwnText:
    """A text of the user.

    Attributes:
        text: All of it.
        texts: Number of records.
        tokens: Number of tokens.
        chats: Number of records that are chats in the model's template.
    """

    text: str
    texts: int
    tokens: int
    chats: int

    def sentence(self, name: str) -> str:
        """Return how much was read of a file."""
        chats = f", {self.chats:,} of them chats in the model's template" if self.chats else ""
        form = "text" if self.texts == 1 else "texts"
        return f"{self.texts:,} {form} with {self.tokens:,} tokens were read from {name}{chats}."


def text_records(path: str | PathLike[str], field: str | None = None) -> list[TextRecord]:
    """Read the texts of a file before a model is opened.

    Args:
        path: A text, or a file of records: JSON, or JSON lines.
        field: The field of a record that holds the text or the messages. None: under one of the names of chats and
            data sets.

    Raises:
        SinkscopeError: The file cannot be read or is empty, a record holds no text that is known, or a file with the
            ending of a text holds JSON.
    """
    name = pathless(fspath(path))
    if not is_text_file(path):
        text = typical_text(Path(path))
        if field is not None:
            raise SinkscopeError(f"--field {field}: {name} is one text without fields; leave it out, or give records")
        if _is_json(text):
            raise SinkscopeError(
                f"{name} holds JSON: name it .json or .jsonl, so that its texts are read and not its quotes"
            )
        return [TextRecord(1, messages_of_row(text))]
    records: list[TextRecord] = []
    size = 0
    for record in read_texts(path, field):
        records.append(record)
        size += len(record.text)
        if size > LONGEST:
            break
    if size == 0:
        raise SinkscopeError(f"text file {name!r} is empty; give texts, or name their field with --field")
    return records


def own_text(records: Sequence[TextRecord], tokenizer: Any, model: str) -> OwnText:
    """Return the text of records as a model reads it.

    Args:
        records: The records.
        tokenizer: The tokenizer of the model, with or without a chat template.
        model: Name of the model, for errors.

    Raises:
        SinkscopeError: The template rejects a chat.
    """
    parts: list[str] = []
    chats, has_template = 0, bool(getattr(tokenizer, "chat_template", None))
    if not has_template and any(map(_is_chat, records)):
        warn(f"the tokenizer of {model} has no chat template: the texts of messages are read without their authors")
    for record in records:
        if has_template and _is_chat(record):
            chats += 1
            parts.append(_in_template(record, tokenizer, model))
        elif record.text.strip():
            parts.append(record.text)
    text = BETWEEN.join(parts)
    tokens = len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    return OwnText(text, len(parts), tokens, chats)


def _is_chat(record: TextRecord) -> bool:
    return any(message.role for message in record.messages)


def _in_template(record: TextRecord, tokenizer: Any, model: str) -> str:
    messages = [{"role": message.role or "user", "content": message.text} for message in record.messages]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
        raise SinkscopeError(
            f"the chat template of {model} failed at record {record.place} ({visible(first_line(error))}): name a "
            "field of plain text with --field, or give other chats"
        ) from None
    return text.rstrip()


def _is_json(text: str) -> bool:
    """Whether a text is JSON, or its first line is."""
    for part in (text, text.lstrip().partition("\n")[0]):
        with suppress(ValueError):
            return isinstance(parse_json(part), dict | list)
    return False
