"""Records of LongBench's own files (zai-org/LongBench), as the scripts that build prompts from them read them."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.plain import parse_json
from sinkscope.files.records import read_rows

EXPECTED = "LongBench's JSON lines, or its data.zip"
ANSWER_ALONE = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
"""The instruction of LongBench's prompts about several passages, to the character (config/dataset2prompt.json)."""


@dataclass(frozen=True)
class LongBenchRecord:
    """A record under our own field names.

    Attributes:
        id: `_id`.
        context: The text.
        question: `input`; empty if the task needs none.
        answers: The correct answers.
        classes: `all_classes`, for classification.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...]


def read_longbench(task: str, source: Path) -> list[LongBenchRecord]:
    """Read the records of one task.

    Args:
        task: "multi_news", "narrativeqa", "qasper" and so on.
        source: The task's `.jsonl`, or LongBench's `data.zip`.

    Raises:
        SinkscopeError: The file cannot be read or has no records, or a record misses a field (names the line).
    """
    if source.suffix == ".zip":
        rows = _rows_of_member(source, f"data/{task}.jsonl")
    else:
        rows = list(read_rows(source, EXPECTED))
    return [_record(row, where) for where, row in rows]


def _rows_of_member(source: Path, name: str) -> list[tuple[str, Any]]:
    """The rows of a file in an archive, and the location of each."""
    try:
        with zipfile.ZipFile(source) as archive:
            lines = archive.read(name).splitlines()
        return [(f"{name} line {number}", parse_json(line)) for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise SinkscopeError(f"{source.name} cannot be read ({error}): give {EXPECTED}; download it again") from None


def _record(row: Any, where: str) -> LongBenchRecord:
    try:
        return LongBenchRecord(
            str(row["_id"]), row["context"], row["input"], tuple(row["answers"]), tuple(row.get("all_classes") or ())
        )
    except (KeyError, TypeError) as error:
        raise SinkscopeError(f"{where} has no {error}: give {EXPECTED}") from None
