"""Texts in a tokenizer's chat template: of a conversation, and of the user's own file.

Such a file is one text, or records (chats, data sets): a chat has messages with their authors, and is written in the
model's own template; texts of no author stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import PathLike, fspath
from typing import Any, Literal

from sinkscope.errors import SinkscopeError, first_line, warn
from sinkscope.files.plain import pathless, visible
from sinkscope.files.texts import Messages, is_text_file, messages_of_row, read_texts, text_of
from sinkscope.models.text import typical_text

Chat = bool | Literal["auto"]
"""Whether texts are put into the chat template: "auto" does it if there is one and they are not in one already."""
_REMEDY = "read texts as they are, with chat=False (--no-chat)"
LONGEST = 4_000_000
"""Characters of a file of records that are read: more than any measurement needs."""
_JSON = re.compile(r'\s*(\{\s*"|\[\s*[{"])')


def uses_template(tokenizer: Any, text: str, chat: Chat, name: str) -> bool:
    """Return whether a text is put into the chat template; a note says so where nobody asked for it.

    Args:
        tokenizer: Tokenizer, with a template or without.
        text: The text. One that begins with a special token is in a template already.
        chat: What the caller wants.
        name: Name of the model, for the note.
    """
    if chat != "auto":
        return chat
    if not getattr(tokenizer, "chat_template", None):
        return False
    if {*tokenizer(text, add_special_tokens=False)["input_ids"][:1]} <= {*tokenizer.all_special_ids}:
        return False
    warn(f"texts are put into the chat template of {name}; chat=False (--no-chat) reads them as they are")
    return True


def chat_ids(tokenizer: Any, messages: Messages, name: str, before: Sequence[int] = ()) -> list[int]:
    """Return the ids of what follows `before` in the messages by the chat template; arguments as for `chat_text`.

    A model may write a text in other tokens than the tokenizer makes of it, so `before` is found by its text.

    Raises:
        SinkscopeError: As for `chat_text`, or the template does not go on where those ids end.
    """
    text = chat_text(tokenizer, messages, name, len(messages) - 1 if before else 0)
    ids = list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    if ids[: len(before)] == [*before]:
        return ids[len(before) :]
    rest = _behind(str(tokenizer.decode([*before], clean_up_tokenization_spaces=False)), text)
    if rest is None:
        raise SinkscopeError(
            f"the chat template of {name} does not go on from the {len(before)} tokens so far, because it writes "
            "earlier turns in another way: begin a new conversation, or give chat=False"
        )
    return list(tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"])


def _behind(begin: str, text: str) -> str | None:
    """What follows the beginning of a text, which may have other white space; None if the text begins otherwise."""
    letters = map(re.escape, "".join(begin.split()))
    match = re.match(r"\s*".join(["", *letters]), text)
    return None if match is None else text[match.end() :].removeprefix(begin[len(begin.rstrip()) :])


def chat_text(tokenizer: Any, messages: Messages, name: str, first: int = 0) -> str:
    """Format the messages with the chat template, up to the beginning of the model's answer.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages, each with role and content.
        name: Name of the model, for errors.
        first: Number of the first message, from 0, whose text must be there. Answers may be written in another way.

    Raises:
        SinkscopeError: There is no template, it rejects the messages, or it leaves out what the user says.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {name} has no chat template: {_REMEDY}")
    text = _formatted(tokenizer, messages, f"of {name} failed", _REMEDY, add_generation_prompt=True)
    for number, message in enumerate(messages[first:], first + 1):
        words = re.findall(r"\w+", message["content"])
        if message["role"] != "assistant" and not all(word in text for word in words):
            raise SinkscopeError(f"the chat template of {name} leaves out what message {number} says: {_REMEDY}")
    return text


def _formatted(tokenizer: Any, messages: Messages, failed: str, remedy: str, **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))
    except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
        raise SinkscopeError(f"the chat template {failed} ({visible(first_line(error))}): {remedy}") from None


# -- a file of the user's own ------------------------------------------------------------------------------------------


def text_records(path: str | PathLike[str], field: str | None = None) -> list[Messages]:
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
        text = typical_text(fspath(path))
        if field is not None:
            raise SinkscopeError(f"--field {field}: {name} is one text without fields; leave it out, or give records")
        if _JSON.match(text):
            raise SinkscopeError(
                f"{name} holds JSON: name it .json or .jsonl, so that its texts are read and not its quotes"
            )
        return [messages_of_row(text)]
    records: list[Messages] = []
    size = 0
    for record in read_texts(path, field):
        records.append(record)
        size += len(text_of(record))
        if size > LONGEST:
            break
    if size == 0:
        raise SinkscopeError(f"text file {name!r} is empty; give texts, or name their field with --field")
    return records


def own_text(records: Sequence[Messages], tokenizer: Any, model: str) -> tuple[str, str]:
    """Return the text of records as a model reads it, and how much it is, in words.

    Args:
        records: The records.
        tokenizer: The tokenizer of the model, with or without a chat template.
        model: Name of the model, for errors.

    Raises:
        SinkscopeError: The template rejects a chat.
    """
    texts: list[str] = []
    chats = 0
    for place, messages in enumerate(records, 1):
        text = text_of(messages)
        if any(message["role"] for message in messages):
            chats += 1
            if tokenizer.chat_template:
                messages = [message | {"role": message["role"] or "user"} for message in messages]
                failed = f"of {model} failed at record {place}"
                text = _formatted(tokenizer, messages, failed, "name a field of plain text with --field").rstrip()
        if text.strip():
            texts.append(text)
    said = f"{len(texts):,} text" + "s" * (len(texts) != 1)
    if chats and tokenizer.chat_template:
        said += f", {chats:,} of them chats in the model's template"
    elif chats:
        warn(f"the tokenizer of {model} has no chat template: the texts of messages are read without their authors")
    return "\n\n".join(texts), said
