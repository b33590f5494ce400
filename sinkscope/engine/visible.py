"""Who sees whom in a layer, as the model says it: its mask, or the function from which transformers makes masks.

Everything is asked by *column* (a token's number in its row, padding counted), so the answer holds for any part of a
cache, in any order: after an eviction the model's own mask is no guide any more, but its function still is. What a
`Knockout` hides is taken away here, too, so that policies, observers, sparse prompts and edits all see the same.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.grouped_heads import per_query_head

Queries = range | Int[Tensor, "batch query"]
"""Columns of queries: of all rows alike, or of each row."""
Columns = range | Int[Tensor, "batch _ key"]
"""Columns of keys: of all rows and heads alike, or of each row and kv head (or of all heads); -1 where none is."""
Mask = Shaped[Tensor, "batch _ query key"]
Cells = Bool[Tensor, "batch _ query key"]
Hidden = Callable[[Tensor, Tensor], Cells]
"""Says which cells are hidden, of queries at columns `[batch query]` and keys at columns `[batch _ key]`."""


def shown(mask: Tensor) -> Bool[Tensor, "*shape"]:
    """Return where a mask of either kind, bool or additive, shows a key."""
    if mask.is_floating_point():
        return mask > torch.finfo(mask.dtype).min / 2
    return mask.bool()


def additive(mask: Shaped[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return a mask as eager attention adds it to scores; an additive mask stays as it is."""
    if mask.is_floating_point():
        return mask.to(dtype)
    added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return added.masked_fill_(~mask, torch.finfo(dtype).min)


class MaskSource(ABC):
    """What says who sees whom in a layer."""

    @abstractmethod
    def cells(
        self, query: Queries, key: Columns, batch: int, device: torch.device
    ) -> Shaped[Tensor, "batch _ query key"]:
        """Return the mask of queries and keys at these columns: bool, or additive if the model was given one.

        A key at column -1 may be anything.
        """

    def later(self) -> MaskSource:
        """Return a source that says the same of keys at any columns, and outlives the call."""
        return self


@dataclass(frozen=True, eq=False)
class FunctionMask(MaskSource):
    """transformers' mask function of a layer, in which windows, chunks, packed texts and images are combined.

    Attributes:
        function: Says of a row, a head, the column of a query and that of a key whether it is seen.
        padding: Which columns are real, `[batch seen]`. None: all.
        by_vmap: Whether the function must be called on single numbers, because it is a user's own.
        local: Length of the window or chunk; None if the layer sees everything.
        first_query: Column of the first query of the call.
        first_key: Column of the first key of the mask that was made of it.
        is_skipped: Whether no mask was made, because it would be causal.
    """

    function: Callable[..., Any]
    padding: Bool[Tensor, "batch seen"] | None = None
    by_vmap: bool = False
    local: int | None = None
    first_query: int = 0
    first_key: int = 0
    is_skipped: bool = False

    def cells(self, query: Queries, key: Columns, batch: int, device: torch.device) -> Cells:
        """Evaluate the function."""
        row = torch.arange(batch, device=device)[:, None, None, None]
        at = _columns(query, device)[:, None, :, None]
        columns = _columns(key, device).clamp(min=0)[..., None, :]
        if columns.ndim == 3:
            columns = columns[:, None]
        places = (row, torch.zeros_like(row), at, columns)
        if self.by_vmap:
            same = torch.broadcast_tensors(*places)
            flat = [numbers.flatten() for numbers in same]
            sees = torch.vmap(self.function)(*flat).view(same[0].shape)
        else:
            sees = torch.as_tensor(self.function(*places), device=device)
        if self.padding is not None:
            padding = self.padding.to(device)
            inside = columns < padding.shape[1]
            real = padding[row, torch.where(inside, columns, 0)] & inside
            sees = sees & real
        return sees.expand(batch, -1, -1, -1)


