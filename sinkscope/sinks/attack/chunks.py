"""Work over the vocabulary in chunks: one process or several (Ray), and resumed after a kill from a folder."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from sinkscope._plain import pathless, plain
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.open import PartTarget, open_target
from sinkscope.models.stream import StreamTarget
from sinkscope.models.target import Target
from sinkscope.output import write_atomic
from sinkscope.sinks.first_token.walk import Progress

Columns = dict[str, list[Any]]
"""What a chunk gives: a list per column, an entry per item of the chunk; only what JSON knows."""


@runtime_checkable
class Work(Protocol):
    """What is done to a chunk of token ids. It is pickled for other processes, so it holds no model."""

    @property
    def layer(self) -> int:
        """The deepest layer it runs."""
        ...

    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns with an entry per item."""
        ...


@dataclass(frozen=True)
class Opened:
    """How a model was opened, so that another process can open it, too."""

    model: object
    target: Target
    options: dict[str, Any]

    def elsewhere(self) -> tuple[object, dict[str, Any]]:
        """What another process needs.

        Raises:
            UnsupportedError: a live model that cannot be sent to another process.
        """
        if self.model is None or isinstance(self.model, str | os.PathLike):
            return self.model, self.options
        if self.target.kind != "hf" or isinstance(self.target, StreamTarget):
            raise UnsupportedError(
                f"workers need the model by its name, or a plain Hugging Face model; this is a live "
                f"{type(self.model).__name__}: give its name, or workers=1"
            )
        return self.target.hf, self.options


def in_chunks(
    opened: Opened,
    work: Work,
    items: Sequence[int],
    *,
    what: str,
    size: int,
    workers: int,
    resume: str | Path | None,
    settings: dict[str, Any],
    progress: Progress | None,
) -> Columns:
    """`work` on every chunk of `items`, joined in order: the same table however many workers, and after any kill.

    Args:
        opened: the model.
        work: what to do.
        items: token ids.
        what: name of the work, for progress and messages.
        size: items per chunk.
        workers: processes; more than 1 run over Ray.
        resume: folder where finished chunks are kept, and found again.
        settings: everything that decides the table; a folder made with others is refused.
        progress: called as `progress(what, done, total)`.
    """
    chunks = [list(items[i : i + size]) for i in range(0, len(items), size)]
    kept = _Kept(resume, what, {**settings, "chunk": size, "items": _digest(items)})
    done = {i: found for i in range(len(chunks)) if (found := kept.read(i, len(chunks[i]))) is not None}
    left = [i for i in range(len(chunks)) if i not in done]
    finished = sum(len(chunks[i]) for i in done)
    if progress is not None:
        progress(what, finished, len(items))
    run = _over_ray(opened, work, chunks, left, workers) if workers > 1 else _here(opened, work, chunks, left)
    for index, columns in run:
        done[index] = kept.write(index, columns)
        finished += len(chunks[index])
        if progress is not None:
            progress(what, finished, len(items))
    names = list(done[0]) if done else []
    return {name: [value for i in range(len(chunks)) for value in done[i][name]] for name in names}


def check_workers(workers: int) -> None:
    """Refuse before the work a number of workers that cannot be.

    Raises:
        SinkscopeError: less than one, or Ray is not installed.
    """
    if workers < 1:
        raise SinkscopeError(f"--workers {workers}: at least one process is needed; give 1 or more")
    if workers > 1:
        _ray()


def _here(opened: Opened, work: Work, chunks: list[list[int]], left: list[int]) -> Iterator[tuple[int, Columns]]:
    for index in left:
        yield index, work(opened.target, chunks[index])


