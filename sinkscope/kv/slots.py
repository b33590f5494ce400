"""Slots of keys and values that know their true positions, so that any token can be removed.

Stock layers assume that a slot's index is its position. After an eviction this is wrong: masks leak or hide tokens in
padded batches and in models with a sliding window, and rows cannot keep different tokens. Here every slot stores its
position, and attention masks are computed from these positions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.engine.step import TokenPositions

COPY_LIMIT = 512
"""Length from which a copy per token costs more than spare slots."""
SPARE = 64
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

    @property
    def allocated(self) -> int:
        """Number of slots."""
        return self.keys.shape[-2]

    def fits(self, keys: KeyTensor, more: int) -> bool:
        """Return whether `more` slots can be written after its keys, which nothing follows yet.

        They cannot under autograd, which needs the old values.
        """
        if torch.is_grad_enabled() or self.keys.is_inference() != torch.is_inference_mode_enabled():
            return False
        is_same = self.filled == keys.shape[-2] and keys.data_ptr() == self.keys.data_ptr()
        return is_same and self.filled + more <= self.allocated

    def append(self, keys: KeyTensor, values: ValueTensor) -> tuple[KeyTensor, ValueTensor]:
        """Return everything in it, with new keys and values at the end."""
        end = self.filled + keys.shape[-2]
        self.keys[..., self.filled : end, :] = keys
        self.values[..., self.filled : end, :] = values
        self.filled = end
        return self.keys[..., :end, :], self.values[..., :end, :]


class Slots:
    """What a policy sees of a layer's cache, and what it does to it.

    Attributes:
        keys: `[batch kv_head slot d_head]`.
        values: `[batch kv_head slot d_value]`.
        number: Number of the decoder layer.
        columns: All tokens appended, whether or not they were evicted; None if there are none. Layers share them.
        slot_positions: Positions of the slots that existed when they were last read; None while slots are columns,
            because no token was taken out.
        gapless: Whether there are certainly no holes. If not, `holes` counts them.
        numbers: Numbers for each slot, by name, without those of slots that came after they were last read (`extra`).
        room: Where keys and values are, if there are spare slots after them.
        grew: Whether they are what was appended to last, so that nothing was taken out since.
    """

    # Both are None while nothing was appended.
    keys: Tensor
    values: Tensor

    def __init__(self, number: int) -> None:
        self.number = number
        self.empty()

    def empty(self) -> None:
        """Forget all tokens."""
        self.columns: TokenPositions | None = None
        self.slot_positions: Int[Tensor, "batch kv_head known"] | None = None
        self.gapless = False
        self._holes: Float[Tensor, " batch"] | None = None
        self.numbers: dict[str, Shaped[Tensor, "batch kv_head known"]] = {}
        self.room: SpareRoom | None = None
        self.grew = False

    @property
    def seen(self) -> int:
        """Number of tokens appended so far (batch columns, including padding), whether or not they were evicted."""
        if self.columns is None:
            return 0
        return self.columns.seen

    @property
    def edited(self) -> bool:
        """Whether any token was evicted, so that slot and position may differ."""
        return self.slot_positions is not None

    @property
    def slots(self) -> int:
        """Number of slots in use, including holes."""
        if self.columns is None:
            return 0
        return self.keys.shape[-2]

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
        latest = self.columns.pos[:, self.columns.seen - new :].to(self.keys.device)
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

    def extra(self, name: str) -> Shaped[Tensor, "batch kv_head slot"]:
        """Return numbers for each slot, such as the attention it received.

        They start at zero and move with the slots.
        """
        if name not in self.numbers:
            self.numbers[name] = torch.zeros(*self.keys.shape[:2], 0, device=self.keys.device)
        new = self.keys.shape[-2] - self.numbers[name].shape[-1]
        if new > 0:
            self.numbers[name] = torch.nn.functional.pad(self.numbers[name], (0, new))
        return self.numbers[name]

    def moved_numbers(self, move: Callable[[Tensor], Tensor]) -> dict[str, Shaped[Tensor, "batch kv_head slot"]]:
        """Return the numbers of other slots or rows, as a function takes them from those of all slots."""
        return {name: move(self.extra(name)) for name in list(self.numbers)}

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
        if most == fewest == pos.shape[-1]:
            self.hold(self.keys, self.values, pos)
            return
        index = flat_slots(keep, most, ragged=most != fewest)
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
        here = stays.to(pos.device)[:, None].expand(-1, pos.shape[1], -1)
        self.evict((pos >= 0) & here.gather(2, pos.clamp(min=0)))

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


def flat_slots(keep: Bool[Tensor, "batch kv_head slot"], most: int, ragged: bool) -> Int[Tensor, "batch kv_head kept"]:
    """Return indices among all slots of all rows and heads: `most` of each, the kept ones last."""
    batch, kv_heads, slots = keep.shape
    if not ragged:
        return torch.nonzero_static(keep.flatten(), size=batch * kv_heads * most).view(batch, kv_heads, most)
    # A stable sort keeps the order of kept slots and moves them to the right, after the others.
    order = torch.argsort(keep.to(torch.int8), dim=-1, stable=True)[..., slots - most :]
    starts = torch.arange(batch * kv_heads, device=order.device) * slots
    return order + starts.view(batch, kv_heads, 1)
