"""Texts in a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sinkscope.errors import SinkscopeError, warn
from sinkscope.files.plain import visible
from sinkscope.models.loading.config import first_line

Chat = bool | Literal["auto"]
"""Whether texts are put into the chat template: "auto" does it if there is one and they are not in one already."""
Messages = Sequence[Mapping[str, str]]


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

    Raises:
        SinkscopeError: As for `chat_text`, or the template does not go on where those ids end.
    """
    ids = list(tokenizer(chat_text(tokenizer, messages, name), add_special_tokens=False, verbose=False)["input_ids"])
    if ids[: len(before)] != [*before]:
        raise SinkscopeError(
            f"the chat template of {name} does not go on from the {len(before)} tokens so far, because it writes "
            "earlier turns in another way: begin a new conversation, or give chat=False"
        )
    return ids[len(before) :]


def chat_text(tokenizer: Any, messages: Messages, name: str) -> str:
    """Format the messages with the chat template, up to the beginning of the model's answer.

    Args:
        tokenizer: Tokenizer with the template.
        messages: Messages, each with role and content.
        name: Name of the model, for errors.

    Raises:
        SinkscopeError: There is no template, or it rejects the messages.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise SinkscopeError(f"the tokenizer of {name} has no chat template: leave out chat")
    try:
        return str(tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False))
    except Exception as error:  # a template is a program of the checkpoint: it may fail in any way
        reason = visible(first_line(error))
        raise SinkscopeError(f"the chat template of {name} failed ({reason}): leave out chat") from None