class _Kept:
    """Finished chunks in a folder, each a file that is there whole or not at all."""

    def __init__(self, folder: str | Path | None, what: str, settings: dict[str, Any]) -> None:
        self._folder = None if folder is None else Path(folder)
        if self._folder is None:
            return
        self._name = pathless(str(folder))
        wanted = json.dumps({"what": what, **plain(settings)}, indent=1, sort_keys=True) + "\n"
        manifest = self._folder / "settings.json"
        try:
            found = manifest.read_text("utf-8") if manifest.exists() else None
        except (OSError, UnicodeDecodeError) as error:
            raise SinkscopeError(f"--resume {self._name}: cannot read settings.json ({error})") from None
        if found is None:
            if self._folder.exists() and (not self._folder.is_dir() or any(self._folder.iterdir())):
                raise SinkscopeError(f"--resume {self._name} is no folder of this command: give a new or empty one")
            write_atomic(manifest, wanted)
        elif found != wanted:
            raise SinkscopeError(
                f"--resume {self._name} was begun with other settings ({_difference(found, wanted)}): give the "
                "same, or another folder"
            )

    def _file(self, index: int) -> Path:
        assert self._folder is not None
        return self._folder / f"chunk-{index:06d}.json"

    def read(self, index: int, length: int) -> Columns | None:
        """The columns of a chunk, None where it is not finished."""
        if self._folder is None or not self._file(index).exists():
            return None
        try:
            found = json.loads(self._file(index).read_text("utf-8"))
            whole = isinstance(found, dict) and bool(found) and all(len(column) == length for column in found.values())
        except (OSError, ValueError, TypeError):
            whole, found = False, {}
        return found if whole else None  # a damaged file is made again

    def write(self, index: int, columns: Columns) -> Columns:
        """Keep a finished chunk."""
        if self._folder is not None:
            write_atomic(self._file(index), json.dumps(columns, allow_nan=False) + "\n")
        return columns


def _digest(items: Sequence[int]) -> str:
    return hashlib.sha256(" ".join(map(str, items)).encode()).hexdigest()[:16]


def _difference(found: str, wanted: str) -> str:
    try:
        old, new = json.loads(found), json.loads(wanted)
        names = [name for name in new if old.get(name) != new[name]]
        return ", ".join(f"{name} {old.get(name)!r}, now {new[name]!r}" for name in names) or "more of them"
    except (ValueError, AttributeError):
        return "its settings.json is not one of this version"


# --- Ray -------------------------------------------------------------------------------------------------------------


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise SinkscopeError(
            'more than one worker needs Ray: pip install "sinkscope[ray]", or leave out --workers'
        ) from None


class _Worker:
    """One process with the model open."""

    def __init__(self, model: object, options: dict[str, Any], work: Work, threads: int) -> None:
        torch.set_num_threads(threads)
        self.target, self.work = hold_layers(open_target(model, **options), work.layer), work

    def run(self, index: int, items: list[int]) -> tuple[int, Columns]:
        return index, self.work(self.target, items)


def hold_layers(target: Target, layer: int) -> Target:
    """The model with every layer up to `layer` in memory: each chunk passes through all of them."""
    while isinstance(target, PartTarget) and len(target.layers) <= layer:
        target = target.more()
    if isinstance(target, StreamTarget):
        target.store.hold(layer + 1)
    return target


@contextmanager
def _cluster(ray: Any, workers: int) -> Iterator[None]:
    """A running cluster (the user's, where there is one), ended if it was begun here."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent anywhere
    local = {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": workers, "include_dashboard": False}
    ray.init(log_to_driver=False, logging_level="ERROR", **local)
    try:
        yield
    finally:
        ray.shutdown()


def _over_ray(
    opened: Opened, work: Work, chunks: list[list[int]], left: list[int], workers: int
) -> Iterator[tuple[int, Columns]]:
    ray = _ray()
    if not left:
        return
    model, options = opened.elsewhere()
    count = min(workers, len(left))
    on_cuda = opened.target.device.type == "cuda"
    share = min(1.0, torch.cuda.device_count() / count) if on_cuda else 0
    threads = max(1, torch.get_num_threads() // count)
    with _cluster(ray, workers):
        remote = ray.remote(num_cpus=1, num_gpus=share)(_Worker)
        shared = ray.put(model)
        pool = ray.util.ActorPool([remote.remote(shared, options, work, threads) for _ in range(count)])
        try:
            yield from pool.map_unordered(lambda actor, i: actor.run.remote(i, chunks[i]), left)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, SinkscopeError) else error from None
