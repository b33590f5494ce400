"""Cache layers that hold more than keys and values: an indexer's keys, or a state."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

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


class StateCacheLayer(LinearAttentionAndFullAttentionLayer, CacheLayer):
    """Keys and values of a layer that also keeps a state, which is left as it is."""

    def __init__(self, number: int, stock: LinearAttentionAndFullAttentionLayer) -> None:
        CacheLayer.__init__(self, number)
        if hasattr(stock, "number_of_states"):  # of transformers 5.18 or so on: how many depends on the model
            LinearAttentionLayer.__init__(self, stock.number_of_states)
        else:
            LinearAttentionLayer.__init__(self)

    def reset(self) -> None:
        """Make the layer empty, like a new one."""
        LinearAttentionLayer.reset(self)
        CacheLayer.reset(self)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows as beam search requests."""
        LinearAttentionLayer.reorder_cache(self, beam_idx.long())  # type: ignore[arg-type]
        CacheLayer.reorder_cache(self, beam_idx)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forget the last tokens; the state refuses, unless it records its past."""
        LinearAttentionLayer.crop(self, int(tokens_to_remove))
        CacheLayer.crop(self, tokens_to_remove)


KINDS: dict[str, type[CacheLayer]] = {
    "DynamicLayer": CacheLayer,
    "DynamicSlidingWindowLayer": CacheLayer,
    "DynamicIndexedLayer": IndexedCacheLayer,
    "LinearAttentionAndFullAttentionLayer": StateCacheLayer,
}
"""By the name of a stock layer, because older versions of transformers lack some: the layer that takes its place."""
