"""Records of LongBench's own files (zai-org/LongBench), as the scripts that build prompts from them read them."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from lzma import LZMAError
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import read_rows, rows_of

EXPECTED = "LongBench's JSON lines, or its data.zip"
LARGEST = 2**30  # bytes of a file of the archive when it is unpacked
ANSWER_ALONE = (
    "Answer the question based on the given passages. Only give me the answer and do not output any other words."
)
"""The instruction of LongBench's prompts about several passages, to the character (config/dataset2prompt.json)."""
PASSAGES_HEAD = f"{ANSWER_ALONE}\n\nThe following are given passages.\n"
PASSAGES_TAIL = f"\n\n{ANSWER_ALONE}\n\nQuestion: {{}}\nAnswer:"
"""Before and after the passages of hotpotqa, 2wikimqa and musique, likewise; the braces stand for the question."""


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
        rows = list(rows_of(_member(source, f"data/{task}.jsonl"), f"{task}.jsonl", EXPECTED))
    else:
        rows = list(read_rows(source, EXPECTED))
    items = []
    for where, row in rows:
        items.append(_record(row, where))
    return items


def _member(source: Path, name: str) -> str:
    """The text of a file in an archive."""
    try:
        with zipfile.ZipFile(source) as archive:
            if archive.getinfo(name).file_size > LARGEST:
                raise ValueError(f"{name} is larger than {LARGEST} bytes")
            return archive.read(name).decode()
    # what zipfile raises of a damaged, encrypted or foreign archive, by its way of packing
    except (OSError, KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, LZMAError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise SinkscopeError(f"{source.name} cannot be read ({reason}): give {EXPECTED}; download it again") from None


def _record(row: Any, where: str) -> LongBenchRecord:
    try:
        return LongBenchRecord(
            str(row["_id"]), row["context"], row["input"], tuple(row["answers"]), tuple(row.get("all_classes") or ())
        )
    except (KeyError, TypeError) as error:
        raise SinkscopeError(f"{where} has no {error}: give {EXPECTED}") from None
