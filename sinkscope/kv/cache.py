"""A KV cache layer that records the true position of every token it holds, so that any token can be removed.

Stock layers assume that a slot's index is its position. After an eviction this is wrong: masks leak or hide tokens in
padded batches and in models with a sliding window, and rows cannot keep different tokens. Here every slot stores its
position, and attention masks are computed from these positions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from copy import copy
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.hooks.edit.positions import Columns
from sinkscope.kv.growing_tensor import GrowingTensor, appended

_SPARE = 16  # as many times what was generated between two selections fits into a cache that is put back

COLUMNS: ContextVar[Columns | None] = ContextVar("sinkscope_columns", default=None)
"""All tokens so far in the current forward call; None outside of a session."""


class CacheLayer(DynamicLayer):
    """Keys and values of one layer, with positions.

    It is empty, untouched, edited or a part (docs/kv_states.md); what it holds follows from the fields below.

    Attributes:
        keys: `[batch kv_head slot d_head]`.
        values: `[batch kv_head slot d_head]`.
        number: Number of the decoder layer.
        reordered: Whether rows were reordered (by beam search) since the last prompt.
        gapless: Whether there are certainly no holes. If not, `holes` counts them.
        aside: The whole layer, while this one works on a copy of some of its slots. None if this one is whole.
        numbers: Numbers for each slot, by name, without those of slots that came after they were last read (`extra`).
        rooms: The room for new tokens after long keys, values and positions; none where these become other tensors.
    """

    # Both are None while the layer is empty, so `slots` has to be checked first.
    keys: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    values: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number
        self.reordered = False
        self.aside: CacheLayer | None = None
        self._columns: Columns | None = None  # all tokens appended; shared between layers
        # Of the slots that existed when it was last read; None where slots are columns, because none was taken out.
        self._pos: Int[Tensor, "batch kv_head slot"] | None = None
        self.gapless = False
        self._holes: Float[Tensor, " batch"] | None = None
        self.numbers: dict[str, Shaped[Tensor, "batch kv_head known"]] = {}
        self.rooms: dict[str, GrowingTensor] = {}

    # What the layer holds ------------------------------------------------------------------------------------------

    @property
    def seen(self) -> int:
        """Number of tokens appended so far (batch columns, including padding), whether or not they were evicted."""
        if self._columns is None:
            return 0
        return self._columns.seen

    @property
    def edited(self) -> bool:
        """Whether any token was evicted, so that slot and position may differ."""
        return self._pos is not None

    @property
    def slots(self) -> int:
        """Number of slots in use, including holes."""
        if not self.is_initialized:
            return 0
        return int(self.keys.shape[-2])

    @property
    def pos(self) -> Int[Tensor, "batch kv_head slot"]:
        """True position of each slot among its row's real tokens; -1 for a hole or padding, which no query sees."""
        slots = self.keys.shape[-2]
        if self._pos is None:
            return self.new_pos(slots)
        known = self._pos.shape[-1]
        if known < slots:
            self._pos = appended(self.rooms, "pos", self._pos, self.new_pos(slots - known), -1)
        return self._pos

    def known_pos(self) -> Int[Tensor, "batch kv_head known"]:
        """The positions of the slots that existed when they were last read, of which there may be none."""
        if self._pos is None:
            return self.pos
        return self._pos

    def known_shapes(self) -> dict[str, torch.Size]:
        """Shapes of the positions and numbers that are stored."""
        shapes = {name: numbers.shape for name, numbers in self.numbers.items()}
        if self._pos is not None:
            shapes[""] = self._pos.shape
        return shapes

    def new_pos(self, new: int) -> Int[Tensor, "batch kv_head slot"]:
        """True positions of the newest slots."""
        # "batch slot -> batch kv_head slot" as a view: where all heads hold the same, masks are computed once.
        return self.latest_pos(new)[:, None].expand(-1, self.keys.shape[1], -1)

    def latest_pos(self, new: int) -> Int[Tensor, "batch token"]:
        """True positions of the newest tokens."""
        assert self._columns is not None
        return self._columns.latest(new).to(self.keys.device)

    def holes(self) -> Float[Tensor, " batch"]:
        """Number of empty slots of each row, averaged over kv heads; the same tensor until the next edit."""
        # New slots of single-token calls are never holes, so this is valid until the next edit.
        if self._holes is None:
            self._holes = (self.pos < 0).sum(-1).float().mean(1)
        return self._holes

    def extra(self, name: str) -> Shaped[Tensor, "batch kv_head slot"]:
        """Numbers for each slot, such as the attention it received. They start at zero and move with the slots."""
        if name not in self.numbers:
            rows, kv_heads, _ = self.pos.shape  # more rows than the keys have, if layers are joined
            self.numbers[name] = torch.zeros(rows, kv_heads, 0, device=self.keys.device)
        new = self.keys.shape[-2] - self.numbers[name].shape[-1]
        if new > 0:
            self.numbers[name] = torch.nn.functional.pad(self.numbers[name], (0, new))
        return self.numbers[name]

    def _forget_holes(self, gapless: bool) -> None:
        self._holes = None
        self.gapless = gapless

    # What policies do ------------------------------------------------------------------------------------------------

    def evict(self, keep: Bool[Tensor, "batch kv_head slot"], exact: int | None = None) -> None:
        """Free every slot that is not kept. Rows and heads may keep different numbers; shorter ones get holes.

        Args:
            keep: The slots that stay; holes and padding never stay.
            exact: Number of slots that every row and head keeps, if known. The call then does not wait for the device.
        """
        pos = self.pos
        if not self.gapless:
            keep = keep & (pos >= 0)
        if exact is None:
            fewest, most = torch.stack(keep.sum(-1).aminmax()).tolist()
        else:
            fewest = most = exact
        ragged = most != fewest
        keys, values = self.keys, self.values
        if most < pos.shape[-1]:
            index = flat_slots(keep, most, ragged)
            pos = pos.take(index)
            if ragged:
                keep = keep.take(index)
            self.numbers = moved_numbers(self, lambda numbers: numbers.take(index))
            # Whole slots, which is ten times as fast as `gather`.
            keys = torch.embedding(keys.flatten(0, 2), index)
            values = torch.embedding(values.flatten(0, 2), index)
        if ragged:
            pos = torch.where(keep, pos, -1)
        self.hold(keys, values, pos, gapless=not ragged)

    def hold(
        self,
        keys: Float[Tensor, "batch kv_head slot d_head"],
        values: Float[Tensor, "batch kv_head slot d_value"],
        pos: Int[Tensor, "batch kv_head slot"],
        gapless: bool = True,
    ) -> None:
        """Hold other keys and values, at these true positions."""
        if keys is not self.keys:
            self.rooms = {}
        self.keys = keys
        self.values = values
        self._pos = pos
        self._forget_holes(gapless)

    def settle(self) -> None:
        """Restore the whole layer, followed by the tokens appended since, if this one works on a part.

        Every operation except appending does this first.
        """
        whole = self.aside
        if whole is None:
            return
        new = self.seen - whole.seen
        first_new = self.slots - new
        new_keys = self.keys[..., first_new:, :]
        new_values = self.values[..., first_new:, :]
        later = moved_numbers(self, lambda numbers: numbers[..., first_new:])
        columns = self._columns
        vars(self).update(vars(whole.copy()))
        self._columns = columns
        for name, numbers in later.items():
            self.numbers[name] = torch.cat([self.extra(name), numbers], -1)
        if new:  # not copied at every selection: the room that is made by the first lasts for several
            self._append(new_keys, new_values, _SPARE * new)

    def _append(self, keys: Tensor, values: Tensor, spare: int = 0) -> None:
        self.keys = appended(self.rooms, "keys", self.keys, keys, -2, spare)
        self.values = appended(self.rooms, "values", self.values, values, -2, spare)

    def copy(self) -> CacheLayer:
        """Copy the layer as it is now. Both share their tensors, because every change creates new ones."""
        new = copy(self)
        new.numbers = dict(self.numbers)
        new.rooms = {name: room.copy() for name, room in self.rooms.items()}
        return new

    # What transformers calls -----------------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; transformers calls this in every attention layer."""
        columns = COLUMNS.get()
        if columns is None:
            columns = _columns_without_session(self, key_states)
        self._columns = columns
        new = key_states.shape[-2]
        if new > 1 or not self.is_initialized:  # there may be padding among the new tokens
            gapless = self.gapless or not self.is_initialized
            self._forget_holes(gapless and bool((columns.latest(new) >= 0).all()))
        if self.is_initialized:
            self._append(key_states, value_states)
        else:
            super().update(key_states, value_states, *args, **kwargs)
            self.rooms = {"keys": GrowingTensor(-2, self.keys), "values": GrowingTensor(-2, self.values)}
        return self.keys, self.values

    def get_seq_length(self) -> int:
        """Number of tokens seen, including evicted ones; it determines the positions of new tokens."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a mask covers, and the offset of the first; an offset of 0 would show the future."""
        return self.slots + int(query_length), self.seen - self.slots

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens. Tokens that were evicted earlier do not come back."""
        removed = -int(tokens_to_remove)  # a tensor in some versions of transformers
        if removed < 0:
            raise SinkscopeError(f"crop({-removed}): give minus the number of tokens to remove")
        self.settle()
        if removed == 0 or self._columns is None:
            return
        if removed >= self.seen:
            self.reset()
            return
        columns = self._columns.pos[:, : self.seen - removed]
        if self._pos is None:  # slots are columns
            self.keys = self.keys[..., : columns.shape[1], :]
            self.values = self.values[..., : columns.shape[1], :]
            self.numbers = moved_numbers(self, lambda numbers: numbers[..., : columns.shape[1]])
            self.rooms = {}
            self._forget_holes(gapless=bool((columns >= 0).all()))
        else:
            last = torch.nn.functional.pad(columns, (1, 0), value=-1).amax(1)  # -1: nothing is left
            self.evict(self.pos <= last[:, None, None].to(self.keys.device))
        self._columns = Columns.of(columns)

    def reset(self) -> None:
        """Make the layer empty, like a new one."""
        self.__init__(self.number)  # what it inherits only sets keys to zero in some versions of transformers

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows as beam search requests."""
        self._change_rows(lambda rows: rows.index_select(0, beam_idx.to(rows.device)))
        self.reordered = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._change_rows(lambda rows: rows.repeat_interleave(repeats, 0))  # "row ... -> (row repeats) ..."

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._change_rows(lambda rows: rows[indices.to(rows.device)])

    def _change_rows(self, changed: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        if self._columns is not None:
            self.keys = changed(self.keys)
            self.values = changed(self.values)
            self._columns = Columns.of(changed(self._columns.pos))
        if self._pos is not None:
            self._pos = changed(self._pos)
        self.numbers = moved_numbers(self, changed)
        self._forget_holes(self.gapless)
        self.rooms = {}


def moved_numbers(
    layer: CacheLayer, move: Callable[[Tensor], Tensor]
) -> dict[str, Shaped[Tensor, "batch kv_head slot"]]:
    """The numbers of other slots or rows, as a function takes them from those of all slots."""
    moved: dict[str, Tensor] = {}
    for name in layer.numbers:
        moved[name] = move(layer.extra(name))
    return moved


def flat_slots(keep: Bool[Tensor, "batch kv_head slot"], most: int, ragged: bool) -> Int[Tensor, "batch kv_head kept"]:
    """Indices among all slots of all rows and heads: `most` of each, the kept ones last."""
    batch, kv_heads, slots = keep.shape
    if not ragged:
        return torch.nonzero_static(keep.flatten(), size=batch * kv_heads * most).view(batch, kv_heads, most)
    # A stable sort keeps the order of kept slots and moves them to the right, after the others.
    order = torch.argsort(keep.to(torch.int8), dim=-1, stable=True)[..., slots - most :]
    head_starts = torch.arange(batch * kv_heads, device=order.device) * slots
    starts = rearrange(head_starts, "(batch kv_head) -> batch kv_head 1", batch=batch)
    return order + starts


def _columns_without_session(layer: CacheLayer, keys: Float[Tensor, "batch kv_head new d_head"]) -> Columns:
    """The tokens before and the new ones outside of a session, where all tokens count as real.

    Raises:
        UnsupportedError: Tokens were evicted.
    """
    if layer.edited:
        raise UnsupportedError(
            "this cache had tokens evicted and is used outside of the `with` that did it: stock masks would be wrong; "
            "go on inside it, or start from a new cache",
            page="kv-session",
        )
    earlier = torch.zeros(len(keys), 0, dtype=torch.int64, device=keys.device)
    if layer.seen:
        earlier = layer.new_pos(layer.seen)[:, 0]
    return Columns.of(earlier).read(keys.shape[-2], None)
