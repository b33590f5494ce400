"""Attention over a cache of which slots are missing: one name for transformers' attention and mask interfaces.

Where nothing was evicted, hidden or is being watched, the model's own attention function runs with the model's own
mask, so the result is the stock one bit for bit. Otherwise visibility comes from the positions that the cache keeps.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

if TYPE_CHECKING:
    from sinkscope.kv.session import Session

NAME = "sinkscope-kv"
SESSION: ContextVar[Session | None] = ContextVar("sinkscope_kv", default=None)
"""The session whose model is in a forward call."""

_STOCK: dict[int, str] = {}
"""By id of a configuration whose model is in a session: the attention that it had before."""
ROWS = 1024
"""Queries at a time where a mask or rows have to be built."""


def visible(
    pos: Int[Tensor, "batch kv_head slot"],
    query_pos: Int[Tensor, "batch query"],
    window: int | None = None,
    hidden: Bool[Tensor, "batch kv_head slot"] | None = None,
) -> Bool[Tensor, "batch kv_head query slot"]:
    """Which slots each query sees: those that hold a token, not later than itself, inside the window.

    Padding queries see everything that is held, so that nothing is divided by zero; nobody reads them.
    """
    key, query = pos[:, :, None, :], query_pos[:, None, :, None]
    ok = (key <= query) | (query < 0)
    if window is not None:
        ok = ok & ((key > query - window) | (query < 0))
    ok = ok & (key >= 0)
    if hidden is not None:
        ok = ok & ~hidden[:, :, None, :]
    return ok


def register() -> None:
    """Make our name known to transformers (once; it changes no model)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)


def switch(configs: list[Any]) -> list[str]:
    """Every configuration asks for our attention from now on; returns what `restore` needs."""
    before = [config._attn_implementation for config in configs]
    for config, name in zip(configs, before, strict=True):
        _STOCK[id(config)] = name
        config._attn_implementation = NAME
    return before


def restore(configs: list[Any], before: list[str]) -> None:
    """As it was."""
    for config, name in zip(configs, before, strict=True):
        config._attn_implementation = name
        _STOCK.pop(id(config), None)


def stock_name(config: Any) -> str:
    """The attention that the model has outside of a session."""
    return _STOCK.get(id(config)) or "eager"


def stock(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """The model's own attention function."""
    from transformers import AttentionInterface

    name = stock_name(module.config)
    table = AttentionInterface()
    if name in table:
        return table[name](module, query, key, value, mask, **kwargs)
    return _eager(module)(module, query, key, value, mask, **kwargs)


def _eager(module: Any) -> Any:
    """The attention that the model's own file defines."""
    return sys.modules[type(module).__module__].eager_attention_forward


def masked(
    module: Any, query: Tensor, key: Tensor, value: Tensor, ok: Bool[Tensor, "batch kv_head query slot"], **kwargs: Any
) -> Tensor:
    """The model's own attention under a mask per kv head; `[batch query head d_head]`."""
    groups = query.shape[1] // ok.shape[1]
    wide = ok.repeat_interleave(groups, 1) if groups > 1 else ok
    name = stock_name(module.config)
    # Eager is the one that knows soft caps and learned sink logits; where SDPA was chosen, the model goes without.
    more = kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None
    if name == "eager" or (more and name != "sdpa"):
        mask = torch.zeros(wide.shape, dtype=query.dtype, device=query.device)
        mask = mask.masked_fill_(~wide, torch.finfo(query.dtype).min)
        return _eager(module)(module, query, key, value, mask, **kwargs)[0]
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, wide, **kwargs)[0]


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """What transformers calls in every layer."""
    session = SESSION.get()
    if session is None:
        return stock(module, query, key, value, attention_mask, **kwargs)
    return session.attend(module, query, key, value, attention_mask, **kwargs)


def _mask(*, config: Any, **kwargs: Any) -> Any:
    """What transformers calls once a forward call: the stock mask, or nothing where ours will replace it."""
    session = SESSION.get()
    if session is not None and session.own_masks:
        return None
    from transformers import AttentionMaskInterface

    return AttentionMaskInterface()[stock_name(config)](config=config, **kwargs)
