"""The tokens of a vocabulary, and resumable work on many items in chunks, in one process or several (Ray)."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.jobs import Pool, Tally, check_workers, finish
from sinkscope.files.store import Folder, Keyed
from sinkscope.measure import Setup
from sinkscope.models.open import PartTarget, StreamTarget, fingerprint_of, open_target
from sinkscope.models.target import Target

Pools = Mapping[int, Int[Tensor, " token"]]  # head -> the tokens of its cluster
Score = Callable[[Tensor], Tensor]  # sequences [row pos] -> how sink-like each position is [row pos]
_BLOCKS = 8  # a search chooses an eighth of a sequence at a time


def make_pools(clusters: Mapping[int, Sequence[int]], vocabulary: int, left_out: set[int]) -> dict[int, Tensor]:
    """The clusters as tensors, without the tokens of `left_out`. Clusters of fewer than two tokens are dropped.

    Raises:
        SinkscopeError: A token does not exist in the model.
    """
    pools: dict[int, Tensor] = {}
    for head, tokens in clusters.items():
        ids = sorted({int(t) for t in tokens} - left_out)
        if ids and not (ids[0] >= 0 and ids[-1] < vocabulary):
            wrong = ids[0] if ids[0] < 0 else ids[-1]
            raise SinkscopeError(
                f"clusters: token {wrong} of head {head} is not in the vocabulary of {vocabulary} tokens; give ids "
                f"from 0 to {vocabulary - 1}"
            )
        if len(ids) > 1:
            pools[int(head)] = torch.tensor(ids)
    return pools


def drawn_sequences(
    pools: Pools, length: int, count: int, seed: int
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, " row"]]:
    """`count` sequences of distinct tokens, each from one cluster, the clusters taken in turn; and the head of each.

    No rows if no cluster has `length` tokens.
    """
    generator = _generator("draw", seed, length)
    heads = [head for head, tokens in pools.items() if len(tokens) >= length]
    of = [heads[i % len(heads)] for i in range(count if heads else 0)]
    rows = [pools[h][torch.randperm(len(pools[h]), generator=generator)[:length]] for h in of]
    empty = torch.zeros(0, length, dtype=torch.long)
    return torch.stack(rows) if rows else empty, torch.tensor(of, dtype=torch.long)


def repeat(rows: Int[Tensor, "row pos"]) -> Int[Tensor, "row pos"]:
    """The first token of each sequence, repeated: the baseline that the attack does without."""
    return rows[:, :1].expand_as(rows).contiguous()


def greedy(
    score: Score, pools: Pools, length: int, count: int, candidates: int, seed: int
) -> tuple[Int[Tensor, "row pos"], Int[Tensor, " row"]]:
    """Grow sequences block by block; of several random blocks, keep the one whose own positions score highest.

    Later tokens cannot change earlier positions, so only the prefix is computed more than once.

    Args:
        score: See `Score`; called with sequences of any length.
        pools: The clusters.
        length: Tokens per sequence.
        count: Number of sequences.
        candidates: Blocks tried at each step.
        seed: Seed of the draws.
    """
    generator = _generator("greedy", seed, length)
    orders, heads = drawn_sequences(pools, length, count, seed)  # used only to find the clusters that are large enough
    ids = orders[:, :0]
    for size in _block_sizes(length) if len(orders) else []:
        tried = torch.stack(
            [_spare(pools[int(h)], row, size, candidates, generator) for h, row in zip(heads, ids, strict=True)]
        )
        grown = torch.cat([ids[:, None].expand(-1, candidates, -1), tried], -1)
        scores = score(grown.flatten(0, 1))[:, -size:].mean(-1).view(len(ids), candidates)
        ids = grown[torch.arange(len(ids)), scores.argmax(-1)]
    return ids, heads


def coordinate(
    score: Score, rows: Int[Tensor, "row pos"], heads: Int[Tensor, " row"], pools: Pools, candidates: int, seed: int
) -> Int[Tensor, "row pos"]:
    """Improve sequences block by block: each block is replaced by the best of several random ones, or kept.

    The mean score never falls. New tokens come from the same cluster and do not occur in the sequence yet. If the
    cluster has too few of them, the block stays unchanged.
    """
    generator = _generator("coordinate", seed, rows.shape[1])
    ids, start = rows.clone(), 0
    for size in _block_sizes(rows.shape[1]):
        block = slice(start, start + size)
        start += size
        able = [i for i, h in enumerate(heads.tolist()) if len(pools[h]) >= rows.shape[1] + size]
        if not able:
            continue
        tried = ids[able][:, None].repeat(1, candidates, 1)
        for i, row in enumerate(able):  # candidate 0 is the unchanged sequence
            tried[i, 1:, block] = _spare(pools[int(heads[row])], ids[row], size, candidates - 1, generator)
        scores = score(tried.flatten(0, 1)).mean(-1).view(len(able), candidates)
        ids[able] = tried[torch.arange(len(able)), scores.argmax(-1)]
    return ids


def _generator(what: str, seed: int, length: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{what} {seed} {length}".encode()))


def _block_sizes(length: int) -> list[int]:
    edges = torch.linspace(0, length, min(_BLOCKS, length) + 1).round().int().tolist()
    return [b - a for a, b in pairwise(edges)]


def _spare(
    pool: Tensor, used: Tensor, size: int, count: int, generator: torch.Generator
) -> Int[Tensor, "candidate pos"]:
    spare = pool[~torch.isin(pool, used)]
    return torch.stack([spare[torch.randperm(len(spare), generator=generator)[:size]] for _ in range(count)])


def round_trip(tokenizer: Any, rows: Int[Tensor, "row pos"]) -> float:
    """Share of sequences that give the same ids after decoding to text and encoding again."""
    texts = tokenizer.batch_decode(rows, clean_up_tokenization_spaces=False)
    again = tokenizer(texts, add_special_tokens=False)["input_ids"]
    return sum(a == b for a, b in zip(again, rows.tolist(), strict=True)) / max(len(rows), 1)


Columns = dict[str, list[Any]]
"""What a chunk gives: a list per column, an entry per item of the chunk; only what JSON knows."""


def shown(target: Target, ids: Sequence[int]) -> tuple[str, ...]:
    """Each token as text, or as the tokenizer spells it if it is no text by itself (part of a character)."""
    texts = [str(target.tokenizer.decode([i])) for i in ids]
    return tuple(
        text if text and "\ufffd" not in text else str(target.tokenizer.convert_ids_to_tokens(i))
        for text, i in zip(texts, ids, strict=True)
    )


@dataclass(frozen=True)
class Work:
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

    @property
    def size(self) -> int:
        """Number of items."""
        return len(self.items)


@dataclass(frozen=True)
class Done(Keyed):
    """The result for a chunk."""

    identity: ClassVar[tuple[str, ...]] = ("chunk",)

    chunk: int
    columns: Columns


def in_chunks(
    setup: Setup,
    work: Work,
    items: Sequence[int],
    *,
    what: str,
    size: int,
    workers: int = 1,
    resume: str | Path | None = None,
    settings: dict[str, Any],
) -> Columns:
    """Run `work` on every chunk of `items` and join the results in order.

    Args:
        setup: The model and its text.
        work: The operation.
        items: Token ids, or indices into what `work` holds.
        what: Name of the work, for progress and messages.
        size: Items per chunk.
        workers: Number of processes; more than one run over Ray.
        resume: Folder that keeps finished chunks, so that an interrupted run can continue.
        settings: Everything that determines the table besides model, text, BOS and seed. A folder made with other
            settings is refused.
    """
    target = hold_layers(setup.target, work.layer)
    chunks = [Chunk(n, list(items[i : i + size])) for n, i in enumerate(range(0, len(items), size))]
    digest = hashlib.sha256(" ".join(map(str, items)).encode()).hexdigest()[:16]
    decisive = {
        "what": what,
        "model": fingerprint_of(setup.target),
        "dtype": str(setup.target.dtype),
        "bos": setup.bos,
        "seed": setup.seed,
        "text": hashlib.sha256(setup.text.encode()).hexdigest()[:16],
        "texts": len(setup.ids),
        **settings,
        "chunk": size,
        "items": digest,
    }
    kept = Folder(resume, decisive, Done, option="--resume")
    pool = Pool(
        partial(_done, target, work),
        _elsewhere(setup, work) if workers > 1 else None,
        workers=workers,
        gpu=target.device.type == "cuda",
        progress=setup.progress,
    )
    with kept, pool:
        finish(pool, chunks, kept, Tally(what, len(items), setup.progress))
    found = [kept.records[chunk.index].columns for chunk in chunks]
    return {name: [value for columns in found for value in columns[name]] for name in (found[0] if found else {})}


def refuse_workers(*, workers: int, **_: Any) -> None:
    """Refuse several workers before the work begins if Ray is not installed."""
    check_workers(workers)


def _done(target: Target, work: Work, chunk: Chunk) -> list[Done]:
    return [Done(chunk.index, work(target, chunk.items))]


def _open(model: object, options: dict[str, Any], work: Work) -> Callable[[Chunk], list[Done]]:
    return partial(_done, hold_layers(open_target(model, **options), work.layer), work)


def _elsewhere(setup: Setup, work: Work) -> Callable[[], Callable[[Chunk], list[Done]]]:
    """Opens the model in another process, and does `work` there.

    Raises:
        UnsupportedError: a live model that cannot be sent to another process.
    """
    model, options = setup.source
    if model is None or isinstance(model, str | os.PathLike):
        return partial(_open, model, options, work)
    if setup.target.kind != "hf" or isinstance(setup.target, StreamTarget):
        raise UnsupportedError(
            f"workers need the model by its name, or a plain Hugging Face model; this is a live "
            f"{type(model).__name__}: give its name, or workers=1"
        )
    return partial(_open, setup.target.hf, options, work)


def hold_layers(target: Target, layer: int) -> Target:
    """The model with every layer up to `layer` in memory, because each chunk passes through all of them."""
    while isinstance(target, PartTarget) and len(target.layers) <= layer:
        target = target.more()
    if isinstance(target, StreamTarget):
        target.store.hold(layer + 1)
    return target