@dataclass(frozen=True, eq=False)
class TensorMask(MaskSource):
    """A 4-D mask that the model passes, made by transformers or by the caller.

    Attributes:
        mask: The mask, bool or additive.
        first_query: Column of its first query.
        first_key: Column of its first key.
        function: The function of which transformers made it; None if it is the caller's.
    """

    mask: Shaped[Tensor, "#batch _ #query key"]
    first_query: int = 0
    first_key: int = 0
    function: FunctionMask | None = None

    def cells(
        self, query: Queries, key: Columns, batch: int, device: torch.device
    ) -> Shaped[Tensor, "batch _ query key"]:
        """Index the mask by column."""
        if not isinstance(query, range) or not isinstance(key, range):
            if self.function is None:
                raise UnsupportedError(
                    "a mask of queries and keys of your own says nothing of a cache that has lost tokens: pass a mask "
                    "of shape (batch, tokens) with 1 at real tokens"
                )
            return self.function.cells(query, key, batch, device)
        mask = self.mask.to(device)
        if mask.shape[2] > 1:
            mask = mask[:, :, query.start - self.first_query : query.stop - self.first_query]
        mask = mask.expand(batch, -1, len(query), -1)
        return mask[..., key.start - self.first_key : key.stop - self.first_key]

    def later(self) -> MaskSource:
        """Return the function of which the mask was made."""
        return self.function or self


@dataclass(frozen=True, eq=False)
class CausalMask(MaskSource):
    """No mask: every query sees itself and what stands before it.

    transformers passes none where this is so, because kernels then need none.
    """

    def cells(self, query: Queries, key: Columns, batch: int, device: torch.device) -> Cells:
        """Compare columns."""
        columns = _columns(key, device)[..., None, :]
        if columns.ndim == 3:
            columns = columns[:, None]
        return (columns <= _columns(query, device)[:, None, :, None]).expand(batch, -1, -1, -1)


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys the queries of a call see in one layer.

    Attributes:
        source: What says so.
        query: Columns of the queries.
        key: Columns of the keys.
        batch: Number of rows.
        device: Where the layer is.
        hidden: What is hidden beside that.
    """

    source: MaskSource
    query: Queries
    key: Columns
    batch: int
    device: torch.device
    hidden: tuple[Hidden, ...] = ()

    def section(self, queries: slice, keys: slice = slice(None)) -> Visible:
        """Return some of the queries and keys, by their indices."""
        query = self.query[queries] if isinstance(self.query, range) else self.query[:, queries]
        key = self.key[keys] if isinstance(self.key, range) else self.key[..., keys]
        return replace(self, query=query, key=key)

    def mask(self) -> Shaped[Tensor, "batch _ query key"]:
        """Return the mask, for each kv head or query head, or once for all: bool, or additive as the model has it."""
        cells = self.source.cells(self.query, self.key, self.batch, self.device)
        hidden: Tensor | None = None
        if not isinstance(self.key, range):
            hidden = (self.key < 0)[:, :, None]
        if self.hidden:
            for hide in self.hidden:
                more = hide(self.query_columns(), self.key_columns())
                hidden = more if hidden is None else _either(hidden, more)
        if hidden is None:
            return cells
        cells, hidden = _alike(cells, hidden)
        if cells.is_floating_point():
            return cells.masked_fill(hidden, torch.finfo(cells.dtype).min)
        return cells & ~hidden

    def mask_by_head(self, heads: int) -> Shaped[Tensor, "batch _ query key"]:
        """Return the same for each query head, or once if it is the same for all."""
        return per_query_head(self.mask(), heads)

    def sees(self) -> Cells:
        """Return which keys are seen, for each head, or once for all."""
        return shown(self.mask())

    def query_columns(self) -> Int[Tensor, "batch query"]:
        """Return the columns of the queries as a tensor."""
        return _columns(self.query, self.device).expand(self.batch, -1)

    def key_columns(self) -> Int[Tensor, "batch _ key"]:
        """Return the columns of the keys as a tensor."""
        if isinstance(self.key, range):
            return _columns(self.key, self.device)[:, None].expand(self.batch, -1, -1)
        return self.key

    @property
    def is_causal(self) -> bool:
        """Whether every query certainly sees itself and everything before it, so that nothing need be asked."""
        return isinstance(self.source, CausalMask) and isinstance(self.key, range) and not self.hidden


def _columns(columns: range | Tensor, device: torch.device) -> Int[Tensor, "#batch *n"]:
    """Columns as a tensor."""
    if isinstance(columns, range):
        return torch.arange(columns.start, columns.stop, device=device)[None]
    return columns


def _alike(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Two masks by kv head, by query head or for all heads, so that they broadcast."""
    heads = max(first.shape[1], second.shape[1])
    return per_query_head(first, heads), per_query_head(second, heads)


def _either(first: Tensor, second: Tensor) -> Tensor:
    first, second = _alike(first, second)
    return first | second
