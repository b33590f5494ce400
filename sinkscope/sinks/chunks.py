"""Resumable work on many items, such as the tokens of a vocabulary, in chunks that a folder keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sinkscope.files.store import Folder, Keyed
from sinkscope.measure import Option, Setup
from sinkscope.models.origin import fingerprint_of
from sinkscope.models.target import Target

Resume = Annotated[str | Path | None, Option(metavar="DIR", writes=True)]
"""The folder that keeps finished chunks."""
TableColumns = dict[str, list[Any]]
"""What a chunk gives: a list per column, an entry per item of the chunk; only what JSON knows."""


@dataclass(frozen=True)
class ChunkColumns(Keyed):
    """The result for a chunk."""

    identity: ClassVar[tuple[str, ...]] = ("chunk",)

    chunk: int
    columns: TableColumns


def in_chunks(
    setup: Setup,
    work: Callable[[list[int]], TableColumns],
    items: Sequence[int],
    resume: Resume,
    *,
    what: str,
    size: int,
    **settings: Any,
) -> TableColumns:
    """Run `work` on every chunk of `items` and join the results in order.

    Args:
        setup: The model and its text.
        work: Called with a chunk of the items; gives columns with one entry per item.
        items: Token ids.
        resume: Folder whose subfolder `what` keeps finished chunks, so that an interrupted run can continue.
        what: Name of the work, also for progress.
        size: Items per chunk.
        settings: Everything that determines the columns besides model, text, BOS and seed. A folder made with other
            settings is refused.
    """
    folder = None if resume is None else Path(resume) / what
    decisive = {
        "model": fingerprint_of(setup.target),
        "dtype": str(setup.target.dtype),
        "seed": setup.seed,
        "text": digest_of(str(setup.ids.tolist())),
        **settings,
        "chunk": size,
        "items": digest_of(str(items)),
    }
    joined: TableColumns = {}
    starts = range(0, len(items), size)
    with Folder(folder, decisive, ChunkColumns, option="--resume") as kept:
        for number, start in enumerate(starts):
            if number not in kept.records:
                kept.append([ChunkColumns(number, work(list(items[start : start + size])))])
            for name, values in kept.records[number].columns.items():
                joined.setdefault(name, []).extend(values)
            setup.progress(what, number + 1, len(starts))
    return joined


def digest_of(text: str) -> str:
    """Return a short digest that changes with the text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def hold_layers(target: Target, layer: int) -> None:
    """Keep every layer up to `layer` of a streamed model in memory, because each chunk passes through all of them."""
    if target.store is not None:
        target.store.resident = layer + 1


def token_texts(target: Target, ids: Sequence[int]) -> tuple[str, ...]:
    """Decode each token, or spell it as the tokenizer does if it is no text by itself (part of a character)."""
    texts = []
    for token in ids:
        text = str(target.tokenizer.decode([token]))
        if not text or "\ufffd" in text:
            text = str(target.tokenizer.convert_ids_to_tokens(token))
        texts.append(text)
    return tuple(texts)
