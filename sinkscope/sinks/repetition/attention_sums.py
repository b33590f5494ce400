"""Sums over attention rows as they pass by: per head onto sets of keys, and head-averaged into a coarse picture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.trace.attention import attention_rows

_ROWS = 128  # queries at a time: batch x head x _ROWS x key is the most that is in memory


@dataclass(frozen=True)
class Sums:
    """What attention to each set of keys came to.

    Attributes:
        mean: over all queries.
        tail: over the weighted queries.
        cells: share that the queries of a bin give to the keys of a bin, mean over heads, for the layers shown.
    """

    mean: Float[Tensor, "row set layer head"]
    tail: Float[Tensor, "row set layer head"]
    cells: Float[Tensor, "row shown bin bin"]


@torch.no_grad()
def attention_sums(
    target: Target,
    ids: Int[Tensor, "row pos"],
    keys: Float[Tensor, "row set pos"],
    tail: Float[Tensor, "row pos"],
    shown: list[int],
    edges: tuple[int, ...],
) -> Sums:
    """One pass over all layers; nothing of size query x key is kept.

    Args:
        target: the model.
        ids: the sequences.
        keys: sets of keys as weights on their attention.
        tail: weights of queries, for a second mean beside that over all.
        shown: layers of the pictures.
        edges: first position of every bin, and the length.
    """
    count, length = ids.shape
    mean = torch.zeros(count, keys.shape[1], target.n_layers, target.n_heads)
    late, bins = torch.zeros_like(mean), len(edges) - 1
    cells = torch.zeros(count, len(shown), bins, bins)
    of_bin = torch.bucketize(torch.arange(length), torch.tensor(edges[1:]), right=True)
    member = torch.nn.functional.one_hot(of_bin, bins).float()  # position bin

    def add(layer: int, start: int, rows: Tensor) -> None:
        part = slice(start, start + rows.shape[2])
        given = torch.einsum("bhqk,bsk->bshq", rows, keys.to(rows.device)).cpu()
        mean[:, :, layer] += given.sum(-1) / length
        late[:, :, layer] += torch.einsum("bshq,bq->bsh", given, tail[:, part])
        if layer in shown:
            by_key = rows.mean(1) @ member.to(rows.device)
            cells[:, shown.index(layer)].index_add_(1, of_bin[part], by_key.cpu())

    with attention_rows(target, add, rows_per_chunk=_ROWS):
        target.forward(ids)
    return Sums(mean, late, cells / member.sum(0)[:, None])


def join(parts: list[Sums]) -> Sums:
    """Batches below each other."""
    return Sums(*(torch.cat([getattr(part, name) for part in parts]) for name in ("mean", "tail", "cells")))
