"""Records of LongBench's own files (zai-org/LongBench), as the scripts that build prompts from them read them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import read_rows

EXPECTED = "LongBench's JSON lines"
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


def read_longbench(source: Path) -> list[LongBenchRecord]:
    """Read the records of one task from its `.jsonl`.

    Raises:
        SinkscopeError: The file cannot be read or has no records, or a record misses a field (names the line).
    """
    records: list[LongBenchRecord] = []
    for where, row in read_rows(source, EXPECTED):
        try:
            given = str(row["_id"]), row["context"], row["input"], tuple(row["answers"])
        except (KeyError, TypeError) as error:
            raise SinkscopeError(f"{where} has no {error}: give {EXPECTED}") from None
        records.append(LongBenchRecord(*given, tuple(row.get("all_classes") or ())))
    return records
