"""What a cache was given and what it hands to the attention, seen at `Cache.update` alone."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.models.draws import draws

_SAME = 0.02  # of the spread of the numbers: closer keys or values are the same but for rounding

Pair = tuple[Float[Tensor, "row kv_head _ d_head"], Float[Tensor, "row kv_head _ d_head"]]
"""Keys and values."""
_TIE = 1e-6  # weight of the keys: they tell tokens with the same values apart


@dataclass
class Read:
    """What one layer read in one call.

    Attributes:
        columns: For each slot, the column whose values it holds; -1 where no query can see it.
        key_columns: The column whose key it holds; -1: that of none, because keys were rotated again.
    """

    columns: Int[Tensor, "row kv_head slot"]
    key_columns: Int[Tensor, "row kv_head slot"]


class Recorder:
    """Notes the keys and values that go into a cache, and which of them each call reads.

    Slots are recognized by their values, which no rotation changes. A slot is visible if the logits change with its
    values: gradients say so whatever mask was applied, and by whom.

    Args:
        cache: The cache; its method `update` is watched as long as it lives.
    """

    def __init__(self, cache: Any) -> None:
        self._update = cache.update
        self._written: dict[int, Pair] = {}
        self._handed: dict[int, Pair] = {}
        cache.update = self._note

    def _note(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        new = key_states.detach(), value_states.detach()
        keys, values = self._update(*new, layer_idx, *args, **kwargs)
        before = self._written.get(layer_idx)
        if before is not None:
            new = torch.cat([before[0], new[0]], 2), torch.cat([before[1], new[1]], 2)
        self._written[layer_idx] = new
        handed = keys.detach(), values.detach().requires_grad_()
        self._handed[layer_idx] = handed
        return handed

    def forget(self, tokens: int | None = None) -> None:
        """Forget the last tokens as the cache was told to; None: all."""
        for layer, (keys, values) in list(self._written.items()):
            kept = 0 if tokens is None else keys.shape[2] - tokens
            self._written[layer] = keys[:, :, :kept], values[:, :, :kept]

    def reorder(self, rows: Tensor) -> None:
        """Let rows change places as those of the cache do."""
        for layer, (keys, values) in self._written.items():
            self._written[layer] = keys[rows], values[rows]

    def reads(self, logits: Float[Tensor, "row query vocab"]) -> dict[int, Read]:
        """What each layer read in the call that gave these logits."""
        draw = torch.randn(logits.shape, generator=draws(0, "weights of logits"), device="cpu")
        (logits.float() * draw.to(logits.device)).sum().backward()
        found: dict[int, Read] = {}
        for layer, (keys, values) in self._handed.items():
            own_keys, own_values = self._written[layer]
            key_distance, value_distance = _distance(keys, own_keys), _distance(values.detach(), own_values)
            columns = (value_distance + _TIE * key_distance.clamp(max=1)).argmin(-1)
            key_nearest, key_columns = key_distance.min(-1)
            own_key = key_distance.gather(-1, columns[..., None])[..., 0] <= key_nearest + 1e-6
            key_columns = torch.where(own_key, columns, key_columns)
            gradient = values.grad
            visible = torch.zeros_like(columns, dtype=torch.bool)
            if gradient is not None:
                visible = (gradient != 0).any(-1)
            found[layer] = Read(torch.where(visible, columns, -1), torch.where(key_nearest < _SAME, key_columns, -1))
        self._handed.clear()
        return found


def _distance(
    handed: Float[Tensor, "row kv_head slot d_head"], written: Float[Tensor, "row kv_head column d_head"]
) -> Float[Tensor, "row kv_head slot column"]:
    """Squared distance of each slot from each column, divided by the mean square of what was written."""
    distance = torch.cdist(handed.float(), written.float(), compute_mode="donot_use_mm_for_euclid_dist").square()
    return distance / written.float().square().sum(-1).mean().clamp(min=1e-12)


def held_bytes(cache: Any) -> int:
    """Bytes of all memory that is reachable from a cache; what is only a view counts with all that it keeps alive."""
    storages: dict[int, int] = {}
    seen: set[int] = set()
    waiting: list[Any] = [value for name, value in vars(cache).items() if name != "update"]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            storage = one.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(one, dict | list | tuple) or not type(one).__module__.startswith(("torch.", "builtins")):
            waiting += gc.get_referents(one)
    return sum(storages.values())
