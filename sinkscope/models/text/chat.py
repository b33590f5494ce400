"""Texts in a tokenizer's chat template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import visible
from sinkscope.models.loading.config import first_line


def chat_text(tokenizer: Any, messages: Sequence[Mapping[str, str]], name: str) -> str:
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
