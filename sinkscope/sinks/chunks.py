"""Resumable work on many items, such as the tokens of a vocabulary: in chunks, in one process or several (Ray)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from sinkscope.errors import UnsupportedError
from sinkscope.files.jobs import Workers, finish
from sinkscope.files.store import Folder, Keyed
from sinkscope.measure import Setup
from sinkscope.models.open import PartTarget, StreamTarget, fingerprint_of, open_target
from sinkscope.models.target import Target

Columns = dict[str, list[Any]]
"""What a chunk gives: a list per column, an entry per item of the chunk; only what JSON knows."""


@dataclass(frozen=True)
class ChunkWork:
    """The operation applied to a chunk of items. It is pickled for other processes, so it holds no model.

    Attributes:
        layer: The deepest layer it runs.
    """

    layer: int

    def __call__(self, target: Target, items: list[int]) -> Columns:
        """Columns with one entry per item."""
        raise NotImplementedError


@dataclass(frozen=True)
class Chunk:
    """Some of the items, processed together."""

    index: int
    items: list[int]

    @property
    def keys(self) -> tuple[int, ...]:
        """The key of its only record."""
        return (self.index,)


@dataclass(frozen=True)
class ChunkColumns(Keyed):
    """The result for a chunk."""

    identity: ClassVar[tuple[str, ...]] = ("chunk",)

    chunk: int
    columns: Columns


@dataclass(frozen=True)
class ChunkRun:
    """How chunks are worked on.

    Attributes:
        workers: Number of processes; more than one run over Ray.
        resume: Folder that keeps finished chunks, so that an interrupted run can continue.
    """

    workers: int = 1
    resume: Path | None = None

    def part(self, name: str) -> ChunkRun:
        """The same, with a folder of its own inside `resume`."""
        if self.resume is None:
            return self
        return ChunkRun(self.workers, self.resume / name)


def in_chunks(
    setup: Setup, work: ChunkWork, items: Sequence[int], run: ChunkRun, *, what: str, size: int, **settings: Any
) -> Columns:
    """Run `work` on every chunk of `items` and join the results in order.

    Args:
        setup: The model and its text.
        work: The operation.
        items: Token ids, or indices into what `work` holds.
        run: Where it runs, and what it keeps.
        what: Name of the work, for progress and messages.
        size: Items per chunk.
        settings: Everything that determines the columns besides model, text, BOS and seed. A folder made with other
            settings is refused.
    """
    target = hold_layers(setup.target, work.layer)
    chunks = []
    for index, start in enumerate(range(0, len(items), size)):
        chunks.append(Chunk(index, list(items[start : start + size])))
    decisive = {
        "what": what,
        "model": fingerprint_of(setup.target),
        "dtype": str(setup.target.dtype),
        "bos": setup.bos,
        "seed": setup.seed,
        "text": digest_of(setup.text),
        "texts": len(setup.ids),
        **settings,
        "chunk": size,
        "items": digest_of(" ".join(map(str, items))),
    }
    workers: Workers | None = None
    if run.workers > 1:
        workers = Workers(elsewhere(setup, work), run.workers, gpu=target.device.type == "cuda")
    with Folder(run.resume, decisive, ChunkColumns, option="--resume") as kept:
        finish(partial(chunk_columns, target, work), chunks, kept, what, setup.progress, workers)
    joined = {}
    for chunk in chunks:
        for name, values in kept.records[chunk.index].columns.items():
            joined.setdefault(name, []).extend(values)
    return joined


def digest_of(text: str) -> str:
    """A short digest that changes with the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def chunk_columns(target: Target, work: ChunkWork, chunk: Chunk) -> list[ChunkColumns]:
    """The record of a chunk."""
    return [ChunkColumns(chunk.index, work(target, chunk.items))]


def open_and_work(model: object, options: dict[str, Any], work: ChunkWork) -> Callable[[Chunk], list[ChunkColumns]]:
    """Open the model, and return the function that works on a chunk with it."""
    return partial(chunk_columns, hold_layers(open_target(model, **options), work.layer), work)


def elsewhere(setup: Setup, work: ChunkWork) -> Callable[[], Callable[[Chunk], list[ChunkColumns]]]:
    """`open_and_work` for another process.

    Raises:
        UnsupportedError: A live model that cannot be sent to another process.
    """
    model, options = setup.source
    if model is None or isinstance(model, str | os.PathLike):
        return partial(open_and_work, model, options, work)
    if setup.target.kind != "hf" or isinstance(setup.target, StreamTarget):
        raise UnsupportedError(
            f"workers need the model by its name, or a plain Hugging Face model; this is a live "
            f"{type(model).__name__}: give its name, or workers=1"
        )
    return partial(open_and_work, setup.target.hf, options, work)


def hold_layers(target: Target, layer: int) -> Target:
    """The model with every layer up to `layer` in memory, because each chunk passes through all of them."""
    while isinstance(target, PartTarget) and len(target.layers) <= layer:
        target = target.more()
    if isinstance(target, StreamTarget):
        target.store.hold(layer + 1)
    return target


def token_texts(target: Target, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text, or as the tokenizer spells it if it is no text by itself (part of a character)."""
    texts = []
    for token in ids:
        text = str(target.tokenizer.decode([token]))
        if not text or "\ufffd" in text:
            text = str(target.tokenizer.convert_ids_to_tokens(token))
        texts.append(text)
    return tuple(texts)
