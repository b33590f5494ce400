"""Texts in a tokenizer's chat template: of a conversation, and of the user's own file.

Such a file is one text, or records (chats, data sets): a chat has messages with their authors, and is written in the
model's own template; texts of no author stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from os import PathLike, fspath
from typing import Any, Literal

from sinkscope.errors import SinkscopeError, first_line, warn
from sinkscope.files.plain import pathless, visible
from sinkscope.files.records import rows_of_text
from sinkscope.files.texts import Messages, is_text_file, messages_of_row, text_of
from sinkscope.models.text import plain_ids, typical_text
from sinkscope.results.notation import count_of

Chat = bool | Literal["auto"]
"""Whether texts are put into the chat template: "auto" does it if there is one and they are not in one already."""
_REMEDY = "read texts as they are, with chat=False (--no-chat)"
MOST = 10_000
"""Records of a file that are read: more than any measurement needs."""
_JSON = re.compile(r'\s*(\{\s*"|\[\s*[{"]|\[\s*\[\s*\{)')


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
    if not tokenizer.chat_template:
        return False
    if {*plain_ids(tokenizer, text)[:1]} <= {*tokenizer.all_special_ids}:
        return False
    warn(f"texts are put into the chat template of {name}; chat=False (--no-chat) reads them as they are")
    return True


def chat_ids(tokenizer: Any, messages: Messages, name: str, before: Sequence[int] = ()) -> list[int]:
    """Return the ids of what follows `before` in the messages by the chat template; arguments as for `chat_text`.

    A model may write a text in other tokens than the tokenizer makes of it, so `before` is found by its text.

    Raises:
        SinkscopeError: As for `chat_text`, or the template does not go on where those ids end.
    """
    text = chat_text(tokenizer, messages, name)
    ids = plain_ids(tokenizer, text)
    if ids[: len(before)] == [*before]:
        return ids[len(before) :]
    begin = str(tokenizer.decode([*before], clean_up_tokenization_spaces=False))
    end = _end_of_beginning(text, begin)
    if end is None:
        raise SinkscopeError(
            f"the chat template of {name} does not go on from the {len(before)} tokens so far, because it writes "
            "earlier turns in another way: begin a new conversation, or give chat=False"
        )
    return plain_ids(tokenizer, text[end:].removeprefix(begin[len(begin.rstrip()) :]))


def _end_of_beginning(text: str, begin: str) -> int | None:
    """Return where a text's beginning ends, with any white space between its letters; None if it begins otherwise."""
    end = 0
    for letter in "".join(begin.split()):
        while end < len(text) and text[end].isspace():
            end += 1
        if end == len(text) or text[end] != letter:
            return None
        end += 1
    return end


def chat_text(tokenizer: Any, messages: Messages, name: str) -> str:
    """Format the messages with the chat template, up to the beginning of the model's answer.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages, each with role and content. Answers may be written in another way.
        name: Name of the model, for errors.

    Raises:
        SinkscopeError: There is no template, it rejects the messages, or it leaves out what the user says.
    """
    text = _formatted(tokenizer, messages, name, _REMEDY, add_generation_prompt=True)
    formatted = {*re.findall(r"\w+", text)}
    for number, message in enumerate(messages, 1):
        if message["role"] == "assistant":
            continue
        for word in re.findall(r"\w+", message["content"]):
            if word not in formatted and word not in text:  # a template may write a word beside another
                raise SinkscopeError(f"the chat template of {name} leaves out what message {number} says: {_REMEDY}")
    return text


def _formatted(tokenizer: Any, messages: Messages, name: str, remedy: str, **options: Any) -> str:
    try:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, **options))
    except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
        reason = visible(first_line(error))
        raise SinkscopeError(f"the chat template of {name} failed ({reason}): {remedy}") from None


# -- a file of the user's own ------------------------------------------------------------------------------------------


def text_records(path: str | PathLike[str], field: str | None = None) -> list[Messages]:
    """Read the texts of a file before a model is opened.

    Args:
        path: A text, or JSON lines or a JSON array: a file that begins as JSON, or whose ending says so.
        field: The field of a record that holds the text or the messages. None: under one of the names of chats and
            data sets.

    Raises:
        SinkscopeError: The file cannot be read or is empty, or a record holds no text that is known.
    """
    name, text = pathless(fspath(path)), typical_text(fspath(path))
    if field is None and not is_text_file(path) and not _JSON.match(text):
        return [messages_of_row(text)]
    rows = islice(rows_of_text(text, name, "JSON lines, or a JSON array, with texts or chats"), MOST)
    return [messages_of_row(row, field, where, "name the one of the text with --field") for where, row in rows]


def _without_bos(tokenizer: Any, messages: Messages, text: str) -> str:
    """A chat in its template without BOS before it, because rows of text begin with BOS themselves.

    BOS stays where it begins messages, too, and not the chat alone: after the messages it then begins the next answer.
    """
    bos = getattr(tokenizer, "bos_token", None)
    if not bos or not text.startswith(bos):
        return text
    rest = text.removeprefix(bos)
    asked = tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
    return text if bos in rest or bos in asked.removeprefix(bos) else rest


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
                remedy = f"leave record {place} out, or name a field of plain text with --field"
                text = _without_bos(tokenizer, messages, _formatted(tokenizer, messages, model, remedy).rstrip())
        if text.strip():
            texts.append(text)
    words = count_of(len(texts), "text")
    if chats:
        how = "in the model's template" if tokenizer.chat_template else "without authors, because it has no template"
        words += f", {chats:,} of them chats {how}"
    return "\n\n".join(texts), words
