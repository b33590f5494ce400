"""Work over the vocabulary in chunks: in one process or several (Ray), and resumed from a folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sinkscope.errors import UnsupportedError
from sinkscope.models.open import PartTarget, open_target
from sinkscope.models.stream import StreamTarget
from sinkscope.models.target import Target
from sinkscope.parallel import Pool, Tally, finish
from sinkscope.progress import Progress
from sinkscope.store import Folder, Keyed

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

    def elsewhere(self, work: Work) -> Callable[[], Callable[[Chunk], list[Done]]]:
        """Opens the model in another process, and does `work` there.

        Raises:
            UnsupportedError: a live model that cannot be sent to another process.
        """
        if self.model is None or isinstance(self.model, str | os.PathLike):
            return partial(_open, self.model, self.options, work)
        if self.target.kind != "hf" or isinstance(self.target, StreamTarget):
            raise UnsupportedError(
                f"workers need the model by its name, or a plain Hugging Face model; this is a live "
                f"{type(self.model).__name__}: give its name, or workers=1"
            )
        return partial(_open, self.target.hf, self.options, work)


@dataclass(frozen=True)
class Chunk:
    """Some of the items."""

    index: int
    items: list[int]

    @property
    def keys(self) -> tuple[int, ...]:
        """The key of its only record."""
        return (self.index,)

    @property
    def size(self) -> int:
        """How many there are."""
        return len(self.items)


@dataclass(frozen=True)
class Done(Keyed):
    """What was found for a chunk."""

    chunk: int
    columns: Columns

    @property
    def key(self) -> int:
        """The chunk's number."""
        return self.chunk


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
    chunks = [Chunk(n, list(items[i : i + size])) for n, i in enumerate(range(0, len(items), size))]
    digest = hashlib.sha256(" ".join(map(str, items)).encode()).hexdigest()[:16]
    kept = Folder(resume, {"what": what, **settings, "chunk": size, "items": digest}, Done, option="--resume")
    pool = Pool(
        partial(_done, opened.target, work),
        opened.elsewhere(work) if workers > 1 else None,
        workers=workers,
        gpu=opened.target.device.type == "cuda",
        progress=progress,
    )
    with kept, pool:
        finish(pool, chunks, kept, Tally(what, len(items), progress))
    found = [kept.records[chunk.index].columns for chunk in chunks]
    return {name: [value for columns in found for value in columns[name]] for name in (found[0] if found else {})}


def _done(target: Target, work: Work, chunk: Chunk) -> list[Done]:
    return [Done(chunk.index, work(target, chunk.items))]


def _open(model: object, options: dict[str, Any], work: Work) -> Callable[[Chunk], list[Done]]:
    return partial(_done, hold_layers(open_target(model, **options), work.layer), work)


def hold_layers(target: Target, layer: int) -> Target:
    """The model with every layer up to `layer` in memory: each chunk passes through all of them."""
    while isinstance(target, PartTarget) and len(target.layers) <= layer:
        target = target.more()
    if isinstance(target, StreamTarget):
        target.store.hold(layer + 1)
    return target
