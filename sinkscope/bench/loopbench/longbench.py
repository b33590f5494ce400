"""Records of LongBench: JSON lines, alone, in a folder, in the archive `data.zip`, or on the hub (Bai et al. 2024)."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sinkscope.errors import SinkscopeError

HUB = "hub"
REPO, ARCHIVE = "zai-org/LongBench", "data.zip"
_FIELDS: dict[str, tuple[type, ...]] = {
    "input": (str,),
    "context": (str,),
    "answers": (list,),
    "length": (int, float),
    "dataset": (str,),
    "all_classes": (list, type(None)),
    "_id": (str,),
}


@dataclass(frozen=True)
class Record:
    """What is used of a record: its `_id`, text, question, right answers and, for classification, `all_classes`."""

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    classes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """The records of one task, and where they came from.

    Attributes:
        name: base name of the file, or `repo/file`.
        records: in the order of the file.
        sha256: of the JSON lines themselves, however they were packed.
        commit: the hub's, None for a local file.
    """

    name: str
    records: tuple[Record, ...]
    sha256: str
    commit: str | None = None


def read_longbench(
    task: str, source: str | os.PathLike[str], *, repo: str = REPO, file: str = ARCHIVE, revision: str | None = None
) -> Source:
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
    if os.fspath(source) == HUB:
        from sinkscope.models.checkpoint import hub_file

        try:
            local = hub_file(repo, file, revision, kind="dataset")
        except FileNotFoundError:
            raise SinkscopeError(
                f"the dataset {repo} has no {file}: give --file, or --source with a local copy"
            ) from None
        # The cache names a snapshot after its commit.
        commit = local.parents[len(Path(file).parts) - 1].name
        return _read(task, local, f"{repo}/{file}", commit)
    path = Path(source).expanduser()
    if path.is_dir():
        places = [path / below / f"{task}.jsonl" for below in ("", "data")] + [path / ARCHIVE]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            raise SinkscopeError(
                f"the folder {path.resolve().name} has no {task}.jsonl, data/{task}.jsonl or {ARCHIVE}: give the "
                "folder or the archive of LongBench"
            )
        path = found
    if not path.is_file():
        raise SinkscopeError(
            f"there is no file or folder {os.fspath(source)!r}: give LongBench's {task}.jsonl or {ARCHIVE}, the folder "
            f"of either, or {HUB}"
        )
    return _read(task, path, path.name, None)


def _read(task: str, path: Path, name: str, commit: str | None) -> Source:
    digest = hashlib.sha256()
    records: list[Record] = []
    seen: dict[str, int] = {}
    try:
        with _opened(task, path) as (opened, shown):
            for number, line in enumerate(opened, 1):
                digest.update(line)
                if line.strip():
                    record = _record(task, line, f"{shown} line {number}")
                    if record.id in seen:
                        raise SinkscopeError(
                            f"{shown} line {number}: _id {record.id!r} is that of line {seen[record.id]} too; "
                            "download the file again"
                        )
                    seen[record.id] = number
                    records.append(record)
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        reason = (getattr(error, "strerror", None) or str(error) or "it ends too early").lower()
        raise SinkscopeError(f"{name} cannot be read ({reason}): download it again") from None
    if not records:
        raise SinkscopeError(f"{name} has no records of {task} in it: download it again")
    return Source(name, tuple(records), digest.hexdigest(), commit)


@contextmanager
def _opened(task: str, path: Path) -> Iterator[tuple[IO[bytes], str]]:
    """The JSON lines as bytes, and what to call them in a message."""
    if path.suffix == ".parquet":
        raise SinkscopeError(
            f"{path.name} is a parquet file: give LongBench's {ARCHIVE} or {task}.jsonl, or convert it with "
            f"pandas.read_parquet(...).to_json('{task}.jsonl', orient='records', lines=True)"
        )
    if path.suffix != ".zip" and not zipfile.is_zipfile(path):
        with path.open("rb") as opened:
            yield opened, path.name
        return
    with zipfile.ZipFile(path) as archive:
        member = next((n for n in archive.namelist() if n.rpartition("/")[2] == f"{task}.jsonl"), None)
        if member is None:
            raise SinkscopeError(f"{path.name} has no {task}.jsonl in it: give LongBench's {ARCHIVE}")
        with archive.open(member) as opened:
            yield opened, f"{member} in {path.name}"


def _record(task: str, line: bytes, where: str) -> Record:
    again = f"give LongBench's {task}.jsonl, or download it again"
    try:
        content: Any = json.loads(line.decode("utf-8-sig"))
    except ValueError:  # also bytes that are no UTF-8
        raise SinkscopeError(f"{where} is not JSON: {again}") from None
    if not isinstance(content, dict):
        raise SinkscopeError(f"{where} is {type(content).__name__}, expected an object: {again}")
    if missing := [name for name in _FIELDS if name not in content]:
        raise SinkscopeError(f"{where} has no field {missing[0]!r}, expected {', '.join(_FIELDS)}: {again}")
    for name, kinds in _FIELDS.items():
        if not isinstance(content[name], kinds) or isinstance(content[name], bool):
            expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in kinds)
            raise SinkscopeError(f"{where}: {name} is {content[name]!r:.40}, expected {expected}: {again}")
    if content["dataset"].removesuffix("_e") != task:
        raise SinkscopeError(f"{where} is of {content['dataset']!r}, expected {task}: {again}")
    if not content["context"].strip():
        raise SinkscopeError(f"{where}: the context is empty: {again}")
    for name in ("answers", "all_classes"):
        if not all(isinstance(text, str) for text in content[name] or ()):
            raise SinkscopeError(f"{where}: {name} is {content[name]!r:.40}, expected a list of texts: {again}")
    if task == "2wikimqa" and not (content["answers"] and content["input"].strip()):
        raise SinkscopeError(f"{where} has no question or no answer: {again}")
    answers, classes = (tuple(map(_whole, content[name] or ())) for name in ("answers", "all_classes"))
    return Record(content["_id"], _whole(content["context"]), _whole(content["input"]), answers, classes)


def _whole(text: str) -> str:
    """Half a surrogate pair, which JSON can spell, is no text: a tokenizer or a file could not take it."""
    return text.encode("utf-8", "replace").decode("utf-8")
