"""The folder of a run: settings, prompts, and a line per finished prompt that no kill can take back."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from sinkscope._plain import build, pathless, plain
from sinkscope.errors import SinkscopeError
from sinkscope.output import write_atomic
from sinkscope.results import ModelInfo

Ended = Literal["eos", "stopped", "cap"]
SETTINGS, PROMPTS, RUNS, LOCK = "settings.json", "prompts.jsonl", "runs.jsonl", "lock"


@dataclass(frozen=True)
class Finished:
    """What every line of a run says first.

    Attributes:
        model: fingerprint of the model.
        method: its name.
        prompt: id of the prompt.
    """

    model: str
    method: str
    prompt: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Model, method and prompt: a folder holds each once."""
        return self.model, self.method, self.prompt


R = TypeVar("R", bound=Finished)
F = TypeVar("F", bound="Folder[Any]")  # typing.Self is refused by the shape checks of the tests


@dataclass(frozen=True)
class Record(Finished):
    """One prompt continued by one method.

    Attributes:
        bench: the set that the prompt is of.
        prompt_tokens: its length, BOS included.
        tokens: ids of the new tokens, up to and with the end of sequence if it came.
        text: the same decoded.
        ended: by the end of sequence, by a stopper, or at the cap of new tokens.
        top1: for each of them the probability that the model gave its likeliest token there.
        signals: "step" and, in lists as long, what was measured over the last window of tokens there.
        detected: step at which each variant of the monitor would have fired first, looking on; for outputs that nobody
            interfered with (method "full") and for texts that were read.
        events: what the method did: step, position, kind and data. Step s came after s new tokens.
        cached_mean: tokens in the cache, mean over steps, layers and kv heads.
        cached_peak: the same at the step with most.
        seconds: wall clock of the batch it ran in.
        batch_size: rows of that batch.
    """

    bench: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    ended: Ended
    top1: tuple[float, ...]
    signals: dict[str, list[Any]]
    detected: dict[str, int | None]
    events: tuple[dict[str, Any], ...]
    cached_mean: float
    cached_peak: float
    seconds: float
    batch_size: int


@dataclass(frozen=True)
class Contents(Generic[R]):
    """What a folder holds: settings, prompts by id, and records in the order of methods and prompts."""

    name: str
    settings: dict[str, Any]
    prompts: dict[str, dict[str, Any]]
    records: tuple[R, ...]


RunFolder = Contents[Record]


def digest(prompts: Iterable[Mapping[str, Any]]) -> str:
    """Of prompts as they are stored."""
    return hashlib.sha256(_lines(prompts).encode()).hexdigest()[:16]


def _lines(items: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(plain(item), allow_nan=False) + "\n" for item in items)


