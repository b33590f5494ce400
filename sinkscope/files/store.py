"""A folder that stores records as they arrive. Its content survives a killed process; one process writes at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from sinkscope.errors import SinkscopeError
from sinkscope.files.output import write_atomic
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
        found = tuple(getattr(self, name) for name in self.identity)
        return found if len(self.identity) > 1 else found[0]


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
        self.folder = None if folder is None else Path(folder)
        self.name = "" if folder is None else pathless(os.fspath(folder))
        self.records: dict[Hashable, R] = {}
        self._kind, self._also, self._option = kind, also or {}, option
        self._settings = plain(settings, scrub=True)
        self._lock: Any = None
        self._new: list[Path] = []  # folders that were made for it

    def __enter__(self: F) -> F:
        if self.folder is None:
            return self
        shown, manifest = f"{self._option} {self.name}", self.folder / SETTINGS
        if self.folder.exists() and not self.folder.is_dir():
            raise SinkscopeError(f"{shown} is a file: give the name of a new folder")
        if self.folder.is_dir() and not manifest.exists():
            ours = {SETTINGS, RECORDS, LOCK, *self._also}
            if any(p.name not in ours and not p.name.startswith(".sinkscope-") for p in self.folder.iterdir()):
                raise SinkscopeError(f"{shown} holds other files: give a new or empty folder")
        from filelock import FileLock, Timeout

        try:
            self._new = [folder for folder in (self.folder, *self.folder.parents) if not folder.exists()]
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(self.folder / LOCK)  # the system drops it when the process ends, however it ends
            self._lock.acquire(blocking=False)
        except Timeout:
            raise SinkscopeError(
                f"{shown} is being written by another run: wait for it, or give another folder"
            ) from None
        except OSError as error:
            raise SinkscopeError(f"cannot write {self.name}: {_reason(error)}; choose another place") from None
        try:
            if manifest.exists():
                self._check_settings(read_json(manifest, self.name), shown)
            else:
                write_atomic(manifest, json.dumps(self._settings, indent=1, sort_keys=True) + "\n")
            for name, content in self._also.items():
                if not (self.folder / name).exists():
                    write_atomic(self.folder / name, content)
            runs = self.folder / RECORDS
            if runs.exists():
                found, whole = read_lines(runs, self.name, self._kind)
                self.records = {record.key: record for record in found}
                if whole < runs.stat().st_size:  # a kill cut the last line short; the next must not be glued to it
                    os.truncate(runs, whole)
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        """Release the folder; if the work failed before its first record, remove a folder made for it."""
        if self._lock is None or self.folder is None:
            return
        try:
            if self._new and raised and raised[0] is not None and not self.records:
                for name in (SETTINGS, *self._also, LOCK):
                    (self.folder / name).unlink(missing_ok=True)
                for folder in self._new:
                    folder.rmdir()
        except OSError:  # what is in the way is not ours
            pass
        finally:
            self._lock.release()

    def _check_settings(self, found: Any, shown: str) -> None:
        was, now = _flat(found) if isinstance(found, dict) else {}, _flat(self._settings)
        differ = [
            f"{name} was {_short(was.get(name))}, now {_short(now.get(name))}"
            for name in sorted({*was, *now})
            if was.get(name) != now.get(name)
        ]
        if differ or not isinstance(found, dict):
            what = ", ".join(differ) if was else "its settings.json is not one of this version"
            raise SinkscopeError(
                f"{shown} was begun with other settings ({what}): give the same settings, or another folder"
            )

    def append(self, records: Iterable[R]) -> None:
        """Store finished records. They are on disk when this returns.

        Raises:
            SinkscopeError: They cannot be written.
        """
        new = {record.key: record for record in records if record.key not in self.records}
        if self.folder is not None:
            data = lines(new.values()).encode()
            try:
                descriptor = os.open(self.folder / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(descriptor, view) :]
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
            except OSError as error:
                raise SinkscopeError(
                    f"cannot write {self.name}: {_reason(error)}; make room and run the same command again, finished "
                    "parts are kept"
                ) from None
        self.records.update(new)


def lines(items: Iterable[Any]) -> str:
    """Mappings or dataclasses as JSON lines."""
    return "".join(json.dumps(plain(item), allow_nan=False) + "\n" for item in items)


def read_lines(path: Path, name: str, kind: type[R]) -> tuple[list[R], int]:
    """Complete records of a file, and the length of their lines in bytes. An unfinished last line is ignored.

    Raises:
        SinkscopeError: Any other line is damaged.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    found: list[R] = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            found.append(build(kind, parse_json(line), ""))
        except (ValueError, RecursionError):
            raise SinkscopeError(
                f"{name}/{path.name} line {number} is damaged: delete that line, and run the same command again"
            ) from None
    return found, whole


def read_json(path: Path, name: str) -> Any:
    """Content of a JSON file in a folder.

    Raises:
        SinkscopeError: It cannot be read.
    """
    try:
        return parse_json(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SinkscopeError(f"{name}/{path.name} cannot be read ({error}): give another folder") from None


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, flattened: those inside a setting (such as the model's) stand beside the others."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name} {key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
