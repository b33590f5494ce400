"""How far back a layer sees, as its configuration says it."""

from __future__ import annotations

from typing import Any

from transformers import DynamicCache

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