class Folder(Generic[R]):
    """A run's folder while it is written. Use it in a `with`: it is locked until then.

    Args:
        folder: new, empty, or of an earlier run with the same settings.
        settings: everything that decides the records.
        prompts: all of them, as dicts with an "id".
        kind: class of the records.

    Raises:
        SinkscopeError: another process writes there, the folder is of something else, or its settings differ.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        settings: Mapping[str, Any],
        prompts: Sequence[Mapping[str, Any]],
        kind: type[R],
    ) -> None:
        self._kind = kind
        self.folder = Path(folder)
        self.name = str(folder)
        self._settings = plain({**settings, "prompts": digest(prompts)}, scrub=True)
        self._prompts = prompts
        self._lock = -1
        self.records: dict[tuple[str, str, str], R] = {}

    def __enter__(self: F) -> F:
        if self.folder.exists() and not self.folder.is_dir():
            raise SinkscopeError(f"--out {self.name} is a file: give the name of a new folder")
        ours = {SETTINGS, PROMPTS, RUNS, LOCK}
        manifest = self.folder / SETTINGS
        if self.folder.is_dir() and not manifest.exists():
            if any(p.name not in ours and not p.name.startswith(".sinkscope-") for p in self.folder.iterdir()):
                raise SinkscopeError(f"--out {self.name} holds other files: give a new or empty folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _acquire(self.folder / LOCK, self.name)
        except OSError as error:
            raise SinkscopeError(
                f"cannot write {self.name}: {(error.strerror or str(error)).lower()}; choose another place"
            ) from None
        try:
            if manifest.exists():
                self._same(_read_json(manifest, self.name))
            else:
                write_atomic(manifest, json.dumps(self._settings, indent=1, sort_keys=True) + "\n")
            if not (self.folder / PROMPTS).exists():
                write_atomic(self.folder / PROMPTS, _lines(self._prompts))
            runs = self.folder / RUNS
            if runs.exists():
                found, whole = _read_records(runs, self.name, self._kind)
                self.records = {record.key: record for record in found}
                if whole < runs.stat().st_size:  # a line that a kill cut short: the next one must not be glued to it
                    os.truncate(runs, whole)
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # the lock goes with it
            self._lock = -1

    def _same(self, found: Any) -> None:
        was, now = _flat(found) if isinstance(found, dict) else {}, _flat(self._settings)
        names = sorted({*was, *now}) if was else []
        differ = [
            f"{name} was {_short(was.get(name))}, now {_short(now.get(name))}"
            for name in names
            if was.get(name) != now.get(name)
        ]
        if differ or not names:
            what = ", ".join(differ) or "its settings.json is not one of this version"
            raise SinkscopeError(
                f"--out {self.name} was begun with other settings ({what}): give the same, or another folder"
            )

    def append(self, records: Sequence[R]) -> None:
        """Keep finished records: when this returns they are on the disk."""
        new = [record for record in records if record.key not in self.records]
        data = "".join(json.dumps(plain(asdict(r)), allow_nan=False) + "\n" for r in new).encode()
        path = self.folder / RUNS
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            try:
                view = memoryview(data)
                while view:
                    view = view[os.write(descriptor, view) :]
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SinkscopeError(
                f"cannot write {self.name}: {(error.strerror or str(error)).lower()}; make room and run the same "
                "command again, finished prompts are kept"
            ) from None
        self.records.update({record.key: record for record in new})


class Store(Folder[Record]):
    """The folder of a run of LoopBench."""

    def __init__(
        self, folder: str | os.PathLike[str], settings: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]
    ) -> None:
        super().__init__(folder, settings, prompts, Record)


def read_run(folder: str | os.PathLike[str]) -> RunFolder:
    """What a folder holds so far, also while it is being written.

    Raises:
        SinkscopeError: it is no folder of `loopbench run`, or a file in it is damaged (with the line).
    """
    return read_folder(folder, Record, "loopbench")


def read_folder(folder: str | os.PathLike[str], kind: type[R], command: str) -> Contents[R]:
    """What a folder holds so far, also while it is being written.

    Args:
        folder: what was given to --out.
        kind: class of its records.
        command: whose `run` wrote it, or, in two words, which; others than loopbench's say so in the setting "command".

    Raises:
        SinkscopeError: another command's folder, or none, or a file in it is damaged (with the line).
    """
    path, name = Path(folder), str(folder)
    settings = _read_json(path / SETTINGS, name) if (path / SETTINGS).is_file() else None
    if settings is None or (isinstance(settings, dict) and settings.get("command", "loopbench") != command):
        run = command if " " in command else f"{command} run"
        raise SinkscopeError(f"{name} is no folder of `sinkscope {run}`: give what was given to its --out")
    model = settings.get("model") if isinstance(settings, dict) else None
    if not isinstance(model, dict) or set(model) != {field.name for field in fields(ModelInfo)}:
        raise SinkscopeError(f"{name}/{SETTINGS} is damaged: it names no model; run into another folder")
    prompts: dict[str, dict[str, Any]] = {}
    if (path / PROMPTS).is_file():
        for number, line in enumerate((path / PROMPTS).read_bytes().splitlines(), 1):
            try:
                prompt = json.loads(line)
                prompts[prompt["id"]] = prompt
            except (ValueError, KeyError, TypeError):
                raise SinkscopeError(f"{name}/{PROMPTS} line {number} is damaged: run into another folder") from None
    records = _read_records(path / RUNS, name, kind)[0] if (path / RUNS).is_file() else []
    order = {key: i for i, key in enumerate(prompts)}
    records.sort(key=lambda r: (r.model, r.method, order.get(r.prompt, len(order)), r.prompt))
    return Contents(pathless(name), settings, prompts, tuple(records))


def _read_records(path: Path, name: str, kind: type[R]) -> tuple[list[R], int]:
    """Whole records and the length in bytes of the lines that hold them; an unfinished last line is not counted."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    found: list[R] = []
    for number, line in enumerate(data[:whole].split(b"\n")[:-1], 1):
        try:
            found.append(build(kind, json.loads(line), f"{name}/{RUNS} line {number}"))
        except (ValueError, RecursionError):
            raise SinkscopeError(
                f"{name}/{RUNS} line {number} is damaged: delete that line, and the prompt is run again"
            ) from None
    return found, whole


def _read_json(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise SinkscopeError(f"{name}/{path.name} cannot be read ({error}): run into another folder") from None


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What settings of settings are, such as those of the model, beside the others."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= {f"{name} {key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _acquire(path: Path, name: str) -> int:
    """The lock as an open file. The system drops it when the process ends, however it ends, so none is ever stale."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            import msvcrt

            lock: Any = msvcrt
            lock.locking(descriptor, lock.LK_NBLCK, 1)
    except OSError:
        os.close(descriptor)
        raise SinkscopeError(
            f"--out {name} is being written by another run: wait for it, or give another folder"
        ) from None
    return descriptor
