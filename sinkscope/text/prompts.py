"""Prompts of benchmarks from JSON lines: SAMSum as LongBench has it, LongEval's topic retrieval, or any "prompt"."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sinkscope.errors import SinkscopeError
from sinkscope.records import check, read_rows

_SAMSUM = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"  # LongBench's
_ENDS = "Now the record ends."  # LongEval's; the question follows it
_EXPECTED = 'JSON lines with "context" and "input" (LongBench), "prompt" and "topics" (LongEval), or "prompt" alone'


@dataclass(frozen=True)
class TextPrompt:
    """A prompt, divided into context and question if its file says how.

    Attributes:
        id: id of the record, or its line if it has none.
        context: what the question is about.
        question: what is asked; empty if the file does not separate it from the context.
    """

    id: str
    context: str
    question: str

    @property
    def text(self) -> str:
        """The prompt as the benchmark gives it, with the question at its end."""
        return self.context + self.question


@dataclass(frozen=True)
class _Row:
    context: str | None = None
    input: str | None = None
    prompt: str | None = None
    topics: Any = None
    dataset: Any = None
    id: Annotated[Any, Field(validation_alias="_id")] = None
    test_id: Any = None

    def __post_init__(self) -> None:
        if self.prompt is None and (self.context is None or self.input is None):
            raise SinkscopeError("the fields of a prompt are missing")
        if not f"{self.context or ''}{self.input or ''}{self.prompt or ''}".strip():
            raise SinkscopeError("the prompt is empty")
        if self.topics is not None and _ENDS not in (self.prompt or _ENDS):
            raise SinkscopeError(f"the prompt has no {_ENDS!r}, as LongEval's topic retrieval has")


def read_prompts(path: str | os.PathLike[str]) -> tuple[TextPrompt, ...]:
    """The prompts of a file of JSON lines.

    Takes LongBench's records (`samsum.jsonl`: its own prompt around context and input; of its other tasks context and
    input), LongEval's topic retrieval (`5_topics.jsonl`: the question is what follows "Now the record ends."), and
    objects with a "prompt".

    Raises:
        SinkscopeError: the file cannot be read or has no records, or a line is none of these (with its number).
    """
    rows = read_rows(path, _EXPECTED)
    return tuple(_prompt(check(row, _Row, where, _EXPECTED), where.rpartition(" ")[2]) for where, row in rows)


def _prompt(row: _Row, number: str) -> TextPrompt:
    if row.context is not None and row.input is not None:
        before = _SAMSUM if str(row.dataset).startswith("samsum") else ""
        return TextPrompt(str(row.id if row.id is not None else number), f"{before}{row.context}\n\n", row.input)
    context, end, question = (row.prompt or "").rpartition(_ENDS)
    if row.topics is None:
        context, end, question = row.prompt or "", "", ""
    return TextPrompt(str(row.test_id if row.test_id is not None else number), context + end, question)
