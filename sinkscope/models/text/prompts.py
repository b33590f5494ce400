"""Files of prompts whose question is separate from its context, for measurements of attention."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import read_rows

EXPECTED = 'JSON lines with "prompt", or with "context" and "question" (LongBench\'s "input")'


@dataclass(frozen=True)
class TextPrompt:
    """A prompt, divided into context and question if its file says how.

    Attributes:
        id: Id of the record, or its number if it has none.
        context: What the question is about.
        question: The question; empty if the file does not separate it from the context.
    """

    id: str
    context: str
    question: str

    @property
    def text(self) -> str:
        """The whole prompt, with the question at its end."""
        return f"{self.context}\n\n{self.question}" if self.question else self.context


def read_text_prompts(path: str | os.PathLike[str]) -> tuple[TextPrompt, ...]:
    """The prompts of a file of JSON lines.

    A row has `prompt`, or `context` and `question` (or `input`, as in LongBench's files); `id` or `_id` is its name.

    Raises:
        SinkscopeError: The file cannot be read or has no records, or a row has neither form (with its line).
    """
    prompts: list[TextPrompt] = []
    for number, (where, row) in enumerate(read_rows(path, EXPECTED), 1):
        prompts.append(_prompt(row, str(number), where))
    return tuple(prompts)


def _prompt(row: Any, number: str, where: str) -> TextPrompt:
    fields = row if isinstance(row, dict) else {}
    name = str(fields.get("id", fields.get("_id", number)))
    context = fields.get("context", fields.get("prompt"))
    question = fields.get("question", fields.get("input", ""))
    if not isinstance(context, str) or not isinstance(question, str) or not (context + question).strip():
        raise SinkscopeError(f"{where} has no prompt: give {EXPECTED}")
    return TextPrompt(name, context, question)
