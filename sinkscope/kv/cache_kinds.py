"""Cache layers that hold the keys of an indexer beside keys and values."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit.growing_tensor import GrowingTensor
from sinkscope.kv.cache import CacheLayer


class IndexedCacheLayer(CacheLayer):
    """Latent keys and values, and the keys of an indexer beside them, which go where these go.

    The values of a slot are followed by the indexer's key of its token.
    """

    def _clear(self) -> None:
        super()._clear()
        self._width = 0  # of the values
        self._index_width = 0  # of the indexer's keys; 0 where the indexer of another layer chooses

    @property
    def own_values(self) -> Float[Tensor, "batch 1 slot d_value"]:
        """The values alone."""
        return self.values[..., : self._width]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append keys and values, with room for the indexer's keys.

        Raises:
            UnsupportedError: Keys of several heads are cached, of which a policy may keep different ones, and the
                indexer has one key for all.
        """
        if key_states.shape[1] > 1:
            raise UnsupportedError(
                f"this version of transformers caches the keys of all {key_states.shape[1]} heads beside one indexer: "
                "use transformers 5.18 or newer, which caches them once",
                page="kv-cache",
            )
        self._width = value_states.shape[-1]
        values = torch.nn.functional.pad(value_states, (0, self._index_width))
        super().update(key_states, values, *args, **kwargs)
        return self.keys, self.own_values

    def update_indexer(self, states: Float[Tensor, "batch new d_index"]) -> Float[Tensor, "batch slot d_index"]:
        """Set the indexer's keys of the tokens just appended; those of all slots."""
        if not self._index_width:
            self._index_width = states.shape[-1]
            self.values = torch.nn.functional.pad(self.values, (0, self._index_width))
            self.growth.values = GrowingTensor(-2, self.values)
        self.values[:, 0, self.slots - states.shape[1] :, self._width :] = states
        return self.values[:, 0, :, self._width :]


KINDS: dict[str, type[CacheLayer]] = {
    "DynamicLayer": CacheLayer,
    "DynamicSlidingWindowLayer": CacheLayer,
    "DynamicIndexedLayer": IndexedCacheLayer,
}
"""By the name of a stock layer, because older versions of transformers lack some: the layer that takes its place."""
