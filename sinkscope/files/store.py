"""A folder that stores records as they arrive. Its content survives a killed process; one process writes at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import PathName, read_bytes, read_json, reason_of, write_atomic
from sinkscope.files.plain import parse_json, pathless, plain
from sinkscope.files.progress import world_size
from sinkscope.files.records import build

SETTINGS, RECORDS = "settings.json", "runs.jsonl"
OURS = ".sinkscope-"
"""Beginning of the names of the lock and of files that are not finished."""


def refuse_other_files(folder: Path, shown: str) -> None:
    """Refuse a folder that holds files and that no run began.

    Args:
        folder: The folder, which need not be there.
        shown: Its name in the message.

    Raises:
        SinkscopeError: It holds other files.
    """
    if folder.is_dir() and not (folder / SETTINGS).exists():
        if not all(path.name.startswith(OURS) for path in folder.iterdir()):
            raise SinkscopeError(f"{shown} holds other files: give a new or empty folder")


def begun_by(folder: Path) -> str | None:
    """Return the command that began a folder, as its settings say; None if it has none, or they do not say it.

    Raises:
        SinkscopeError: The settings are not JSON.
    """
    if not (folder / SETTINGS).is_file():
        return None
    settings = read_json(folder / SETTINGS)
    return settings.get("command") if isinstance(settings, dict) else None


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return the settings that differ, with both values; empty if none do."""
    names: list[str] = []
    for name in sorted({*before, *now}):
        old, new = before.get(name), now.get(name)
        if old != new:
            names.append(f"{name} was {json.dumps(old):.160}, now {json.dumps(new):.160}")
    return ", ".join(names)


class Keyed:
    """A dataclass that a folder holds once per key; its fields are JSON types."""

    identity: ClassVar[tuple[str, ...]] = ("name",)
    """Fields that tell it from other records."""

    @property
    def key(self) -> Hashable:
        """Identifies the record: the values of its key fields, or the value of the only one."""
        return attrgetter(*self.identity)(self)


R = TypeVar("R", bound=Keyed)
F = TypeVar("F", bound="Folder[Any]")  # typing.Self is refused by the shape checks of the tests


class Folder(Generic[R]):
    """A folder of records that is being written; a `with` block locks it.

    Args:
        folder: New, empty, or from an earlier run with the same settings. None keeps records in memory only.
        settings: Everything that determines the records.
        kind: Dataclass of the records.
        option: Command option that names the folder, for errors.

    Attributes:
        records: All records, by key.

    Raises:
        SinkscopeError: Another process writes there, the folder holds something else, or its settings differ.
    """

    def __init__(
        self,
        folder: PathName | None,
        settings: Mapping[str, Any],
        kind: type[R],
        *,
        option: str = "folder",
    ) -> None:
        self.folder = None if folder is None else Path(folder)
        self.name = "" if folder is None else pathless(os.fspath(folder))
        self.records: dict[Hashable, R] = {}
        self._kind, self._option = kind, option
        self._settings = plain(settings, scrub=True)
        self._lock: Any = None

    def __enter__(self: F) -> F:
        from filelock import FileLock, Timeout

        if self.folder is None:
            return self
        shown = f"{self._option} {self.name}"
        if world_size() > 1:
            raise SinkscopeError(f"{shown} is written by one process: run this without torchrun")
        try:
            refuse_other_files(self.folder, shown)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / f"{OURS}lock")  # the system drops it when the process ends, however
            self._lock.acquire(blocking=False)
        except Timeout:
            raise SinkscopeError(
                f"{shown} is being written by another run: wait for it, or give another folder"
            ) from None
        except OSError as error:
            raise SinkscopeError(f"cannot write {self.name}: {reason_of(error)}; choose another place") from None
        try:
            self._read_or_begin(self.folder)
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._lock is not None:
            self._lock.release()

    def _read_or_begin(self, folder: Path) -> None:
        """Compare the settings and read the records of an earlier run, or write the settings of a new one."""
        path = folder / RECORDS
        records, complete = read_lines(path, self.name, self._kind)
        self.records = {record.key: record for record in records}
        if path.exists() and complete < path.stat().st_size:
            os.truncate(path, complete)  # a kill cut the last line short; the next must not be glued to it
        if (folder / SETTINGS).exists():
            earlier = read_json(folder / SETTINGS, "give another folder")
            if not isinstance(earlier, dict):
                earlier = {}
            other = differing(earlier, self._settings)
            if other and (self.records or earlier.keys() != self._settings.keys()):
                raise SinkscopeError(
                    f"{self._option} {self.name} was begun with other settings ({other}): give the same settings, or "
                    "another folder"
                )
        if not self.records:  # nothing is lost if a run that could not begin is begun with other settings
            write_atomic(folder / SETTINGS, json.dumps(self._settings, indent=1, sort_keys=True) + "\n")

    def append(self, records: Iterable[R]) -> None:
        """Store finished records. They are on disk when this returns.

        Raises:
            SinkscopeError: They cannot be written.
        """
        new = {record.key: record for record in records if record.key not in self.records}
        if self.folder is not None:
            try:
                with open(self.folder / RECORDS, "ab") as file:
                    file.write(json_lines(new.values()).encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise SinkscopeError(
                    f"cannot write {self.name}: {reason_of(error)}; make room and run the same command again, finished "
                    "parts are kept"
                ) from None
        self.records.update(new)


def json_lines(items: Iterable[Any]) -> str:
    """Return mappings or dataclasses as JSON lines."""
    return "".join(json.dumps(plain(item), allow_nan=False) + "\n" for item in items)


def read_lines(path: Path, name: str, kind: type[R]) -> tuple[list[R], int]:
    """Read the complete records of a file; also return the length of their lines in bytes.

    A last record that was cut short is ignored.

    Raises:
        SinkscopeError: Any other line is damaged.
    """
    *whole, _ = read_bytes(path, "give another folder").split(b"\n") if path.exists() else [b""]
    records: list[R] = []
    for number, line in enumerate(whole, 1):
        where, remedy = f"{name}/{path.name} line {number}", "delete that line, and run the same command again"
        try:
            row = parse_json(line)
        except ValueError:
            raise SinkscopeError(f"{where} is damaged, because it is not JSON: {remedy}") from None
        try:
            records.append(build(kind, row, where))
        except SinkscopeError as error:
            raise SinkscopeError(f"{error}; the line is damaged: {remedy}") from None
    return records, sum(len(line) + 1 for line in whole)
