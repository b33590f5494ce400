"""Texts in a tokenizer's chat template."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sinkscope.errors import SinkscopeError, first_line, warn
from sinkscope.files.plain import visible

Chat = bool | Literal["auto"]
"""Whether texts are put into the chat template: "auto" does it if there is one and they are not in one already."""
Messages = Sequence[Mapping[str, str]]
_REMEDY = "read texts as they are, with chat=False (--no-chat)"


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
    place = 0
    for letter in "".join(begin.split()):
        while place < len(text) and text[place].isspace():
            place += 1
        if not text.startswith(letter, place):
            return None
        place += 1
    return text[place:].removeprefix(begin[len(begin.rstrip()) :])


def chat_text(tokenizer: Any, messages: Messages, name: str, first: int = 0) -> str:
    """Format the messages with the chat template, up to the beginning of the model's answer.

    Some templates expect the content of a message in blocks, and write nothing of a text, or fail. They get blocks.

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
    blocks = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]
    problems: list[str] = []
    for form in (list(messages), blocks):
        try:
            text = str(tokenizer.apply_chat_template(form, add_generation_prompt=True, tokenize=False))
        except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
            problems.append(f"failed ({visible(first_line(error))})")
            continue
        problem = ""
        for number, message in enumerate(messages[first:], first + 1):
            words = re.findall(r"\w+", message["content"])
            if message["role"] != "assistant" and not all(word in text for word in words):
                problem = problem or f"leaves out what message {number} says"
        if not problem:
            return text
        problems.append(problem if text.strip() else "writes nothing")
    raise SinkscopeError(f"the chat template of {name} {problems[0]}: {_REMEDY}")
