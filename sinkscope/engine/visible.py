"""Who sees whom in a layer, as the model says it: its mask, or the function from which transformers makes masks.

Everything is asked by *column* (a token's number in its row, padding counted), so the answer holds for any part of a
cache, in any order: after an eviction the model's own mask is no guide any more, but its function still is. What a
`Knockout` hides is taken away here, too, so that policies, observers, sparse prompts and edits all see the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from transformers.masking_utils import causal_mask_function

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


@dataclass(frozen=True, eq=False)
class FunctionMask:
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

    @property
    def is_causal(self) -> bool:
        """Whether it shows everything up to the query: no window, chunk, packing, image or user's own part is in it."""
        return self.function is causal_mask_function

    def cells(self, at: Visible) -> Cells:
        """Evaluate the function; a key at column -1 may be anything."""
        row = torch.arange(len(at.query), device=at.query.device)[:, None, None, None]
        columns = at.key[:, :, None].clamp(min=0)
        places = (row, torch.zeros_like(row), at.query[:, None, :, None], columns)
        if self.by_vmap:
            same = torch.broadcast_tensors(*places)
            flat = [numbers.flatten() for numbers in same]
            sees = torch.vmap(self.function)(*flat).view(same[0].shape)
        else:
            sees = torch.as_tensor(self.function(*places), device=row.device)
        if self.padding is not None:
            real = pad(self.padding.to(row.device), (0, 1))
            sees = sees & real[row, columns.clamp(max=self.padding.shape[1])]
        return sees


@dataclass(frozen=True, eq=False)
class TensorMask:
    """A 4-D mask that the model passes and that no mask function of transformers made: the caller's, or the model's.

    Attributes:
        mask: The mask, bool or additive.
        first_query: Column of its first query.
        first_key: Column of its first key.
    """

    mask: Shaped[Tensor, "#batch _ #query key"]
    first_query: int = 0
    first_key: int = 0

    def cells(self, at: Visible) -> Shaped[Tensor, "#batch _ #query key"]:
        """Index the mask by column."""
        mask = self.mask.to(at.key.device)
        if mask.shape[2] > 1:
            mask = mask[:, :, at.query[0] - self.first_query]
        return mask[..., at.key[0, 0] - self.first_key]


@dataclass(frozen=True, eq=False)
class CausalMask:
    """No mask: every query sees itself and what stands before it.

    transformers passes none where this is so, because kernels then need none.
    """

    def cells(self, at: Visible) -> Cells:
        """Compare columns."""
        return at.key[:, :, None] <= at.query[:, None, :, None]


MaskSource = FunctionMask | TensorMask | CausalMask
"""What says who sees whom in a layer: `cells` gives a mask, bool, or additive if the model was given one."""


@dataclass(frozen=True, eq=False)
class Visible:
    """Which keys the queries of a call see in one layer.

    Attributes:
        source: What says so.
        query: Columns of the queries.
        key: Columns of the keys, for each query head or once for all; -1 where none is.
        hidden: What is hidden beside that.
        by_slot: Whether keys stand in the slots of a cache that has lost tokens; else in the order of their columns.
    """

    source: MaskSource
    query: Int[Tensor, "batch query"]
    key: Int[Tensor, "batch _ key"]
    hidden: tuple[Hidden, ...] = ()
    by_slot: bool = False

    def mask(self) -> Shaped[Tensor, "batch _ query key"]:
        """Return the mask, for each query head, or once for all: bool, or additive as the model has it."""
        cells = self.source.cells(self).expand(len(self.query), -1, self.query.shape[1], -1)
        hidden = list(self.hidden)
        if self.by_slot:
            hidden.append(lambda _, key: (key < 0)[:, :, None])
        for hide in hidden:
            gone = hide(self.query, self.key)
            if cells.is_floating_point():
                cells = torch.where(gone, torch.finfo(cells.dtype).min, cells)
            else:
                cells = cells & ~gone
        return cells
