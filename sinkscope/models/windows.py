"""What a model says of its layers: how far back each sees, what it keeps in a cache, and which number it has."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target


class ChunkWindow(int):
    """A window that ends where the query's chunk of this many tokens begins (Llama 4)."""


def layer_window(config: Any, layer: int) -> int | None:
    """Return the sliding window of a layer of a decoder, in tokens; None if the layer sees everything."""
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    kind = "sliding_attention" if kinds is None else kinds[layer]
    if window and kind == "chunked_attention":
        return ChunkWindow(config.attention_chunk_size)
    if window and kind == "sliding_attention":
        return int(window)
    return None


KEYS_ALONE = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Classes of layers of a stock cache that hold keys and values alone."""


def layers_with_states(target: Target) -> list[int]:
    """Return layers whose part of the cache keeps a state, such as those of linear attention."""
    layers = DynamicCache(config=target.config).layers[: target.n_layers]  # of a cut model, the configuration has more
    return [number for number, layer in enumerate(layers) if type(layer).__name__ not in KEYS_ALONE]


def check_numbering(target: Target) -> None:
    """Refuse a model whose layers are numbered in two ways, because attention and caches are told apart by layer.

    Raises:
        UnsupportedError: The attention of a layer has the number of another place.
    """
    for place in target.attending:
        number = getattr(target.sub(place, "attn"), "layer_idx", place)
        if number != place:
            raise UnsupportedError(
                f"the layer at place {place} of {target.name} calls itself layer {number} (layer_idx), so that "
                "attention and caches would be those of another layer: set the layer_idx of its attention to the place"
            )


def check_caches_filled(target: Target) -> None:
    """Refuse a model of which a layer fills no cache although the configuration gives it one, or sees what it drops.

    Raises:
        UnsupportedError: A layer without softmax attention keeps no state either, or a layer attends beyond its window.
    """
    states, unproved = layers_with_states(target), dict(target.adapter.unproved)
    for place in range(target.n_layers):
        reason = unproved.get(f"blocks.{place}.cache")
        if reason is not None:
            raise UnsupportedError(
                f"layer {place} of {target.name} {reason}: use another model for cache policies, guards and observers"
            )
        if place not in target.attending and place not in states:
            raise UnsupportedError(
                f"layer {place} of {target.name} has no attention, and its configuration counts it among those with a "
                "cache of keys: take the layer out of the list (with num_hidden_layers and layer_idx), or use no cache "
                "policy or guard"
            )
