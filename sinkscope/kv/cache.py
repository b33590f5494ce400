"""A layer of a KV cache that knows the true position of everything it holds, so that anything may be taken out of it.

Stock layers take a slot's number for its position. After an eviction that is wrong: masks leak or hide tokens on padded
batches and on models with a window, and rows that keep different tokens do not fit at all. Here every slot carries its
position, and whoever attends asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.kv import room
from sinkscope.kv.room import Room

COLUMNS: ContextVar[Tensor | None] = ContextVar("sinkscope_columns", default=None)
"""True position of every token of the running forward call `[batch seen]`; None outside of a session."""


class CacheLayer(DynamicLayer):
    """Keys and values of one layer, with positions.

    Attributes:
        keys: `[batch kv_head slot d_head]`.
        values: `[batch kv_head slot d_head]`.
        seen: tokens (columns of the batch, padding included) that went in, evicted or not.
        edited: something was evicted or hidden, so that slot and position differ.
        ragged: rows or heads hold different numbers of tokens, so that there may be holes.
        reorders: how often rows changed places (beam search).
        rebased: keys were rotated to positions without gaps, and new tokens have to follow them.
        before_edit: called by `settle`, before anything but appending happens; a policy may have put parts aside.
        aside: what it has put aside: the layer as it was, while this one works on a copy of a part; None: nothing.
        whole: known to have no holes; if not, `holes` counts them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        self.edited = False
        self.ragged = False
        self.reorders = 0
        self.rebased = False
        self.whole = False
        self.before_edit: Callable[[CacheLayer], None] | None = None
        self.aside: CacheLayer | None = None
        self._holes: Tensor | None = None  # [batch]
        self._columns: Tensor | None = None  # [batch seen]; shared between layers
        self._pos: Tensor | None = None  # [batch kv_head slot], of the slots that were there at the last edit
        self._hidden: Tensor | None = None
        self._room: Room | None = None  # of which keys and values are views
        self._latest: Tensor | None = None  # keys after the last append: the same object, if nothing was done since
        self._extra: dict[str, Tensor] = {}

    @property
    def slots(self) -> int:
        """Places in use, holes included."""
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys is not None and self.keys.numel() else 0

    @property
    def pos(self) -> Int[Tensor, "batch kv_head slot"]:
        """True position of each slot among the real tokens of its row; -1: a hole or padding, which nothing sees."""
        assert self._columns is not None and self.keys is not None
        rows, heads = self.keys.shape[:2]
        slots = self.slots
        if self._pos is None:
            columns = self._columns[:, self.seen - slots : self.seen]
            return columns.to(self.keys.device)[:, None].expand(rows, heads, slots)
        if (new := slots - self._pos.shape[-1]) > 0:
            tail = self._columns[:, self.seen - new : self.seen].to(self._pos.device)
            self._pos = torch.cat([self._pos, tail[:, None].expand(rows, heads, new)], -1)
        return self._pos

    @property
    def allocated(self) -> int:
        """Places in memory: those in use, and room for tokens to come."""
        return self.slots if self._room is None else self._room.slots

    def holes(self) -> Float[Tensor, " batch"]:
        """Slots of a row that hold no token, mean over kv heads; the same tensor until the next edit."""
        if self._holes is None:
            # New slots of single-token calls are never holes, so this stands until the next edit.
            if self.whole:
                self._holes = torch.zeros(len(self.pos), device=self.pos.device)
            else:
                self._holes = (self.pos < 0).sum(-1).float().mean(1)
        return self._holes

    @property
    def hidden(self) -> Bool[Tensor, "batch kv_head slot"] | None:
        """Slots that are there but not attended to (select); None: none."""
        return None if self._hidden is None else self._grown(self._hidden)

    @property
    def readable(self) -> Bool[Tensor, "batch kv_head slot"]:
        """Slots that hold a token which is not hidden."""
        return self.pos >= 0 if self._hidden is None else (self.pos >= 0) & ~self._grown(self._hidden)

    def extra(self, name: str) -> Shaped[Tensor, "batch kv_head slot"]:
        """Numbers kept per slot (for example attention received); zero for new slots. They move with the slots."""
        assert self.keys is not None
        if name not in self._extra:
            self._extra[name] = torch.zeros(*self.keys.shape[:2], 0, device=self.keys.device)
        self._extra[name] = self._grown(self._extra[name])
        return self._extra[name]

    def set_extra(self, name: str, values: Shaped[Tensor, "batch kv_head slot"]) -> None:
        """Replace the numbers of `extra(name)`."""
        self._extra[name] = values

    def _grown(self, values: Tensor) -> Tensor:
        return torch.nn.functional.pad(values, (0, self.slots - values.shape[-1]))

    def evict(self, keep: Bool[Tensor, "batch kv_head slot"], exact: int | None = None) -> None:
        """Free everything that is not kept. Rows and heads may keep different numbers: shorter ones get holes.

        Args:
            keep: what stays; holes and padding never do.
            exact: every row and head keeps exactly this many; spares waiting for the device.
        """
        assert self.keys is not None and self.values is not None
        pos = self.pos
        keep = keep & (pos >= 0)
        if exact is None:
            most, least = (int(n) for n in torch.stack(keep.sum(-1).aminmax()[::-1]).tolist())
        else:
            most = least = exact
        if most < pos.shape[-1]:
            rows, heads, slots = pos.shape
            if most == least:
                flat = torch.nonzero_static(keep.flatten(), size=rows * heads * most).flatten()
            else:
                # Stable, so that what is kept stays in order, at the right; what is not kept comes before it.
                order = torch.argsort(keep.to(torch.int8), dim=-1, stable=True)[..., slots - most :]
                begin = torch.arange(rows * heads, device=order.device) * slots
                flat = (order + begin.view(rows, heads, 1)).flatten()

            def taken(held: Tensor) -> Tensor:
                """By whole slots: ten times as fast as `gather`."""
                out = held.reshape(rows * heads * slots, *held.shape[3:]).index_select(0, flat)
                return out.view(rows, heads, most, *held.shape[3:])

            self._extra = {name: taken(self._grown(kept)) for name, kept in self._extra.items()}
            self._hidden = None if self._hidden is None else taken(self._grown(self._hidden))
            self.keys, self.values, self._room = taken(self.keys), taken(self.values), None
            pos, keep = taken(pos), taken(keep)
        self._pos = torch.where(keep, pos, -1)
        self._holes = None
        self.edited, self.ragged, self.whole = True, most != least, most == least

    def select(self, show: Bool[Tensor, "batch kv_head slot"] | None) -> None:
        """Attend only to what is shown, until told otherwise; nothing is freed. New slots are shown. None: to all."""
        self._hidden = None if show is None else ~show
        self.edited = self._pos is not None or self._hidden is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append; what transformers calls in every attention layer."""
        columns = COLUMNS.get()
        new = int(key_states.shape[-2])
        if columns is None:
            if self.edited:
                raise UnsupportedError(
                    "this cache had tokens evicted or hidden and is used outside of the `with` that did it: stock "
                    "masks would be wrong; go on inside it, or start from a new cache",
                    page="kv-session",
                )
            columns = self._counted(new, key_states)
        self._columns = columns
        self.seen += new
        held = self._append(key_states, value_states, *args, **kwargs)
        if new > 1:  # padding may have come in
            self._holes, self.whole = None, False
            self.ragged = self.ragged or (self.edited and bool((self.pos < 0).any()))
        return held

    def _append(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """To what is held: without copying it for every token, where it is long and only grows."""
        new, held = int(keys.shape[-2]), self.keys
        if held is None or self.values is None or not self.slots or torch.is_grad_enabled():
            self._room = None  # a gradient, if only of the queries, needs what it was computed with as it was
        elif self._room is None or not self._room.fits(held, self.values, new):
            grows = new == 1 and self.slots >= room.FROM and held is self._latest  # nothing was taken out since
            self._room = Room.of(held, self.values) if grows else None
        if self._room is not None:
            self.keys, self.values = self._room.append(keys, values)
        else:
            super().update(keys, values, *args, **kwargs)
        self._latest = self.keys
        assert self.keys is not None and self.values is not None
        return self.keys, self.values

    def fill(self, keys: Tensor, values: Tensor, columns: Int[Tensor, "batch seen"]) -> None:
        """Take over what a stock cache holds, and the true positions of it."""
        token = COLUMNS.set(columns)
        try:
            self.update(keys, values)
        finally:
            COLUMNS.reset(token)

    def _counted(self, new: int, like: Tensor) -> Tensor:
        """Columns when no session tells: all tokens are real."""
        step = torch.arange(new, device=like.device).expand(like.shape[0], new)
        if self._columns is None:
            return step
        old = self._columns[:, : self.seen].to(like.device)
        return torch.cat([old, old.amax(1, keepdim=True) + 1 + step], 1)

    def get_seq_length(self) -> int:
        """Tokens seen, whatever was evicted: positions of new tokens follow from it."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys that a mask has to cover, and the offset of the first; an offset of 0 would show the future."""
        return self.slots + int(query_length), self.seen - self.slots

    def settle(self) -> None:
        """Hold everything again that a policy has put aside."""
        if self.before_edit is not None:
            self.before_edit(self)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens. What was evicted before does not come back."""
        tokens_to_remove = int(tokens_to_remove)  # a tensor in some versions of transformers
        if tokens_to_remove > 0:
            raise SinkscopeError(f"crop({tokens_to_remove}): give minus the number of tokens to remove")
        self.settle()
        if tokens_to_remove == 0 or not self.is_initialized or self._columns is None:
            return
        left = max(0, self.seen + tokens_to_remove)
        if self._pos is None:
            keep = max(0, self.slots - (self.seen - left))
        else:
            # Of what is held, all that comes after the last column that stays; holes at the right end go too.
            last = self._columns[:, :left].amax(1) if left else self._columns.new_full((len(self._columns),), -1)
            stays = (self.pos >= 0) & (self.pos <= last.to(self.pos.device)[:, None, None])
            held = stays.flatten(0, 1).any(0).nonzero()
            keep = int(held.max()) + 1 if len(held) else 0
            self._pos = torch.where(stays, self.pos, -1)[..., :keep]
            self.ragged = bool((self._pos < 0).any())  # heads that keep different tokens lose different numbers
        assert self.keys is not None and self.values is not None
        self.keys, self.values = self.keys[..., :keep, :], self.values[..., :keep, :]
        self._extra = {name: kept[..., :keep] for name, kept in self._extra.items()}
        self._hidden = None if self._hidden is None else self._hidden[..., :keep]
        self.seen, self._columns, self._holes, self.whole = left, self._columns[:, :left], None, False

    def reset(self) -> None:
        """Empty, as new."""
        super().reset()
        self.before_edit = self.aside = None
        self.keys = self.values = None  # some versions of transformers only set them to zero
        self.is_initialized = False
        self.seen, self.edited, self.ragged, self.rebased, self.whole = 0, False, False, False, False
        self._columns = self._pos = self._hidden = self._holes = self._room = self._latest = None
        self._extra = {}

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take rows in the order that beam search wants."""
        self.settle()
        super().reorder_cache(cast(Any, beam_idx))
        self.reorders += 1
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        self.settle()
        super().batch_repeat_interleave(repeats)
        self._rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self.settle()
        super().batch_select_indices(indices)
        self._rows(lambda t: t[indices.to(t.device)])

    def _rows(self, fn: Any) -> None:
        self._columns = None if self._columns is None else fn(self._columns)
        self._pos = None if self._pos is None else fn(self._pos)
        self._hidden = None if self._hidden is None else fn(self._hidden)
        self._holes = self._room = None
        self._extra = {name: fn(kept) for name, kept in self._extra.items()}


