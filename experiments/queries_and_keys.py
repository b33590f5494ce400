"""Queries and keys of a forward pass, before and after rotary; used by scripts of the papers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.record import Row
from sinkscope.errors import UnsupportedError
from sinkscope.models.call_cache import cache_in
from sinkscope.models.target import Target
from sinkscope.tap.call import Attention
from sinkscope.tap.observers import refuse_opaque
from sinkscope.tap.tap import listening

QKObserver = Callable[[int, bool, Tensor, Tensor], None]
"""Called as `observer(layer, rotated, query, key)`; `[batch head pos d_head]`, keys one per key/value head."""


@contextmanager
def queries_and_keys(target: Target, observer: QKObserver, layers: list[int]) -> Iterator[None]:
    """Context manager: every forward pass shows its queries and keys to `observer`.

    They are taken where transformers passes them to its attention function, so norms on queries and keys, fused
    projections and partial rotary need no special code. Queries and keys before rotary are obtained by calling the same
    module once more with a rotation by zero.

    Args:
        target: The model; plain or nnsight.
        observer: Called as `observer(layer, rotated, query, key)`: first before rotary (after norms on queries and
            keys) with `rotated` False, then after rotary with True. Models without rotary give the same both times.
        layers: Layers to watch.

    Raises:
        UnsupportedError: The model is a TransformerBridge, which has its own attention, or outside transformers'
            attention interface (Falcon, GPT-J); or a forward pass has a cache, into which the extra call would write.
    """
    refuse_opaque(target)
    rotary = set[int]()  # layers whose queries and keys were rotated
    is_unrotated = False  # during the extra call

    def see(call: Attention) -> None:
        layer = call.layer
        if layer not in layers or call.is_repeated:
            return
        if is_unrotated or layer not in rotary:
            observer(layer, False, call.query, call.key)
        if not is_unrotated:
            observer(layer, True, call.query, call.key)

    def call_unrotated(layer: int, module: Any, args: tuple[Any, ...], kwargs: Row) -> None:
        nonlocal is_unrotated
        if is_unrotated or kwargs.get("position_embeddings") is None:
            return
        if cache_in(kwargs) is not None:
            raise UnsupportedError(
                "queries and keys before rotary are measured by calling the attention twice, which would write "
                "into the cache twice: run the model with use_cache=False"
            )
        cos, sin = kwargs["position_embeddings"]
        by_zero = torch.ones_like(cos), torch.zeros_like(sin)
        rotary.add(layer)
        is_unrotated = True
        try:
            module(*args, **{**kwargs, "position_embeddings": by_zero})
        finally:
            is_unrotated = False

    hooks = []
    for each in layers:
        hooks.append((target.sub(each, target.adapter.attn), "pre", partial(call_unrotated, each)))
    with listening(target, see), target.hooks(*hooks):
        yield
