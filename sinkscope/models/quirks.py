"""What single families of models do unlike all others: one function for each, with the class that does it.

Whatever holds for all models is proved when a model is opened (`opening`), and no class is named there.
"""

from __future__ import annotations

from inspect import signature
from typing import Any
from weakref import ref

from torch import Tensor

from sinkscope.errors import UnsupportedError


def check_no_indexer(module: Any, settings: dict[str, Any]) -> None:
    """Refuse attention to keys that an indexer chooses: `DeepseekV32Attention`, `MiniMaxM3VLAttention`.

    Args:
        module: The attention module.
        settings: What it passes to its attention function.

    Raises:
        UnsupportedError: An indexer chooses the keys.
    """
    if "indices" in settings or "block_indices" in settings:
        raise UnsupportedError(
            f"{type(module).__name__} attends to keys that an indexer chooses, which is not read: use another model"
        )


def attends_again(latest: ref[Tensor] | None, query: Tensor) -> bool:
    """Return whether a module attends with the queries of the latest attention: `DiffLlamaAttention`, to other values.

    Args:
        latest: The queries of the latest attention.
        query: The queries of this one.
    """
    return latest is not None and latest() is query


def tokens_in(cache: Any) -> int:
    """Return the number of tokens that a cache has read, with padding.

    Of `MiniMaxCache` the first layer keeps a state and no keys, and says that there are none.
    """
    count = int(cache.get_seq_length())
    if count:
        return count
    lengths: list[int] = []
    for layer in getattr(cache, "layers", None) or ():
        if hasattr(layer, "get_seq_length"):
            lengths.append(int(layer.get_seq_length()))
    return max(lengths, default=0)


def add_states(cache: Any, has_keys: list[bool]) -> None:
    """Give a cache whose layers were replaced room for states: `MiniMaxCache` keeps them in a list of its own.

    Args:
        cache: The cache.
        has_keys: Whether each layer has keys and values; all others have a state.
    """
    if hasattr(cache, "linear_cache"):
        cache.linear_cache = [[] if keeps_keys else None for keeps_keys in has_keys]


def keys_of(module: Any, keys: Tensor, values: Tensor) -> Tensor:
    """Return the keys of a layer from what its cache holds: latent vectors, of which `DeepseekV3Attention` makes keys.

    Args:
        module: The attention module.
        keys: What the cache holds as keys.
        values: What it holds as values.
    """
    if hasattr(module, "expand_kv"):
        return module.expand_kv(keys, values)[0]
    return keys


def adds_stream_inside(attention: Any) -> bool:
    """Return whether an attention module adds the residual stream to its output itself: `BloomAttention`."""
    original = getattr(attention, "original_component", attention)  # also below a bridge's wrapper
    return "residual" in signature(original.forward).parameters
