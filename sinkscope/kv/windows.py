"""Which keys a layer's own rules hide from later queries, and models whose rules cannot be followed."""

from __future__ import annotations

from sinkscope.errors import UnsupportedError
from sinkscope.models.scope import cache_layers
from sinkscope.models.target import Target
from sinkscope.trace.attention import ChunkWindow


def layer_window(target: Target, layer: int) -> int | None:
    """Sliding window of a layer, in tokens; None if the layer sees everything."""
    config = target.config
    window = getattr(config, "sliding_window", None) or getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "gpt_neo":
        window, kinds = config.window_size, config.attention_layers
    if not window:
        return None
    if kinds is not None and kinds[layer] == "chunked_attention":
        return ChunkWindow(config.attention_chunk_size)
    if kinds is not None and kinds[layer] not in ("sliding_attention", "local"):
        return None
    return int(window)


def check_servable(target: Target) -> None:
    """Refuse a model on which no cache policy and no attention observer can act.

    Raises:
        UnsupportedError: Its attention cannot be replaced, its window is not the same in every pass, or its cache
            holds no keys and values alone.
    """
    if not target.adapter.attention_interface and target.kind == "bridge":
        raise UnsupportedError(
            f"the attention of {target.adapter.model_type} cannot be replaced on a TransformerBridge: load the "
            "model with backend='hf'",
            page="kv-session",
        )
    if target.config.model_type == "minimax" and target.config.sliding_window is not None:
        raise UnsupportedError(
            f"transformers forgets the window of {target.name} when it decodes with a cache, so that there is no "
            "full cache to compare with: set sliding_window=None in its configuration, or use another model",
            page="kv-session",
        )
    if not cache_layers(target):
        raise UnsupportedError(
            f"the cache of {target.name} has no layer that holds keys and values alone: use another model for "
            "cache policies and attention observers",
            page="kv-session",
        )
