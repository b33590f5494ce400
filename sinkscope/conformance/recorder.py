"""What a cache was given and what it hands to the attention, seen at `Cache.update` alone."""

from __future__ import annotations

import gc
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.models.draws import draws

_SAME = 0.02  # of the spread of the numbers: closer keys or values are the same but for rounding

Pair = tuple[Float[Tensor, "row kv_head _ d_head"], Float[Tensor, "row kv_head _ d_head"]]
"""Keys and values."""
Logits = Float[Tensor, "row step vocab"]
_TIE = 1e-6  # weight of the keys: they tell tokens with the same values apart


class CacheRecorder:
    """Notes the keys and values that go into a cache, and which of them each call reads.

    Slots are recognized by their values, which no rotation changes. A slot is visible if the logits change with its
    values: gradients say so whatever mask was applied, and by whom.

    Args:
        cache: The cache; its method `update` is watched as long as it lives.

    Attributes:
        logits: What the model said, as who calls it notes it.
        sees: Which columns each layer's queries saw, in the calls that were read.
        bytes: What the cache held after each call.
        lengths: What the cache said of its length after each call.
        rotated_again: Whether keys were handed out that were never written.
    """

    logits: Logits

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self.bytes: list[int] = []
        self.lengths: list[int] = []
        self.sees: dict[int, Bool[Tensor, "row kv_head query key"]] = {}
        self.rotated_again = False
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
        """Forget the last tokens as the cache was told to; None: all, also what was measured."""
        if tokens is None:
            self.bytes.clear()
            self.lengths.clear()
        for layer, (keys, values) in list(self._written.items()):
            kept = 0 if tokens is None else keys.shape[2] - tokens
            self._written[layer] = keys[:, :, :kept], values[:, :, :kept]

    def measure(self) -> None:
        """Note the size and the length of the cache after a call."""
        self.bytes.append(held_bytes(self._cache))
        self.lengths.append(int(self._cache.get_seq_length()))

    def read(self, logits: Float[Tensor, "row query vocab"], total: int, start: int) -> None:
        """Note what each layer read in the call that gave these logits.

        Args:
            logits: The logits.
            total: Columns of the whole text.
            start: Column of the first query.
        """
        draw = torch.randn(logits.shape, generator=draws(0, "weights of logits"), device="cpu")
        (logits.float() * draw.to(logits.device)).sum().backward()
        for layer, (keys, values) in self._handed.items():
            own_keys, own_values = self._written[layer]
            key_distance, value_distance = _distance(keys, own_keys), _distance(values.detach(), own_values)
            columns = (value_distance + _TIE * key_distance.clamp(max=1)).argmin(-1)
            visible = torch.zeros_like(columns, dtype=torch.bool)
            if values.grad is not None:
                visible = (values.grad != 0).any(-1)
            self.rotated_again |= bool((visible & (key_distance.amin(-1) >= _SAME)).any())
            rows, heads, _ = columns.shape
            seen = torch.zeros(rows, heads, total + 1, dtype=torch.bool)  # with a place for what is hidden
            seen.scatter_(2, columns.where(visible, total), True)
            sees = self.sees.setdefault(layer, torch.zeros(rows, heads, total, total, dtype=torch.bool))
            sees[:, :, start : start + logits.shape[1]] = seen[:, :, None, :total]
        self._handed.clear()


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
