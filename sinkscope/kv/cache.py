"""A KV cache layer that records the true position of every token it holds, so that any token can be removed.

Stock layers assume that a slot's index is its position. After an eviction this is wrong: masks leak or hide tokens in
padded batches and in models with a sliding window, and rows cannot keep different tokens. Here every slot stores its
position, and attention masks are computed from these positions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.growing_tensor import GrowingTensor
from sinkscope.models.target import Target
from sinkscope.trace.attention import widened

_SPARE = 16  # as many times what was generated between two selections fits into a cache that is put back
_FIXED = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length


class Rotary:
    """Rotates a model's keys to other positions.

    Raises:
        UnsupportedError: The model has no rotary positions, its rotary frequencies change with the length, it has
            layers with a sliding window, or it is a TransformerBridge.
    """

    def __init__(self, target: Target) -> None:
        module: Any = getattr(target.base, "rotary_emb", None)
        frequencies: Any = getattr(module, "inv_freq", None)
        kinds = getattr(target.config, "layer_types", None)
        windows = getattr(target.config, "sliding_window", None) and (kinds is None or "sliding_attention" in kinds)
        fixed = getattr(module, "rope_type", "default") in _FIXED and frequencies is not None
        said = f"its frequencies ({getattr(module, 'rope_type', 'per layer')!r}) are not one fixed set"
        reasons = (
            (module is None, "it has no rotary positions"),
            (target.kind == "bridge", "a TransformerBridge applies positions itself; load it with backend='hf'"),
            (windows, "it has layers with a window, which counts true positions"),
            (not fixed, said),
        )
        if why := next((why for holds, why in reasons if holds), None):
            raise UnsupportedError(
                f'positions="rebased" does not work on {target.name}: {why}; use positions="original"',
                page="kv-session",
            )
        assert isinstance(frequencies, Tensor)
        self._frequencies = frequencies.float()

    def rebase(self, layer: int, kv: CacheLayer, keep: Bool[Tensor, "batch kv_head slot"]) -> None:
        """Rotate the keys of kept tokens to contiguous positions. Call it before `evict`."""
        held = kv.pos >= 0
        kept = keep & held
        # The earlier positions were contiguous too, because this rule made them.
        moved = (kept.cumsum(-1) - held.cumsum(-1)).where(kept, torch.zeros((), dtype=torch.long, device=kept.device))
        angle = moved[..., None].float() * self._frequencies.to(moved.device)
        cos, sin = angle.cos(), angle.sin()
        half = angle.shape[-1]
        a, b, rest = kv.keys.float().split([half, half, kv.keys.shape[-1] - 2 * half], -1)
        turned = torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
        # Keys stay in float32 from now on. They are rotated at every step, and in half precision errors would add up.
        kv.keys, kv.rebased = turned, True


COLUMNS: ContextVar[Tensor | None] = ContextVar("sinkscope_columns", default=None)
"""True position of every token of the current forward call, `[batch seen]`; None outside of a session."""
FLAGS = ("seen", "edited", "ragged", "rebased", "reorders")
"""The attributes that `CacheLayer.state` gives beside the tensors of a layer."""


class CacheLayer(DynamicLayer):
    """Keys and values of one layer, with positions.

    Attributes:
        keys: `[batch kv_head slot d_head]`.
        values: `[batch kv_head slot d_head]`.
        seen: Number of tokens appended so far (batch columns, including padding), whether or not they were evicted.
        edited: Whether any token was evicted or hidden, so that slot and position may differ.
        ragged: Whether rows or heads hold different numbers of tokens, so that there may be holes.
        reorders: How often rows were reordered (by beam search).
        rebased: Whether keys were rotated to contiguous positions, which new tokens then have to continue.
        aside: The whole layer, while this one works on a copy of some of its slots. None if this one is whole.
        whole: True if there are certainly no holes. If False, `holes` counts them.
    """

    # Both are None while the layer is empty, so `slots` has to be checked first.
    keys: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]
    values: Tensor  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self) -> None:
        super().__init__()
        self._clear()
        self.reorders = 0

    def _clear(self) -> None:
        self.seen = 0
        self.edited = self.ragged = self.rebased = self.whole = False
        self.aside: CacheLayer | None = None
        self._groups = 0  # query heads of a kv head, where each hides slots of its own; 0: they hide the same
        self._holes: Tensor | None = None  # [batch]
        self._columns: Tensor | None = None  # [batch seen]; shared between layers
        self._pos: Tensor | None = None  # [batch kv_head slot], of the slots that existed when it was last read
        # [batch kv_head slot], moves with the slots: "extra.NAME", and "hidden", a bit for each query head of a group
        self._side: dict[str, Tensor] = {}
        self._ungrown()

    def _ungrown(self) -> None:
        self._grow = {"keys": GrowingTensor(-2), "values": GrowingTensor(-2), "pos": GrowingTensor(-1)}

    @property
    def slots(self) -> int:
        """Number of slots in use, including holes."""
        return int(self.keys.shape[-2]) if self.is_initialized and self.keys.numel() else 0

    @property
    def pos(self) -> Int[Tensor, "batch kv_head slot"]:
        """True position of each slot among its row's real tokens; -1 for a hole or padding, which no query sees."""
        assert self._columns is not None
        rows, heads = self.keys.shape[:2]
        held = 0 if self._pos is None else self._pos.shape[-1]
        if (new := self.slots - held) or self._pos is None:
            columns = self._columns[:, self.seen - new : self.seen].to(self.keys.device)
            tail = columns[:, None].expand(rows, heads, new)
            if self._pos is None:
                return tail
            self._pos = self._grow["pos"].append(self._pos, tail)
        return self._pos

    @property
    def allocated(self) -> int:
        """Number of slots in memory: those in use plus room for new tokens."""
        return self._grow["keys"].allocated or self.slots

    def holes(self) -> Float[Tensor, " batch"]:
        """Number of empty slots of each row, averaged over kv heads; returns the same tensor until the next edit."""
        if self._holes is None:
            # New slots of single-token calls are never holes, so this is valid until the next edit.
            if self.whole:
                self._holes = torch.zeros(len(self.pos), device=self.pos.device)
            else:
                self._holes = (self.pos < 0).sum(-1).float().mean(1)
        return self._holes

    @property
    def hidden(self) -> Bool[Tensor, "batch _ slot"] | None:
        """Slots that are kept but not attended to (mode "select"), by kv head or by query head; None if none are."""
        if "hidden" not in self._side:
            return None
        held = self._grown("hidden")
        if not self._groups:
            return held
        bit = torch.arange(self._groups, device=held.device)[:, None]
        return (held[:, :, None] >> bit & 1).flatten(1, 2).bool()

    @property
    def readable(self) -> Bool[Tensor, "batch _ slot"]:
        """Slots whose token is not hidden, by kv head, or by query head if each query head hides its own."""
        held = self.pos >= 0
        return held if self.hidden is None else widened(held, self.hidden.shape[1]) & ~self.hidden

    def extra(self, name: str) -> Shaped[Tensor, "batch kv_head slot"]:
        """Numbers for each slot, such as the attention it received. They start at zero and move with the slots."""
        if f"extra.{name}" not in self._side:
            self.set_extra(name, torch.zeros(*self.keys.shape[:2], 0, device=self.keys.device))
        return self._grown(f"extra.{name}")

    def set_extra(self, name: str, values: Shaped[Tensor, "batch kv_head slot"]) -> None:
        """Replace the numbers that `extra(name)` gives."""
        self._side[f"extra.{name}"] = values

    def _grown(self, name: str) -> Tensor:
        """The numbers of all slots, with zeros for new slots."""
        held = self._side[name]
        if (new := self.slots - held.shape[-1]) > 0:
            held = self._side[name] = torch.nn.functional.pad(held, (0, new))
        return held

    def evict(self, keep: Bool[Tensor, "batch kv_head slot"], exact: int | None = None) -> None:
        """Free every slot that is not kept. Rows and heads may keep different numbers; shorter ones get holes.

        Args:
            keep: The slots that stay; holes and padding never stay.
            exact: Number of slots that every row and head keeps, if known. The call then does not wait for the device.
        """
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
                # A stable sort keeps the order of kept slots and moves them to the right, behind the others.
                order = torch.argsort(keep.to(torch.int8), dim=-1, stable=True)[..., slots - most :]
                begin = torch.arange(rows * heads, device=order.device) * slots
                flat = (order + begin.view(rows, heads, 1)).flatten()

            def taken(held: Tensor) -> Tensor:
                """Copy whole slots, which is ten times as fast as `gather`."""
                out = held.reshape(rows * heads * slots, *held.shape[3:]).index_select(0, flat)
                return out.view(rows, heads, most, *held.shape[3:])

            self._side = {name: taken(self._grown(name)) for name in self._side}
            self.keys, self.values, pos, keep = (taken(held) for held in (self.keys, self.values, pos, keep))
            self._ungrown()
        self._pos = torch.where(keep, pos, -1)
        self._holes = None
        self.edited, self.ragged, self.whole = True, most != least, most == least

    def select(self, show: Bool[Tensor, "batch _ slot"] | None) -> None:
        """Attend only to the slots in `show` and to new ones, until the next call; None shows all. Frees no slot.

        Args:
            show: One choice for each kv head, or one for each query head.
        """
        self._side.pop("hidden", None)
        self._groups = 0
        if show is not None and show.shape[1] == self.keys.shape[1]:
            self._side["hidden"] = ~show
        elif show is not None:
            self._groups = show.shape[1] // self.keys.shape[1]
            bit = torch.arange(self._groups, device=show.device)[:, None]
            self._side["hidden"] = ((~show).unflatten(1, (-1, self._groups)).long() << bit).sum(2)
        self.edited = self._pos is not None or show is not None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values; transformers calls this in every attention layer."""
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
        if self.slots:
            self.keys = self._grow["keys"].append(self.keys, key_states)
            self.values = self._grow["values"].append(self.values, value_states)
        else:
            super().update(key_states, value_states, *args, **kwargs)
            self._grow |= {"keys": GrowingTensor(-2, self.keys), "values": GrowingTensor(-2, self.values)}
        self.seen += new
        if new > 1:  # there may be padding among the new tokens
            self._holes, self.whole = None, False
            self.ragged = self.ragged or (self.edited and bool((self.pos < 0).any()))
        return self.keys, self.values

    def fill(self, keys: Tensor, values: Tensor, columns: Int[Tensor, "batch seen"]) -> None:
        """Take over the keys and values of a stock cache, with their true positions."""
        token = COLUMNS.set(columns)
        try:
            self.update(keys, values)
        finally:
            COLUMNS.reset(token)

    def state(self) -> tuple[dict[str, int], dict[str, Shaped[Tensor, ...]]]:
        """Return everything that `load_state` needs: flags and the layer's tensors, which are not copied.

        Tensors are "keys" and "values", "columns" `[batch seen]` (true position of every token that was appended), and,
        where they differ from the default, "pos", "hidden" and "extra.NAME" `[batch kv_head slot]`.
        """
        assert self._columns is not None
        tensors = {"keys": self.keys, "values": self.values, "columns": self._columns}
        tensors |= {"pos": self.pos} if self.edited else {}
        return {name: getattr(self, name) for name in FLAGS}, tensors | {name: self._grown(name) for name in self._side}

    def load_state(self, flags: Mapping[str, int], tensors: Mapping[str, Shaped[Tensor, ...]]) -> None:
        """Turn this layer into a copy of the one that returned this `state`.

        Raises:
            ValueError: The tensors do not fit each other.
        """
        keys, values, columns = (tensors[name] for name in ("keys", "values", "columns"))
        per_slot = {name: held for name, held in tensors.items() if name not in ("keys", "values", "columns")}
        shapes = {held.shape[:3] for held in (keys, values, *per_slot.values())}
        known = "pos" in tensors or keys.shape[2] == flags["seen"]
        if len(shapes) != 1 or columns.shape != (len(keys), flags["seen"]) or not known:
            raise ValueError(f"shapes that do not fit: {sorted(shapes)}, {tuple(columns.shape)}")
        self.reset()
        self.fill(keys, values, columns)
        vars(self).update({name: flags[name] for name in FLAGS}, _pos=per_slot.pop("pos", None), _side=per_slot)

    def copy(self) -> CacheLayer:
        """Copy the layer as it is now. Both share their tensors, because every change creates new ones."""
        new = CacheLayer()
        vars(new).update(vars(self), _side=dict(self._side))
        new._grow = {name: growing.copy() for name, growing in self._grow.items()}
        return new

    __copy__ = copy

    def work_on(self, keep: Bool[Tensor, "batch kv_head slot"]) -> None:
        """Hold only a copy of the kept slots until `settle` is called. Single tokens may be appended in the meantime.

        Hiding the other slots would save no time: every step would still copy all keys to append one, and read them all
        in order to mask most. With a copy, the cost of a step grows with the length of the copy; only restoring the
        whole layer costs time in proportion to its full length.
        """
        self.settle()
        whole = self.copy()
        self.evict(keep)
        self.aside = whole

    def put_back(self, whole: CacheLayer) -> None:
        """Restore the slots of `whole`, an earlier `copy`, followed by the tokens appended since."""
        new, slots = self.seen - whole.seen, self.slots
        held = self.keys[..., slots - new :, :], self.values[..., slots - new :, :]
        side = {name: self._grown(name)[..., slots - new :] for name in self._side}
        vars(self).update(vars(whole.copy()), seen=self.seen, _columns=self._columns, reorders=self.reorders)
        if not new:
            return
        for name, part in side.items():
            self._side.setdefault(name, part[..., :0])
            self._side[name] = torch.cat([self._grown(name), part], 2)
        # Not copied at every selection: the room that is made by the first lasts for several.
        for name, part in zip(("keys", "values"), held, strict=True):
            setattr(self, name, self._grow[name].append(getattr(self, name), part, _SPARE * new))

    def _counted(self, new: int, like: Tensor) -> Tensor:
        """Columns outside of a session, where all tokens count as real."""
        step = torch.arange(new, device=like.device).expand(like.shape[0], new)
        if self._columns is None:
            return step
        old = self._columns[:, : self.seen].to(like.device)
        return torch.cat([old, old.amax(1, keepdim=True) + 1 + step], 1)

    def get_seq_length(self) -> int:
        """Number of tokens seen, including evicted ones; it determines the positions of new tokens."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Number of keys that a mask covers, and the offset of the first; an offset of 0 would show the future."""
        return self.slots + int(query_length), self.seen - self.slots

    def settle(self) -> None:
        """Restore the whole layer if this one works on a part. Every operation except appending does this first."""
        if self.aside is not None:
            self.put_back(self.aside)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens. Tokens that were evicted earlier do not come back."""
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
            # Every token after the last column that stays is removed, and so are holes at the right end.
            last = self._columns[:, :left].amax(1) if left else self._columns.new_full((len(self._columns),), -1)
            stays = (self.pos >= 0) & (self.pos <= last.to(self.pos.device)[:, None, None])
            held = stays.flatten(0, 1).any(0).nonzero()
            keep = int(held.max()) + 1 if len(held) else 0
            self._pos = torch.where(stays, self.pos, -1)[..., :keep]
            self.ragged = bool((self._pos < 0).any())  # heads that keep different tokens lose different numbers
        self.keys, self.values = self.keys[..., :keep, :], self.values[..., :keep, :]
        self._side = {name: kept[..., :keep] for name, kept in self._side.items()}
        self.seen, self._columns, self._holes, self.whole = left, self._columns[:, :left], None, False

    def reset(self) -> None:
        """Make the layer empty, like a new one."""
        super().reset()
        vars(self).update(keys=None, values=None)  # some versions of transformers only set them to zero
        self.is_initialized = False
        self._clear()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows as beam search requests."""
        self._rows(lambda t: t.index_select(0, beam_idx.to(t.device)))
        self.reorders += 1

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        self._rows(lambda t: t.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only these rows."""
        self._rows(lambda t: t[indices.to(t.device)])

    def _rows(self, fn: Callable[[Tensor], Tensor]) -> None:
        self.settle()
        for name in ("keys", "values", "_columns", "_pos"):
            if (held := getattr(self, name)) is not None and (self.seen or name[0] == "_"):
                setattr(self, name, fn(held))
        self._side, self._holes = {name: fn(kept) for name, kept in self._side.items()}, None
        self._ungrown()


def adopt(cache: Any, n_layers: int, n_kv_heads: int, name: str, columns: Int[Tensor, "batch seen"]) -> None:
    """Replace the layers of a stock cache by ours in place, so that the caller's object works over several turns.

    Args:
        cache: An empty or filled `DynamicCache`.
        n_layers: Number of layers of the model.
        n_kv_heads: Number of kv heads of the model.
        name: Name of the model, for errors.
        columns: True positions of the tokens already in the cache; -1 at padding.

    Raises:
        UnsupportedError: The cache is of another kind, or belongs to another model.
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
    """Check that a filled cache has the model's shape."""
    heads = next((int(layer.keys.shape[1]) for layer in layers if layer.get_seq_length() > 0), n_kv_heads)
    if len(layers) != n_layers or heads != n_kv_heads:
        raise SinkscopeError(
            f"past_key_values has {len(layers)} layers of {heads} kv heads and {name} has {n_layers} of {n_kv_heads}: "
            "it is the cache of another model; pass a new one",
            page="kv-cache",
        )
