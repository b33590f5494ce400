"""What a model says of its layers: how far back each sees, what it keeps in a cache, and which head reads which key.

Query heads share a kv head in groups, which are beside each other.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float, Shaped
from torch import Tensor
from transformers import DynamicCache

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target


def layer_window(config: Any, layer: int) -> int | None:
    """Return the sliding window of a layer of a decoder, in tokens; None if the layer sees everything."""
    names = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    kinds = getattr(config, "layer_types", None)
    kind = "sliding_attention" if kinds is None else kinds[layer]
    return getattr(config, names.get(kind, ""), None) or None


KEYS_ALONE = ("DynamicLayer", "DynamicSlidingWindowLayer")
"""Classes of layers of a stock cache that hold keys and values alone."""


def layers_with_states(target: Target) -> list[int]:
    """Return layers whose part of the cache keeps a state, such as those of linear attention."""
    layers = DynamicCache(config=target.config).layers[: target.n_layers]  # of a cut model, the configuration has more
    return [number for number, layer in enumerate(layers) if type(layer).__name__ not in KEYS_ALONE]


def check_caches_filled(target: Target) -> None:
    """Refuse a model of which a layer fills no cache although the configuration gives it one, or sees what it drops.

    Raises:
        UnsupportedError: A layer without softmax attention keeps no state either, or a layer attends beyond its window.
    """
    states = layers_with_states(target)
    for place in range(target.n_layers):
        reason = target.unproved.get(f"blocks.{place}.cache")
        if place not in target.attending and place not in states:
            reason = "has no attention, and its configuration counts it among those with a cache of keys"
        if reason is not None:
            raise UnsupportedError(
                f"layer {place} of {target.name} {reason}: use another model for cache policies, guards and observers"
            )


# -- heads -------------------------------------------------------------------------------------------------------------


def head_projection(which: str, target: Target, tensor: Float[Tensor, "*n width"]) -> Float[Tensor, "*n head d_head"]:
    """Return q, k or v by head, before rotary, from the output of its own projection or of a shared one."""
    layout, index = target.adapter.qkv_layout, "qkv".index(which)
    heads = [target.n_heads, target.n_kv_heads, target.n_kv_heads]
    if layout is None:
        return tensor.unflatten(-1, (heads[index], -1))
    if layout == "by head":
        return tensor.unflatten(-1, (target.n_heads, 3, -1)).select(-2, index)
    return tensor.unflatten(-1, (sum(heads), -1)).split(heads, -2)[index]


def per_query_head(by_kv_head: Shaped[Tensor, "batch _ *rest"], heads: int) -> Shaped[Tensor, "batch _ *rest"]:
    """Expand from kv heads to query heads; a tensor with a single head for all is left as it is."""
    kv_heads = by_kv_head.shape[1]
    if kv_heads in (1, heads):
        return by_kv_head
    return by_kv_head.repeat_interleave(heads // kv_heads, 1)


def in_groups(
    by_head: Shaped[Tensor, "batch head *query width"], kv_heads: int
) -> Shaped[Tensor, "batch kv_head query_of_group width"]:
    """Group query heads by the kv head that they share: the queries of a group stand one after another.

    Args:
        by_head: Queries, or their rows.
        kv_heads: Number of kv heads.
    """
    # Without einops, because this runs in every layer for every generated token, where it costs a tenth:
    # "batch (kv_head group) query width -> batch kv_head (group query) width"
    return by_head.reshape(by_head.shape[0], kv_heads, -1, by_head.shape[-1])
