"""Prompts of benchmarks from JSON lines: SAMSum as LongBench has it, LongEval's topic retrieval, or any "prompt"."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError

_SAMSUM = "Summarize the dialogue into a few short sentences. The following are some examples.\n\n"  # LongBench's
_ENDS = "Now the record ends."  # LongEval's: behind it stands the question
_FORMS = '"context" and "input" (LongBench), "prompt" and "topics" (LongEval), or "prompt" alone'


@dataclass(frozen=True)
class Prompt:
    """A prompt, taken apart where its file says how.

    Attributes:
        id: of the record; its line where it has none.
        context: what the question is about.
        question: what is asked; empty where the file does not tell it from the context.
    """

    id: str
    context: str
    question: str

    @property
    def text(self) -> str:
        """The prompt as the benchmark gives it, with the question at its end."""
        return self.context + self.question


def read_prompts(path: str | os.PathLike[str]) -> tuple[Prompt, ...]:
    """The prompts of a file of JSON lines.

    Takes LongBench's records (`samsum.jsonl`: its own prompt around context and input; of its other tasks context and
    input), LongEval's topic retrieval (`5_topics.jsonl`: the question is what follows "Now the record ends."), and
    objects with a "prompt".

    Raises:
        SinkscopeError: the file cannot be read or has no records, or a line is none of these (with its number).
    """
    name = Path(path).name
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SinkscopeError(f"cannot read {name}: {reason}; give a file of JSON lines") from None
    found = [_prompt(line, f"{name} line {i}", str(i)) for i, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise SinkscopeError(f"{name} is empty: expected JSON lines with {_FORMS}")
    return tuple(found)


def _prompt(line: bytes, where: str, number: str) -> Prompt:
    try:
        content: Any = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError):  # also bytes that are no UTF-8
        raise SinkscopeError(f"{where} is not JSON: expected an object with {_FORMS}") from None
    fields: dict[str, Any] = content if isinstance(content, dict) else {}
    if "context" in fields and "input" in fields:
        context, question = _text(fields, "context", where), _text(fields, "input", where)
        before = _SAMSUM if str(fields.get("dataset", "")).startswith("samsum") else ""
        found = Prompt(str(fields.get("_id", number)), f"{before}{context}\n\n", question)
    elif "prompt" in fields:
        context, end, question = _text(fields, "prompt", where).rpartition(_ENDS)
        if "topics" in fields and not end:
            raise SinkscopeError(f"{where}: the prompt has no {_ENDS!r}: expected a file of LongEval's topic retrieval")
        if "topics" not in fields:
            context, end, question = context + end + question, "", ""
        found = Prompt(str(fields.get("test_id", number)), context + end, question)
    else:
        raise SinkscopeError(f"{where}: expected an object with {_FORMS}")
    if not found.text.strip():
        raise SinkscopeError(f"{where}: the prompt is empty")
    return found


def _text(fields: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(fields[name], str):
        raise SinkscopeError(f"{where}: {name} is {type(fields[name]).__name__}, expected text")
    # Half a surrogate pair, which JSON can spell, is no text: a tokenizer could not take it.
    return fields[name].encode("utf-8", "replace").decode("utf-8")
