"""How far back a layer sees, as its configuration says it."""

from __future__ import annotations

from typing import Any


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
