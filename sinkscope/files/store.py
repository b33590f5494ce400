"""A folder that stores records as they arrive. Its content survives a killed process; one process writes at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import read_bytes, read_json, reason_of, write_atomic
from sinkscope.files.plain import parse_json, pathless, plain
from sinkscope.files.records import build

SETTINGS, RECORDS, LOCK = "settings.json", "runs.jsonl", "lock"


class Keyed:
    """A dataclass that a folder holds once per key; its fields are JSON types."""

    identity: ClassVar[tuple[str, ...]] = ("name",)
    """Fields that tell it from other records."""

    @property
    def key(self) -> Hashable:
        """Identifies the record: the values of its key fields, or the value of the only one."""
        values = tuple(getattr(self, name) for name in self.identity)
        if len(values) == 1:
            return values[0]
        return values


R = TypeVar("R", bound=Keyed)
F = TypeVar("F", bound="Folder[Any]")  # typing.Self is refused by the shape checks of the tests


class Folder(Generic[R]):
    """A folder of records that is being written. Use it in a `with`, which locks it.

    Args:
        folder: New, empty, or from an earlier run with the same settings. None keeps records in memory only.
        settings: Everything that determines the records.
        kind: Dataclass of the records.
        also: Other files of the folder, by name, written once.
        option: Command option that names the folder, for errors.

    Attributes:
        records: All records, by key.

    Raises:
        SinkscopeError: Another process writes there, the folder holds something else, or its settings differ.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        settings: Mapping[str, Any],
        kind: type[R],
        *,
        also: Mapping[str, str] | None = None,
        option: str = "--out",
    ) -> None:
        self.folder: Path | None = None
        self.name = ""
        if folder is not None:
            self.folder = Path(folder)
            self.name = pathless(os.fspath(folder))
        self.records: dict[Hashable, R] = {}
        self._kind, self._also, self._option = kind, also or {}, option
        self._settings = plain(settings, scrub=True)
        self._lock: Any = None
        self._new: list[Path] = []  # folders that were made for it

    def __enter__(self: F) -> F:
        if self.folder is None:
            return self
        self._refuse_foreign_folder(self.folder)
        self._acquire(self.folder)
        try:
            self._read_or_begin(self.folder)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    @property
    def _shown(self) -> str:
        return f"{self._option} {self.name}"

    def _refuse_foreign_folder(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise SinkscopeError(f"{self._shown} is a file: give the name of a new folder")
        if not folder.is_dir():
            return
        lock = folder / LOCK  # locking a file empties it, so it has to be empty; it is there before the settings are
        others = lock.is_symlink() or (lock.exists() and (not lock.is_file() or lock.stat().st_size > 0))
        if not (folder / SETTINGS).exists():
            for path in folder.iterdir():
                others = others or not (path.name == LOCK or path.name.startswith(".sinkscope-"))
        if others:
            raise SinkscopeError(f"{self._shown} holds other files: give a new or empty folder")

    def _acquire(self, folder: Path) -> None:
        """Make the folder and lock it."""
        from filelock import FileLock, Timeout

        try:
            self._new = [one for one in (folder, *folder.parents) if not one.exists()]
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(folder / LOCK)  # the system drops it when the process ends, however it ends
            self._lock.acquire(blocking=False)
        except Timeout:
            raise SinkscopeError(
                f"{self._shown} is being written by another run: wait for it, or give another folder"
            ) from None
        except OSError as error:
            raise SinkscopeError(f"cannot write {self.name}: {reason_of(error)}; choose another place") from None

    def _read_or_begin(self, folder: Path) -> None:
        """Compare the settings and read the records of an earlier run, or write the settings of a new one."""
        if (folder / SETTINGS).exists():
            self._check_settings(read_json(folder / SETTINGS, "give another folder"))
        else:
            write_atomic(folder / SETTINGS, json.dumps(self._settings, indent=1, sort_keys=True) + "\n")
        for name, content in self._also.items():
            if not (folder / name).exists():
                write_atomic(folder / name, content)
        path = folder / RECORDS
        if path.exists():
            records, complete = read_lines(path, self.name, self._kind)
            self.records = {record.key: record for record in records}
            if complete < path.stat().st_size:  # a kill cut the last line short; the next must not be glued to it
                os.truncate(path, complete)

    def __exit__(self, *raised: object) -> None:
        """Release the folder; if the work failed before its first record, remove a folder made for it."""
        if self._lock is None or self.folder is None:
            return
        failed = bool(raised) and raised[0] is not None
        try:
            if self._new and failed and not self.records:
                for name in (SETTINGS, *self._also, LOCK):
                    (self.folder / name).unlink(missing_ok=True)
                for folder in self._new:
                    folder.rmdir()
        except OSError:  # something in the folder is not ours
            pass
        finally:
            self._lock.release()

    def _check_settings(self, stored: Any) -> None:
        """Refuse to continue a run that was begun with other settings."""
        if not isinstance(stored, dict):
            raise SinkscopeError(
                f"{self._shown} was begun with other settings (its settings.json is not one of this version): give the "
                "same settings, or another folder"
            )
        earlier, now = _flat(stored), _flat(self._settings)
        differences: list[str] = []
        for name in sorted({*earlier, *now}):
            if earlier.get(name) != now.get(name):
                differences.append(f"{name} was {_short(earlier.get(name))}, now {_short(now.get(name))}")
        if differences:
            raise SinkscopeError(
                f"{self._shown} was begun with other settings ({', '.join(differences)}): give the same settings, or "
                "another folder"
            )

    def append(self, records: Iterable[R]) -> None:
        """Store finished records. They are on disk when this returns.

        Raises:
            SinkscopeError: They cannot be written.
        """
        new = {record.key: record for record in records if record.key not in self.records}
        if self.folder is not None:
            try:
                with open(self.folder / RECORDS, "ab") as file:
                    file.write(lines(new.values()).encode())
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise SinkscopeError(
                    f"cannot write {self.name}: {reason_of(error)}; make room and run the same command again, finished "
                    "parts are kept"
                ) from None
        self.records.update(new)


def lines(items: Iterable[Any]) -> str:
    """Mappings or dataclasses as JSON lines."""
    return "".join(json.dumps(plain(item), allow_nan=False) + "\n" for item in items)


def read_lines(path: Path, name: str, kind: type[R]) -> tuple[list[R], int]:
    """Complete records of a file, and the length of their lines in bytes. The beginning of a last record is ignored.

    Raises:
        SinkscopeError: Any other line is damaged, or what is left at the end is not the beginning of a record.
    """
    remedy = "delete that line, and run the same command again"
    *whole, rest = read_bytes(path, "give another folder").split(b"\n")
    records: list[R] = []
    for number, line in enumerate(whole, 1):
        try:
            records.append(build(kind, parse_json(line), ""))
        except (ValueError, RecursionError):
            raise SinkscopeError(f"{name}/{path.name} line {number} is damaged: {remedy}") from None
    first_field = fields(cast("Any", kind))[0].name
    begins = f'{{"{first_field}": '.encode()
    if not begins.startswith(rest[: len(begins)]):
        raise SinkscopeError(f"{name}/{path.name} line {len(whole) + 1} is no record of this run: {remedy}")
    return records, sum(len(line) + 1 for line in whole)


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, flattened: those inside a setting (such as the model's) stand beside the others."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= {f"{name} {key}": part for key, part in value.items()}
        else:
            flat[name] = value
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    if len(text) > 60:
        text = text[:57] + "..."
    return text
