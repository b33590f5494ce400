"""The attention tap: the single attention function and mask function that tapped models use.

Handlers are injected. They see the attention of every layer as the model computes it, may replace it, and may request
its rows. If no handler acts, the model's own attention runs with the model's own mask, so the result equals the stock
one bit for bit (under a cache policy, up to rounding where a sliding window would have dropped keys). The tap does not
know who listens, so measurements work under cache policies and guards.

Measurements listen through `attention_rows`. No full query x key matrix is stored: an observer
sees `rows_per_chunk` rows at a time. The rows include everything the architecture does to its scores: soft cap, window,
padding, learned sink logits. Under a cache policy they cover the keys that the cache keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import ref

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from sinkscope.models.target import Target, without_compiler
from sinkscope.tap.call import Attention, AttentionOutput
from sinkscope.tap.internals import set_attention
from sinkscope.tap.listeners import HANDLERS, Handler
from sinkscope.tap.stock import NAME, STOCK, Stock, check_recomputed, configs_of, stock_attention, stock_name

_LATEST: ContextVar[ref[Tensor] | None] = ContextVar("sinkscope_latest_queries", default=None)
_LOCK = threading.Lock()


@contextmanager
def listening(target: Target, see: Callable[[Attention], None], *, proving: bool = False) -> Iterator[None]:
    """Context manager in which `see` is called with the attention of every layer in this context.

    Args:
        target: The model.
        see: Called with the attention.
        proving: Whether this is how the model is compared with what sinkscope recomputes.

    Raises:
        UnsupportedError: The model attends by a function of the user's own.
    """
    if not proving:
        check_recomputed(target)
    with tapped(target) as configs, Handler(see, configs, needs_mask=True):
        yield


@contextmanager
def tapped(target: Target) -> Iterator[frozenset[int]]:
    """Context manager: every configuration of the model selects the tap's attention; yields their ids.

    The names are registered with transformers once; this changes no other model. A model may be tapped several times.
    Attention outside transformers' interface is not seen.
    """
    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)
    configs = configs_of(target)
    with _LOCK:
        for config in configs:
            if id(config) not in STOCK:
                STOCK[id(config)] = Stock.of(config)
            STOCK[id(config)].times += 1
            set_attention(config, NAME)
    try:
        with without_compiler():
            yield frozenset(map(id, configs))
    finally:
        with _LOCK:
            for config in configs:
                stock = STOCK[id(config)]
                stock.times -= 1
                if stock.times == 0:
                    set_attention(config, stock.name)
                    del STOCK[id(config)]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> AttentionOutput:
    """The attention function that transformers calls in every layer."""
    config = module.config
    number, stock = id(config), STOCK.get(id(config))
    own = stock_attention(module) if stock is None or stock.attention is None else stock.attention
    listeners: list[Handler] = []
    idle, needs_mask = True, False
    for handler in HANDLERS.get():  # a plain loop: every layer comes here
        if number in handler.configs:
            handler.was_reached = True
            listeners.append(handler)
            idle = idle and handler.idle
            needs_mask = needs_mask or handler.needs_mask
    chosen = None
    indices = kwargs.pop("indices", None)  # the keys that an indexer chose (DeepSeek 3.2)
    if indices is not None:
        chosen = torch.zeros(len(indices), 1, query.shape[2], key.shape[2], dtype=torch.bool, device=indices.device)
        chosen.scatter_(-1, indices[:, None].long(), True)
    blocks = kwargs.pop("block_indices", None)  # the blocks of keys that an indexer chose (MiniMax M3)
    if blocks is not None:
        chosen = _within_blocks(module, attention_mask, blocks, query, key.shape[2], kwargs.get("position_ids"))
    if chosen is not None:
        attention_mask = _among_chosen(attention_mask, chosen)
    if idle:
        return own(module, query, key, value, attention_mask, **kwargs)
    latest = _LATEST.get()
    is_repeated = latest is not None and latest() is query
    _LATEST.set(ref(query))
    call = Attention(
        module,
        int(module.layer_idx),
        query,
        key,
        value,
        attention_mask,
        kwargs,
        query.shape[2],
        needs_mask,
        is_repeated=is_repeated,
    )
    for handler in listeners:
        handler.see(call)
    return call.finish()


def _among_chosen(mask: Tensor | None, chosen: Bool[Tensor, "batch _ query key"]) -> Tensor:
    """A mask that shows only chosen keys, of those that it shows."""
    queries, keys = chosen.shape[2:]
    if mask is None:
        return chosen & torch.ones_like(chosen).tril(keys - queries)
    if mask.dtype == torch.bool:
        return mask[..., :keys] & chosen
    return mask[..., :keys].masked_fill(~chosen, torch.finfo(mask.dtype).min)


def _within_blocks(
    module: Any, mask: Tensor | None, blocks: Tensor, query: Tensor, keys: int, positions: Tensor | None
) -> Bool[Tensor, "batch _ query key"]:
    """Which keys are in chosen blocks; modules make a mask of them for stock attention."""
    if positions is None:
        positions = torch.arange(keys - query.shape[2], keys, device=query.device)
    positions = positions.reshape(-1, query.shape[2]).expand(len(query), -1)
    return module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, positions) == 0


def _mask(*, config: Any, **kwargs: Any) -> Any:
    """The mask function that transformers calls once per forward call; no mask if a handler determines what is seen."""
    stock, number = STOCK.get(id(config)), id(config)
    name = stock_name(config) if stock is None else stock.name
    for handler in HANDLERS.get():
        if number in handler.configs:
            if handler.replaces_mask:
                return None
            if handler.needs_mask:
                name = "sdpa"
    # Nothing stands here for an attention that was registered alone: transformers gives it no mask either.
    if name not in ALL_MASK_ATTENTION_FUNCTIONS:
        return None
    return ALL_MASK_ATTENTION_FUNCTIONS[name](config=config, **kwargs)
