"""What a cache was given and what it hands to the attention, seen at `Cache.update` alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.models.draws import draws

_ROUNDED = 0.05  # of the deviation of the numbers: a key that changes more is rotated
_SAME = 0.02  # of the spread of the numbers: closer keys or values are the same but for rounding

Pair = tuple[Float[Tensor, "row kv_head _ d_head"], Float[Tensor, "row kv_head _ d_head"]]
"""Keys and values."""
_TIE = 1e-6  # weight of the keys: they tell tokens with the same values apart


class CacheRecorder:
    """Notes the keys and values that go into a cache, and which of them each call reads.

    Slots are recognized by their values, which no rotation changes. A slot is visible if the logits change with its
    values: gradients say so whatever mask was applied, and by whom.

    Args:
        cache: The cache; its method `update` is watched as long as it lives.

    Attributes:
        sees: Which columns each layer's queries saw, in the calls that were read.
        rotated_again: Whether keys were handed out that were never written.
        changed: Largest change of a key or value that is no rotation, as a share of the spread of the numbers.
        fewest_slots: The fewest slots that a layer handed out, less the columns that were written.
        misplaced: What a layer says of the position of a token, where that is wrong; empty while all is right.
        placed: How often a layer said positions.
        apart: Which slot holds the key of one token and the value of another; empty if none does.
    """

    def __init__(self, cache: Any) -> None:
        self.sees: dict[int, Bool[Tensor, "row kv_head query key"]] = {}
        self.rotated_again = False
        self.changed = 0.0
        self.fewest_slots = 0
        self.misplaced = ""
        self.placed = 0
        self.apart = ""
        self._written: dict[int, Pair] = {}
        self._handed: dict[int, Pair] = {}
        self._cache: Any = None
        self.follow(cache)

    def follow(self, cache: Any) -> None:
        """Watch this cache from now on, which holds what was written so far, and no other."""
        self.leave()
        self._cache = cache
        self._update = cache.update
        cache.update = self._note

    def leave(self) -> None:
        """Watch no cache: it can then be copied."""
        if self._cache is not None:
            vars(self._cache).pop("update", None)
        self._cache = None

    def _note(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        new = key_states.detach(), value_states.detach()
        keys, values = self._update(*new, layer_idx, *args, **kwargs)
        before = self._written.get(layer_idx)
        if before is not None:
            new = torch.cat([before[0], new[0]], 2), torch.cat([before[1], new[1]], 2)
        self._written[layer_idx] = new
        self.fewest_slots = min(self.fewest_slots, keys.shape[2] - new[0].shape[2])
        handed = keys.detach(), values.detach().requires_grad_()
        self._handed[layer_idx] = handed
        return handed

    def keep(self, columns: int) -> None:
        """Forget all but the first columns, as the cache was told to."""
        self._change(lambda states: states[:, :, :columns])
        for layer, sees in self.sees.items():
            self.sees[layer] = sees[:, :, :columns, :columns]

    def take(self, rows: Int[Tensor, " taken"]) -> None:
        """Let the rows be others of the batch, as the cache was told to."""
        self._change(lambda states: states[rows])
        for layer, sees in self.sees.items():
            self.sees[layer] = sees[rows]

    def clear(self) -> None:
        """Forget all tokens."""
        self._written.clear()
        self.sees.clear()

    def _change(self, changed: Callable[[Tensor], Tensor]) -> None:
        for layer, (keys, values) in list(self._written.items()):
            self._written[layer] = changed(keys), changed(values)

    def read(
        self,
        logits: Float[Tensor, "row query vocab"],
        positions: Int[Tensor, "row column"],
        mask: Bool[Tensor, "row column"],
    ) -> None:
        """Note what each layer read in the call that gave these logits.

        Args:
            logits: The logits of the last columns.
            positions: True position of each column so far.
            mask: Whether a column is a real token.
        """
        total = positions.shape[1]
        start = total - logits.shape[1]
        draw = torch.randn(logits.shape, generator=draws(0, "weights of logits"), device="cpu")
        (logits.float() * draw.to(logits.device)).sum().backward()
        for layer, (keys, values) in self._handed.items():
            columns, visible = self._recognized(layer, keys, values, mask)
            if not self.apart:
                self._compare_positions(layer, columns, visible, positions)
            rows, heads, _ = columns.shape
            seen = torch.zeros(rows, heads, total + 1, dtype=torch.bool)  # with a place for what is hidden
            seen.scatter_(2, columns.where(visible, total), True)
            before = self.sees.get(layer, torch.zeros(rows, heads, 0, 0, dtype=torch.bool))
            sees = torch.nn.functional.pad(before, (0, total - before.shape[3], 0, total - before.shape[2]))
            sees[:, :, start:] = seen[:, :, None, :total]
            self.sees[layer] = sees
        self._handed.clear()

    def _recognized(
        self, layer: int, keys: Tensor, values: Tensor, mask: Bool[Tensor, "row column"]
    ) -> tuple[Int[Tensor, "row kv_head slot"], Bool[Tensor, "row kv_head slot"]]:
        """Which column each slot of a layer holds, and whether it is visible; how it differs from what was written."""
        own_keys, own_values = self._written[layer]
        key_distance, value_distance = _distance(keys, own_keys), _distance(values.detach(), own_values)
        columns = (value_distance + _TIE * key_distance.clamp(max=1)).argmin(-1)
        visible = torch.zeros_like(columns, dtype=torch.bool)
        if values.grad is not None:
            visible = (values.grad != 0).any(-1)
        self.rotated_again |= bool((visible & (key_distance.amin(-1) >= _SAME)).any())
        real = visible & mask[:, None].expand(-1, columns.shape[1], -1).gather(2, columns)
        own = _read_from(value_distance, columns) < _SAME
        of_keys = key_distance.argmin(-1)
        apart = real & own & (of_keys != columns) & (_read_from(key_distance, of_keys) < _SAME)
        apart &= _read_from(key_distance, columns) >= _SAME
        for row, head, slot in apart.nonzero().tolist()[:1]:
            key, value = int(of_keys[row, head, slot]), int(columns[row, head, slot])
            self.apart = self.apart or f"layer {layer}, slot {slot}: the key of token {key}, the value of token {value}"
        value_change = _change(values.detach(), own_values, columns) * (real & own)
        key_change = _change(keys, own_keys, columns) * (real & (_read_from(key_distance, columns) < _SAME))
        key_change = key_change.where(key_change < _ROUNDED, 0.0)  # else it is rotated
        self.changed = max(self.changed, float(value_change.amax()), float(key_change.amax()))
        return columns, visible

    def _compare_positions(self, layer: int, columns: Tensor, visible: Tensor, positions: Tensor) -> None:
        """Compare the positions that a layer gives its slots, if it does, with those of the tokens that they hold."""
        claimed = told_positions(self._cache, layer)
        if claimed is None:
            return
        self.placed += 1
        if self.misplaced:
            return
        if claimed.shape != columns.shape:
            self.misplaced = f"layer {layer} has {claimed.shape[-1]} positions for {columns.shape[-1]} slots"
            return
        true = positions[:, None].expand(-1, columns.shape[1], -1).gather(2, columns)
        for row, head, slot in (visible & (claimed != true)).nonzero().tolist()[:1]:
            self.misplaced = (
                f"layer {layer}, row {row}, kv head {head}: slot {slot} has position {int(claimed[row, head, slot])}, "
                f"and its token stands at {int(true[row, head, slot])}"
            )


def told_positions(cache: Any, layer: int) -> Int[Tensor, "row kv_head slot"] | None:
    """Return the positions that a layer of a cache gives its slots in its attribute `pos`; None if it has none."""
    layers = getattr(cache, "layers", None) or ()
    if layer >= len(layers) or not isinstance(getattr(layers[layer], "keys", None), Tensor):
        return None
    positions = getattr(layers[layer], "pos", None)
    return positions if isinstance(positions, Tensor) and positions.dim() == 3 else None


def disagreement(cache: Any) -> str:
    """Return in words which layer of a cache has more or fewer positions than slots; empty if none has."""
    for number, layer in enumerate(getattr(cache, "layers", None) or ()):
        positions = told_positions(cache, number)
        if positions is not None and positions.shape[-1] != layer.keys.shape[2]:
            return f"layer {number} has {positions.shape[-1]} positions for {layer.keys.shape[2]} slots"
    return ""


def _read_from(distance: Float[Tensor, "row kv_head slot column"], columns: Tensor) -> Tensor:
    """The distance of each slot from one column."""
    return distance.gather(-1, columns[..., None])[..., 0]


def _change(states: Tensor, written: Tensor, columns: Int[Tensor, "row kv_head slot"]) -> Tensor:
    """Largest change of a number of each slot beside what was written at a column, divided by the deviation of all."""
    of_slots = written.gather(2, columns[..., None].expand(-1, -1, -1, written.shape[-1]))
    return (states - of_slots).abs().amax(-1).float() / written.float().std().clamp(min=1e-12)


def _distance(
    handed: Float[Tensor, "row kv_head slot d_head"], written: Float[Tensor, "row kv_head column d_head"]
) -> Float[Tensor, "row kv_head slot column"]:
    """Squared distance of each slot from each column, divided by the mean square of what was written."""
    distance = torch.cdist(handed.float(), written.float(), compute_mode="donot_use_mm_for_euclid_dist").square()
    return distance / written.float().square().sum(-1).mean().clamp(min=1e-12)


def held_bytes(cache: Any) -> int:
    """Return bytes of all memory that is reachable from a cache.

    What is only a view counts with all that it keeps alive.
    """
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = [value for name, value in vars(cache).items() if name != "update"]
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(item, dict | list | tuple) or not type(item).__module__.startswith(("torch.", "builtins")):
            waiting += gc.get_referents(item)
    return sum(storages.values())
