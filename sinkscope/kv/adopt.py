"""Taking over a stock cache: its layers are replaced by ours, in place."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sinkscope.engine.tokens import TokenPositions
from sinkscope.errors import UnsupportedError
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.windows import cache_layers
from sinkscope.models.target import Target


def check_seen(cache: Any) -> None:
    """Refuse a cache on which attention cannot be seen.

    Raises:
        UnsupportedError: It holds room for tokens that are still to come.
    """
    if getattr(cache, "is_compileable", False):
        raise UnsupportedError(
            f"the cache is {_named(cache)}, which holds room for tokens that are still to come: "
            "attention is observed and replaced on a plain DynamicCache; pass `DynamicCache()` or nothing"
        )


def adopt(cache: Any, target: Target, columns: TokenPositions) -> None:
    """Replace the layers of a stock cache by ours in place, so that the caller's object works over several turns.

    Args:
        cache: An empty or filled `DynamicCache`.
        target: The model.
        columns: The tokens already in the cache.

    Raises:
        UnsupportedError: The cache is of another kind.
    """
    layers: list[Any] = getattr(cache, "layers", None) or []
    if own_layers(cache):
        return
    offloading = getattr(cache, "offloading", False)
    if not isinstance(cache, DynamicCache) or offloading:
        raise UnsupportedError(
            f"the cache is {_named(cache)}: a cache policy or guard needs a plain DynamicCache; pass `DynamicCache()` "
            "or nothing"
        )
    ours = _empty_layers(target)
    if cache.get_seq_length() > 0:
        for layer in layers:
            if type(layer) is not DynamicLayer:
                raise UnsupportedError(
                    f"the cache already holds tokens in a {type(layer).__name__}, which may have dropped some: "
                    "start with an empty cache inside the `with`"
                )
        for new, old in zip(ours, layers, strict=True):
            new.upcoming = columns
            new.update(old.keys, old.values)
    cache.layers = ours
    cache.layer_class_to_replicate = None
    if hasattr(cache, "linear_cache"):  # MiniMax keeps states beside the layers, and takes this list for as long
        states: Any = cache
        states.linear_cache = [[] if isinstance(layer, CacheLayer) else None for layer in ours]


def _named(cache: Any) -> str:
    """The class of a cache, and how `generate` is asked for one."""
    kind = type(cache).__name__
    asked = {"StaticCache": "static", "QuantizedCache": "quantized"}.get(kind)
    if getattr(cache, "offloading", False):
        asked = "offloaded"
    if asked is None:
        return kind
    return f"{kind} (cache_implementation={asked!r})"


def own_layers(cache: Any) -> list[CacheLayer]:
    """Return the layers of a cache that are ours.

    Others, such as the state of linear attention, are left as they are.
    """
    return [layer for layer in getattr(cache, "layers", None) or [] if isinstance(layer, CacheLayer)]


def refuse_states(cache: Any, what: str) -> None:
    """Refuse to take tokens back from a cache with layers that keep a state, which cannot go back.

    Raises:
        UnsupportedError: There is such a layer.
    """
    for layer in cache.layers:
        if type(layer) is not CacheLayer:
            raise UnsupportedError(
                f"{what} takes tokens back, and a {type(layer).__name__} of this model's cache keeps a state that "
                "cannot go back: use another model"
            )


def _empty_layers(target: Target) -> list[Any]:
    """The layers of a new cache of the model: ours where the stock cache holds keys and values alone."""
    layers: list[Any] = list(DynamicCache(config=target.config).layers[: target.n_layers])
    for number in cache_layers(target):
        layers[number] = CacheLayer(number)
    return layers