def adopt(cache: Any, n_layers: int, n_kv_heads: int, name: str, columns: Int[Tensor, "batch seen"]) -> None:
    """Make the layers of a stock cache ours, in place: the caller's own object goes on to work, over several turns.

    Args:
        cache: an empty or filled `DynamicCache`.
        n_layers: of the model.
        n_kv_heads: of the model.
        name: of the model, for errors.
        columns: true positions of the tokens that the cache has seen; -1 at padding.

    Raises:
        UnsupportedError: another kind of cache, or one of another model.
    """
    layers = getattr(cache, "layers", None)
    if layers is not None and layers and all(type(layer) is CacheLayer for layer in layers):
        _check(layers, n_layers, n_kv_heads, name)
        return
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        kind = "an offloading cache" if getattr(cache, "offloading", False) else type(cache).__name__
        raise UnsupportedError(
            f"past_key_values is {kind}: a cache policy needs a plain DynamicCache; pass `DynamicCache()` or nothing",
            page="kv-cache",
        )
    filled = cache.get_seq_length() > 0
    if filled:
        odd = next((layer for layer in cache.layers if type(layer) is not DynamicLayer), None)
        if odd is not None:
            raise UnsupportedError(
                f"past_key_values already holds tokens in a {type(odd).__name__}, which may have dropped some: start "
                "with an empty cache inside the `with`",
                page="kv-cache",
            )
        _check(cache.layers, n_layers, n_kv_heads, name)
    ours: list[Any] = []
    for i in range(n_layers):
        layer = CacheLayer()
        if filled:
            old: Any = cache.layers[i]
            layer.fill(old.keys, old.values, columns)
        ours.append(layer)
    cache.layers = ours
    cache.layer_class_to_replicate = None


def _check(layers: Any, n_layers: int, n_kv_heads: int, name: str) -> None:
    """A filled cache must have the shape of the model."""
    heads = next((int(layer.keys.shape[1]) for layer in layers if layer.get_seq_length() > 0), n_kv_heads)
    if len(layers) != n_layers or heads != n_kv_heads:
        raise SinkscopeError(
            f"past_key_values has {len(layers)} layers of {heads} kv heads and {name} has {n_layers} of {n_kv_heads}: "
            "it is the cache of another model; pass a new one",
            page="kv-cache",
        )
