"""Records of LongBench: JSON lines, alone, in a folder, in the archive `data.zip`, or on the hub (Bai et al. 2024)."""

from __future__ import annotations

import hashlib
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from sinkscope.bench.files import HUB, find_file
from sinkscope.errors import SinkscopeError
from sinkscope.records import check, json_line, refuse_twins

HEAD = (
    "Below are several passages and, after them, a question about what they say. Reply with the answer alone, without "
    "any further words.\n\nPassages:\n"
)
TAIL = "\n\nUsing the passages above, reply with the answer alone, without any further words.\n\nQuestion: {}\nAnswer:"


def wiki2_prompt(passages: str, question: str) -> str:
    """LongBench's prompt in our own words: instruction, passages, instruction, question."""
    return f"{HEAD}{passages}{TAIL.format(question)}"


REPO, ARCHIVE = "zai-org/LongBench", "data.zip"


@dataclass(frozen=True)
class LongBenchRecord:
    """A record, under names of our own.

    Attributes:
        id: `_id`.
        context: the text.
        question: `input`; empty where the task needs none.
        answers: the right ones.
        dataset: the task.
        length: in words, by LongBench's count.
        classes: `all_classes`, for classification.
    """

    id: Annotated[str, Field(validation_alias="_id")]
    context: str
    question: Annotated[str, Field(validation_alias="input")]
    answers: tuple[str, ...]
    dataset: str
    length: float
    classes: Annotated[tuple[str, ...] | None, Field(validation_alias="all_classes")]


@dataclass(frozen=True)
class LongBenchSource:
    """The records of one task, and where they came from.

    Attributes:
        name: base name of the file, or `repo/file`.
        records: in the order of the file.
        sha256: of the JSON lines themselves, however they were packed.
        commit: the hub's, None for a local file.
    """

    name: str
    records: tuple[LongBenchRecord, ...]
    sha256: str
    commit: str | None = None


def read_longbench(
    task: str, source: str | os.PathLike[str], *, repo: str = REPO, file: str = ARCHIVE, revision: str | None = None
) -> LongBenchSource:
    """The records of one task.

    Args:
        task: "multi_news", "narrativeqa" or "2wikimqa". The same task of LongBench-E ("multi_news_e") is taken too.
        source: a `.jsonl` file, a folder that holds one, LongBench's `data.zip`, or "hub".
        repo: dataset on the hub, for "hub".
        file: archive or `.jsonl` file in it, for "hub".
        revision: branch, tag or commit of it, for "hub".

    Raises:
        SinkscopeError: nothing there, a file of something else, or a damaged one (with the line).
    """
    own = f"{task}.jsonl"
    place = f"LongBench's {own} or {ARCHIVE}, the folder of either, or {HUB}"
    found = find_file(source, (own, ARCHIVE), place, repo=repo, file=file, revision=revision)
    expected = f"LongBench's {own}, or download it again"
    try:
        content, shown = _content(found.path, own)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "it ends too early").lower()
        raise SinkscopeError(f"{found.name} cannot be read ({reason}): download it again") from None
    lines = [(f"{shown} line {i}", line) for i, line in enumerate(content.split(b"\n"), 1) if line.strip()]
    records = [(where, _record(task, line, where, expected)) for where, line in lines]
    if not records:
        raise SinkscopeError(f"{found.name} has no records of {task} in it: download it again")
    refuse_twins([(where, record.id) for where, record in records], "_id", expected)
    digest = hashlib.sha256(content).hexdigest()
    return LongBenchSource(found.name, tuple(record for _, record in records), digest, found.commit)


def _content(path: Path, own: str) -> tuple[bytes, str]:
    """The JSON lines, and what to call them in a message."""
    if path.suffix == ".parquet":
        raise SinkscopeError(
            f"{path.name} is a parquet file: give LongBench's {ARCHIVE} or {own}, or convert it with "
            f"pandas.read_parquet(...).to_json('{own}', orient='records', lines=True)"
        )
    if path.suffix != ".zip" and not zipfile.is_zipfile(path):
        return path.read_bytes(), path.name
    with zipfile.ZipFile(path) as archive:
        member = next((name for name in archive.namelist() if name.rpartition("/")[2] == own), None)
        if member is None:
            raise SinkscopeError(f"{path.name} has no {own} in it: give LongBench's {ARCHIVE}")
        return archive.read(member), f"{member} in {path.name}"


def _record(task: str, line: bytes, where: str, expected: str) -> LongBenchRecord:
    found = check(json_line(line, f"{where} is not JSON", expected), LongBenchRecord, where, expected)
    if found.dataset.removesuffix("_e") != task:
        raise SinkscopeError(f"{where} is of {found.dataset!r}, expected {task}: give {expected}")
    if not found.context.strip():
        raise SinkscopeError(f"{where}: the context is empty: give {expected}")
    if task == "2wikimqa" and not (found.answers and found.question.strip()):
        raise SinkscopeError(f"{where} has no question or no answer: give {expected}")
    return found
