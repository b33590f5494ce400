"""A folder that stores records as they arrive. Its content survives a killed process; one process writes at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import (
    PathName,
    cannot_write,
    check_writable,
    read_bytes,
    read_json,
    write_atomic,
    write_through,
)
from sinkscope.files.plain import pathless, plain
from sinkscope.files.records import build, json_rows

SETTINGS, RECORDS = "settings.json", "runs.jsonl"
OURS = ".sinkscope-"
"""Beginning of the names of the lock and of files that are not finished."""
GO_ON = "make room and run the same command again, finished parts are kept"
DAMAGED = "another folder, or delete the damaged line and run the same command again"


def refuse_other_files(folder: Path, shown: str) -> None:
    """Refuse a folder that holds files and that no run began.

    Args:
        folder: The folder, which need not be there.
        shown: Its name in the message.

    Raises:
        SinkscopeError: It holds other files.
    """
    not_ours = (path for path in folder.glob("*") if not path.name.startswith(OURS))
    if not (folder / SETTINGS).exists() and any(not_ours):
        raise SinkscopeError(f"{shown} holds other files: give a new or empty folder")


def check_folder(folder: PathName) -> Path:
    """Return the path of a folder for records, after checking that it can be written and holds nothing else.

    Args:
        folder: New, empty, or from an earlier run.

    Raises:
        SinkscopeError: It cannot be written, or holds other files.
    """
    path = check_writable(folder, folder=True)
    refuse_other_files(Path(folder), f"--out {pathless(os.fspath(folder))}")
    return path


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, with both values; empty if none do."""
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    return ", ".join(f"{name} was {before.get(name)!r:.160}, now {now.get(name)!r:.160}" for name in names)


class Keyed:
    """A dataclass that a folder holds once per key; its fields are JSON types."""

    identity: ClassVar[tuple[str, ...]] = ("name",)
    """Fields that tell it from other records."""

    @property
    def key(self) -> Hashable:
        """Identifies the record: the values of its key fields, or the value of the only one."""
        return attrgetter(*self.identity)(self)


R = TypeVar("R", bound=Keyed)


@dataclass
class Kept(Generic[R]):
    """Records of a folder that is being written.

    Attributes:
        path: The folder. None keeps records in memory only.
        records: All records, by key.
    """

    path: Path | None
    records: dict[Hashable, R]

    def append(self, records: Iterable[R]) -> None:
        """Store finished records. They are on disk when this returns.

        Raises:
            SinkscopeError: They cannot be written.
        """
        new = {record.key: record for record in records if record.key not in self.records}
        if self.path is not None:
            try:
                write_through(self.path / RECORDS, "ab", json_lines(new.values()).encode())
            except OSError as error:
                raise cannot_write(self.path, error, GO_ON) from None
        self.records.update(new)


@contextmanager
def kept_in(folder: PathName | None, settings: Mapping[str, Any], kind: type[R]) -> Iterator[Kept[R]]:
    """Context manager that locks a folder of records and gives what it holds, to which records are added.

    Args:
        folder: New, empty, or from an earlier run with the same settings. None keeps records in memory only.
        settings: Everything that determines the records.
        kind: Dataclass of the records.

    Raises:
        SinkscopeError: Another process writes there, the folder holds something else, or its settings differ.
    """
    from filelock import FileLock, Timeout

    if folder is None:
        yield Kept(None, {})
        return
    path, shown = Path(folder), f"--out {pathless(os.fspath(folder))}"
    lock = FileLock(path / f"{OURS}lock")  # the system drops it when the process ends, however
    try:
        refuse_other_files(path, shown)
        path.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout:
        raise SinkscopeError(f"{shown} is being written by another run: wait for it, or give another folder") from None
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield Kept(path, _read_or_begin(path, plain(settings), kind, shown))
    finally:
        lock.release()


def _read_or_begin(path: Path, settings: dict[str, Any], kind: type[R], shown: str) -> dict[Hashable, R]:
    """The records of an earlier run, whose settings are compared; or none of a new one, whose settings are written.

    Nothing is written before all was read and accepted: what is refused may be somebody else's.
    """
    records, complete = read_lines(path / RECORDS, pathless(str(path)), kind)
    if (path / SETTINGS).exists():
        earlier = build(dict[str, Any], read_json(path / SETTINGS, "give another folder"), f"{shown}/{SETTINGS}")
        other = differing(earlier, settings)
        if other and (records or earlier.keys() != settings.keys()):
            raise SinkscopeError(f"{shown} was begun with other settings ({other}): give the same, or another folder")
    if (path / RECORDS).exists():
        os.truncate(path / RECORDS, complete)  # a kill cut the last line short; the next must not be glued to it
    if not records:  # nothing is lost if a run that could not begin is begun with other settings
        write_atomic(path / SETTINGS, json.dumps(settings, indent=1, sort_keys=True) + "\n")
    return {record.key: record for record in records}


def json_lines(items: Iterable[Any]) -> str:
    """Return mappings or dataclasses as JSON lines."""
    return "".join(json.dumps(plain(item), allow_nan=False) + "\n" for item in items)


def read_lines(path: Path, name: str, kind: type[R]) -> tuple[list[R], int]:
    """Read the complete records of a file; also return the length of their lines in bytes.

    A last record that was cut short is ignored.

    Raises:
        SinkscopeError: Any other line is damaged.
    """
    content = read_bytes(path, "give another folder") if path.exists() else b""
    complete = content[: content.rfind(b"\n") + 1]
    rows = json_rows(complete.split(b"\n"), f"{name}/{path.name}", DAMAGED)
    return [build(kind, row, where, DAMAGED) for where, row in rows], len(complete)
