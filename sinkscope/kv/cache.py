"""A layer of a cache of transformers whose slots know their true positions."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from sinkscope.engine.step import TokenPositions
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv import slots as slots_of
from sinkscope.kv.slots import Slots

_SPARE = 16  # as many times what was generated between two selections fits into a cache that is put back


class CacheLayer(Slots, DynamicLayer):  # pyright: ignore[reportIncompatibleVariableOverride]
    """Keys and values of one layer, with positions.

    It is empty, untouched, edited or a part (docs/kv.md).

    Attributes:
        reordered: Whether rows changed places or number since the last prompt, as in beam search.
        whole_layer: The whole layer, while this one works on a copy of some of its slots. None if this one is whole.
        upcoming: All tokens that there are after the call that is about to run; None outside of a block.
    """

    def __init__(self, number: int = 0) -> None:
        DynamicLayer.__init__(self)
        Slots.__init__(self, number)
        self.reordered = False
        self.whole_layer: CacheLayer | None = None
        self.upcoming: TokenPositions | None = None

    # What sinkscope calls ------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Restore the whole layer, followed by the tokens appended since, if this one works on a part.

        Every operation except appending does this first.
        """
        whole = self.whole_layer
        if whole is None:
            return
        new = self.seen - whole.seen
        first_new = self.slots - new
        new_keys = self.keys[..., first_new:, :]
        new_values = self.values[..., first_new:, :]
        later = self.moved_numbers(lambda numbers: numbers[..., first_new:])
        self.hold(whole.keys, whole.values, whole.slot_positions, whole.gapless)
        self.room = whole.room
        self.grew = whole.grew
        self.numbers = dict(whole.numbers)
        self.whole_layer = None
        for name, numbers in later.items():
            self.numbers[name] = torch.cat([self.extra(name), numbers], -1)
        if new:  # not copied at every selection: the room that is made by the first lasts for several
            self.append(new_keys, new_values, _SPARE * new)

    def copy(self) -> CacheLayer:
        """Copy the layer as it is now. Both share their tensors, because every change creates new ones."""
        new = copy(self)
        new.numbers = dict(self.numbers)
        return new

    # What transformers calls -----------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; transformers calls this in every attention layer."""
        new = key_states.shape[-2]
        columns = self.upcoming
        self.upcoming = None
        before = self.columns
        if columns is None or columns.seen != new + (0 if before is None else before.seen):
            columns = _columns_without_block(self, key_states)
        self.columns = columns
        if new > 1 or not self.is_initialized:  # there may be padding among the new tokens
            gapless = self.gapless or not self.is_initialized
            self.gapless = gapless and columns.padded <= columns.seen - new
            self._holes = None
        if self.is_initialized and self.room is None and not self.grew:  # short, as a rule
            self.grew = self.keys.shape[-2] >= slots_of.COPY_LIMIT
            self.keys = torch.cat([self.keys, key_states], -2)
            self.values = torch.cat([self.values, value_states], -2)
        elif self.is_initialized:
            self.append(key_states, value_states)
        else:
            super().update(key_states, value_states, *args, **kwargs)
            self.room = None
            self.grew = True
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, including evicted ones; it determines the positions of new tokens."""
        return 0 if self.columns is None else self.columns.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask covers, and the offset of the first.

        An offset of 0 would show the future.
        """
        if self.columns is None:
            return int(query_length), 0
        slots = self.keys.shape[-2]
        return slots + int(query_length), self.columns.seen - slots

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens. Tokens that were evicted earlier do not come back."""
        removed = -int(tokens_to_remove)  # a tensor in some versions of transformers
        if removed < 0:
            raise SinkscopeError(f"crop({-removed}): give minus the number of tokens to remove")
        self.settle()
        if removed == 0 or self.columns is None:
            return
        if removed >= self.seen:
            self.reset()
            return
        columns = self.columns.first(self.seen - removed)
        if not self.edited:  # slots are columns
            count = columns.seen
            self.numbers = self.moved_numbers(lambda numbers: numbers[..., :count])
            self.hold(self.keys[..., :count, :], self.values[..., :count, :], None, gapless=not columns.padded)
        else:
            last = torch.nn.functional.pad(columns.pos, (1, 0), value=-1).amax(1)  # -1: nothing is left
            self.evict(self.pos <= last[:, None, None].to(self.keys.device))
        self.columns = columns

    def reset(self) -> None:
        """Make the layer empty, like a new one."""
        nothing: Any = None
        self.keys = self.values = nothing  # what it inherits only sets them to zero in some versions of transformers
        self.is_initialized = False
        self.empty()
        self.reordered = False
        self.whole_layer = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows as beam search requests."""
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, 0))  # "row ... -> (row repeats) ..."

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._change_rows(lambda rows: rows[indices.to(rows.device)])

    def _change_rows(self, changed: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        if self.columns is None:
            return
        self.reordered = True
        pos = self.slot_positions
        if pos is not None:
            pos = changed(pos)
        self.numbers = self.moved_numbers(changed)
        self.hold(changed(self.keys), changed(self.values), pos, self.gapless)
        self.columns = TokenPositions.of(changed(self.columns.pos))


def _columns_without_block(layer: CacheLayer, keys: Float[Tensor, "batch kv_head new d_head"]) -> TokenPositions:
    """The tokens before and the new ones outside of a block, where all tokens count as real.

    Raises:
        UnsupportedError: Tokens were evicted.
    """
    if layer.edited:
        raise UnsupportedError(
            "this cache had tokens evicted and is used outside of the `with` that did it: stock masks would be wrong; "
            "go on inside it, or start from a new cache"
        )
    earlier = layer.columns
    if earlier is None:
        earlier = TokenPositions.none(len(keys), keys.device)
    return earlier.read(torch.ones(len(keys), keys.shape[-2], dtype=torch.bool, device=keys.device))
