"""The reference of evicting caches: one pass over all tokens in which every kv head sees what a mask says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from sinkscope.engine.stock import attention_name, eager_attention, set_attention

_NAME = "sinkscope-masked"


@contextmanager
def attending(model: Any, sees: Mapping[int, Bool[Tensor, "batch kv_head query key"]]) -> Iterator[None]:
    """Let the layers of a model attend by `sees` alone, by the attention that the model's own file defines."""

    def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, _mask: Any, **kwargs: Any) -> Any:
        visible = sees[module.layer_idx].repeat_interleave(query.shape[1] // key.shape[1], 1)
        least = torch.finfo(query.dtype).min  # finite, so that rows of padding that see nothing are no NaN
        hidden = torch.zeros_like(visible, dtype=query.dtype).masked_fill(~visible, least)
        return eager_attention(module, query, key, value, hidden, **kwargs)

    AttentionInterface.register(_NAME, attend)
    AttentionMaskInterface.register(_NAME, lambda **_: None)
    config = model.config.get_text_config()
    before = attention_name(config)
    set_attention(config, _NAME)
    try:
        yield
    finally:
        set_attention(config, before)


def window_of(config: Any, layer: int) -> int | None:
    """Return the window of a layer by its configuration."""
    window, kinds = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if kinds is None or kinds[layer] == "sliding_attention":
        return window
    return None


@torch.no_grad()
def plain_logits(
    model: Any,
    ids: Int[Tensor, "row column"],
    mask: Int[Tensor, "row column"],
    sees: Mapping[int, Bool[Tensor, "row kv_head query key"]] | None = None,
) -> Float[Tensor, "row column vocab"]:
    """Return logits of one pass without a cache.

    Args:
        model: The model.
        ids: Token ids.
        mask: 0 at padding.
        sees: What each query of each layer may see of what came before and is in its window. None: the model's own
            attention sees everything.
    """
    given: dict[str, Any] = {"attention_mask": mask, "position_ids": positions_of(mask), "use_cache": False}
    if sees is None:
        return model(input_ids=ids, **given).logits
    visible: dict[int, Tensor] = {}
    for layer, reach in reach_of(model.config, sees, mask).items():
        visible[layer] = sees[layer] & reach
    with attending(model, visible):
        return model(input_ids=ids, **given).logits


def reach_of(
    config: Any, layers: Iterable[int], mask: Int[Tensor, "row column"]
) -> dict[int, Bool[Tensor, "#row #kv_head query key"]]:
    """Return what the queries of each layer could see if everything was kept: what came before, in the window."""
    causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
    reach: dict[int, Tensor] = {}
    for layer in layers:
        window = window_of(config, layer)
        near = causal if window is None else causal & ~causal.tril(-window)
        reach[layer] = near & mask.bool()[:, None, None]
    return reach


def positions_of(mask: Int[Tensor, "row column"]) -> Int[Tensor, "row column"]:
    """Return the position of each token among those of its row that are no padding."""
    return (mask.cumsum(1) - 1).clamp(min=0)
