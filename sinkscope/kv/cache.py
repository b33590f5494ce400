"""A layer of a cache of transformers whose slots know their true positions, so that any token can be removed.

Stock layers assume that a slot's index is its position. After an eviction this is wrong: masks leak or hide tokens in
padded batches and in models with a sliding window, and rows cannot keep different tokens. Here every slot stores its
position, and attention masks are computed from these positions.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import DynamicLayer

from sinkscope.engine.step import TokenPositions
from sinkscope.errors import SinkscopeError, UnsupportedError

COPY_LIMIT = 512
"""Length from which a copy per token costs more than spare slots."""
SPARE = 64
_SPARE_OF_PARTS = 16  # as many times what was generated between two selections fits into a cache that is put back
KeyTensor = Float[Tensor, "batch kv_head _ d_head"]
ValueTensor = Float[Tensor, "batch kv_head _ d_value"]


@dataclass(eq=False)
class SpareRoom:
    """Keys and values with empty slots at the end.

    Holders have views of the first slots. No slot is written twice, so several holders may share them or a shorter part
    of them, and none sees what another appends.

    Attributes:
        keys: Keys, with the empty slots.
        values: Values, with the empty slots.
        filled: Number of slots that are not empty.
    """

    keys: KeyTensor
    values: ValueTensor
    filled: int

    def fits(self, keys: KeyTensor, more: int) -> bool:
        """Return whether `more` slots can be written after its keys, which nothing follows yet.

        They cannot under autograd, which needs the old values.
        """
        if torch.is_grad_enabled() or self.keys.is_inference() != torch.is_inference_mode_enabled():
            return False
        is_same = self.filled == keys.shape[-2] and keys.data_ptr() == self.keys.data_ptr()
        return is_same and self.filled + more <= self.keys.shape[-2]

    def append(self, keys: KeyTensor, values: ValueTensor) -> tuple[KeyTensor, ValueTensor]:
        """Return everything in it, with new keys and values at the end."""
        end = self.filled + keys.shape[-2]
        self.keys[..., self.filled : end, :] = keys
        self.values[..., self.filled : end, :] = values
        self.filled = end
        return self.keys[..., :end, :], self.values[..., :end, :]


class Slots(DynamicLayer):
    """Keys and values of one layer in slots that know their positions: what a policy reads of them, and what evicts.

    Attributes:
        keys: `[batch kv_head slot d_head]`.
        values: `[batch kv_head slot d_value]`.
        number: Number of the decoder layer.
        columns: All tokens appended, whether or not they were evicted; None if there are none. Layers share them.
        upcoming: All tokens that there are after the call that is about to run; None outside of a block.
        slot_positions: Positions of the slots that existed when they were last read; None while slots are columns,
            because no token was taken out.
        gapless: Whether there are certainly no holes. If not, `holes` counts them.
        numbers: Numbers for each slot, by name, without those of slots that came after they were last read (`extra`).
        room: Where keys and values are, if there are spare slots after them.
        grew: Whether they are what was appended to last, so that nothing was taken out since.
        reordered: Whether rows changed places or number since the last prompt, as in beam search.
        whole_layer: The whole layer, while this one works on a copy of some of its slots. None if this one is whole.
    """

    # Both are None while nothing was appended.
    keys: Tensor
    values: Tensor

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.upcoming: TokenPositions | None = None
        self.reset()

    def reset(self) -> None:
        """Make the layer empty, like a new one."""
        nothing: Any = None
        self.keys = self.values = nothing  # what it inherits only sets them to zero in some versions of transformers
        self.is_initialized = False
        self.columns: TokenPositions | None = None
        self.slot_positions: Int[Tensor, "batch kv_head known"] | None = None
        self.gapless = False
        self._holes: Float[Tensor, " batch"] | None = None
        self.numbers: dict[str, Shaped[Tensor, "batch kv_head known"]] = {}
        self.room: SpareRoom | None = None
        self.grew = False
        self.reordered = False
        self.whole_layer: Slots | None = None

    # What a policy reads ---------------------------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Number of tokens appended so far (batch columns, including padding), whether or not they were evicted."""
        return 0 if self.columns is None else self.columns.n_columns

    @property
    def edited(self) -> bool:
        """Whether any token was evicted, so that slot and position may differ."""
        return self.slot_positions is not None

    @property
    def slots(self) -> int:
        """Number of slots in use, including holes."""
        return 0 if self.columns is None else self.keys.shape[-2]

    @property
    def pos(self) -> Int[Tensor, "batch kv_head slot"]:
        """True position of each slot among its row's real tokens; -1 for a hole or padding, which no query sees."""
        known = self.slot_positions
        new = self.keys.shape[-2]
        if known is not None:
            new -= known.shape[-1]
            if not new:
                return known
        assert self.columns is not None
        latest = self.columns.pos[:, self.columns.n_columns - new :].to(self.keys.device)
        # "batch slot -> batch kv_head slot" as a view: where all heads hold the same, masks are computed once.
        pos = latest[:, None].expand(-1, self.keys.shape[1], -1)
        if known is not None:
            self.slot_positions = pos = torch.cat([known, pos], -1)
        return pos

    def holes(self) -> Float[Tensor, " batch"]:
        """Return the number of empty slots of each row, averaged over kv heads; the same tensor until the next edit."""
        # New slots of single-token calls are never holes, so this is valid until the next edit.
        if self._holes is None:
            self._holes = (self.pos < 0).sum(-1).float().mean(1)
        return self._holes

    def occupied(self, device: torch.device) -> Float[Tensor, " batch"]:
        """Return the number of tokens here, of each row, on a device."""
        return self.keys.shape[-2] - self.holes().to(device)

    def extra(self, name: str) -> Shaped[Tensor, "batch kv_head slot"]:
        """Return numbers for each slot, such as the attention it received.

        They start at zero and move with the slots.
        """
        if name not in self.numbers:
            self.numbers[name] = torch.zeros(*self.keys.shape[:2], 0, device=self.keys.device)
        new = self.keys.shape[-2] - self.numbers[name].shape[-1]
        if new > 0:
            self.numbers[name] = pad(self.numbers[name], (0, new))
        return self.numbers[name]

    # What evicts -----------------------------------------------------------------------------------------------------

    def evict(self, keep: Bool[Tensor, "batch kv_head slot"], exact: int | None = None) -> None:
        """Free every slot that is not kept. Rows and heads may keep different numbers; shorter ones get holes.

        Args:
            keep: The slots that stay; holes and padding never stay.
            exact: Number of slots that every row and head keeps, if known. The call then does not wait for the device.
        """
        pos = self.pos
        if not self.gapless:
            keep = keep & (pos >= 0)
        fewest = most = exact
        if most is None:
            fewest, most = torch.stack(keep.sum(-1).aminmax()).tolist()
        if most == fewest == pos.shape[-1]:  # nothing leaves, and nothing is copied
            self.hold(self.keys, self.values, pos)
            return
        # A stable sort keeps the order of kept slots and moves them to the right, after the others.
        order = keep.to(torch.int8).argsort(dim=-1, stable=True)[..., pos.shape[-1] - most :]
        starts = torch.arange(pos.shape[0] * pos.shape[1], device=pos.device) * pos.shape[-1]
        index = order + starts.view(*pos.shape[:2], 1)
        self.keep_only(index)
        if most != fewest:  # holes stand before what a head holds, also where another head holds everything
            self.hold(self.keys, self.values, torch.where(keep.take(index), self.pos, -1), gapless=False)

    def keep_only(self, index: Int[Tensor, "batch kv_head kept"]) -> None:
        """Keep some slots, given by their places among those of all rows and heads; there are no holes then.

        The call does not wait for the device.
        """
        pos = self.pos.take(index)
        for name in self.numbers:
            self.numbers[name] = self.extra(name).take(index)
        # Whole slots, which is ten times as fast as `gather`.
        keys = torch.embedding(self.keys.flatten(0, 2), index)
        values = torch.embedding(self.values.flatten(0, 2), index)
        self.hold(keys, values, pos)

    def evict_others(self, stays: Bool[Tensor, "row pos"]) -> None:
        """Free every slot, in all heads, whose true position is not among those that are kept of its row."""
        pos = self.pos
        stays_by_head = stays.to(pos.device)[:, None].expand(-1, pos.shape[1], -1)
        self.evict((pos >= 0) & stays_by_head.gather(2, pos.clamp(min=0)))

    def hold(
        self,
        keys: Float[Tensor, "batch kv_head slot d_head"],
        values: Float[Tensor, "batch kv_head slot d_value"],
        pos: Int[Tensor, "batch kv_head known"] | None,
        gapless: bool = True,
    ) -> None:
        """Hold other keys and values, at these true positions; None where slots are still columns."""
        if keys is not self.keys:
            self.room = None
            self.grew = False
        self.keys = keys
        self.values = values
        self.slot_positions = pos
        self.gapless = gapless
        self._holes = None

    def _move_numbers(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace the numbers by those of other slots or rows, as a function takes them from those of all slots."""
        self.numbers = {name: move(self.extra(name)) for name in list(self.numbers)}


class CacheLayer(Slots):
    """The layer of a cache of transformers: what is appended, taken back, and moved with its rows.

    It is empty, untouched, edited or a part (docs/kv.md).
    """

    def settle(self) -> None:
        """Restore the whole layer, followed by the tokens appended since, if this one works on a part.

        Every operation except appending does this first. Numbers that were noted meanwhile are gone.
        """
        whole_layer = self.whole_layer
        if whole_layer is None:
            return
        new = self.seen - whole_layer.seen
        later = self.slots - new
        keys, values = self.keys[..., later:, :], self.values[..., later:, :]
        self.hold(whole_layer.keys, whole_layer.values, whole_layer.slot_positions, whole_layer.gapless)
        self.room, self.grew, self.numbers = whole_layer.room, whole_layer.grew, dict(whole_layer.numbers)
        self.whole_layer = None
        if new:  # not copied at every selection: the room that is made by the first lasts for several
            self.append(keys, values, _SPARE_OF_PARTS * new)

    def copy(self) -> CacheLayer:
        """Copy the layer as it is now. Both share their tensors, because every change creates new ones."""
        new = copy(self)
        new.numbers = dict(self.numbers)
        return new

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; transformers calls this in every attention layer.

        Raises:
            UnsupportedError: It is called outside of a block, where nothing says which tokens are real.
        """
        new = key_states.shape[-2]
        columns = self.upcoming
        self.upcoming = None
        if columns is None or columns.n_columns != new + (0 if self.columns is None else self.columns.n_columns):
            raise UnsupportedError(
                "this cache is used outside of the `with` in which it was filled, where nothing says which tokens are "
                "real: go on inside it, or start from a new cache"
            )
        self.columns = columns
        if new > 1 or not self.is_initialized:  # there may be padding among the new tokens
            gapless = self.gapless or not self.is_initialized
            self.gapless = gapless and columns.padded <= columns.n_columns - new
            self._holes = None
        if not self.is_initialized:
            super().update(key_states, value_states, *args, **kwargs)
            self.grew = True
        elif self.room is None and not self.grew:  # short, as a rule
            self.grew = self.keys.shape[-2] >= COPY_LIMIT
            self.keys = torch.cat([self.keys, key_states], -2)
            self.values = torch.cat([self.values, value_states], -2)
        else:
            self.append(key_states, value_states)
        return self.keys, self.values

    def append(self, keys: KeyTensor, values: ValueTensor, spare: int = 0) -> None:
        """Append keys and values: in place if those here are long and only grow, else all are copied.

        Args:
            keys: Keys to append.
            values: Values to append.
            spare: Number of further slots, if more tokens are certain to follow. With 0, room is made only when single
                tokens arrive.
        """
        slots = self.keys.shape[-2]
        more = keys.shape[-2]
        if self.room is None or not self.room.fits(self.keys, more):
            grows = spare > 0 or (more == 1 and self.grew)
            self.room = None
            self.grew = slots >= COPY_LIMIT
            if not self.grew or not grows or torch.is_grad_enabled():
                self.keys, self.values = torch.cat([self.keys, keys], -2), torch.cat([self.values, values], -2)
                return
            further = (0, 0, 0, max(spare, SPARE))
            self.room = SpareRoom(pad(self.keys, further), pad(self.values, further), slots)
        self.keys, self.values = self.room.append(keys, values)

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, including evicted ones; it determines the positions of new tokens."""
        return 0 if self.columns is None else self.columns.n_columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that a mask covers, and the offset of the first.

        An offset of 0 would show the future.
        """
        if self.columns is None:
            return int(query_length), 0
        if int(query_length) > 1:  # a prompt is read by the whole layer, for which a model may make masks before
            self.settle()
        slots = self.keys.shape[-2]
        return slots + int(query_length), self.columns.n_columns - slots

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
            count = columns.n_columns
            self._move_numbers(lambda numbers: numbers[..., :count])
            self.hold(self.keys[..., :count, :], self.values[..., :count, :], None, gapless=not columns.padded)
        else:
            last = pad(columns.pos, (1, 0), value=-1).amax(1)  # -1: nothing is left
            self.evict(self.pos <= last[:, None, None].to(self.keys.device))
        self.columns = columns

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows as beam search requests."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self.columns is not None:
            self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows, which may be repeated."""
        self.settle()
        if self.columns is None:
            return
        rows = indices.to(self.keys.device)
        pos = self.slot_positions
        if pos is not None:
            pos = pos[rows]
        self._move_numbers(lambda numbers: numbers[rows])
        self.hold(self.keys[rows], self.values[rows], pos, self.gapless)
        self.columns = TokenPositions.of(self.columns.pos[indices.to(self.columns.pos.device)])
        self.reordered = True


def places_without(
    slot: Int[Tensor, "*layers batch kv_head 1"], slots: int
) -> Int[Tensor, "*layers batch kv_head kept"]:
    """Return the places of all slots but one of every row and head, among those of all rows and heads of a layer."""
    places, number = _all_but_last(*slot.shape[1:3], slots, slot.device)
    return places + (number >= slot)


@lru_cache(4)  # the same for each token
def _all_but_last(batch: int, kv_heads: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Places of the slots before the last among those of all rows and heads, and within their own row and head."""
    places = torch.arange(batch * kv_heads * slots, device=device).view(batch, kv_heads, slots)
    return places[..., :-1], torch.arange(slots - 1, device=device)
