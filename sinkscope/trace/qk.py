"""Queries and keys of every layer as the attention uses them, before and after rotary, while the model runs as ever.

They are taken where transformers hands them to its attention function, so norms on queries and keys, fused
projections and partial rotary need no code of their own. Before rotary they are the ones the same module makes when it
is told that every position is the same: it is called once more with a rotation by zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sinkscope.models.target import Target
from sinkscope.trace.attention import attend, attending, refuse_in_session, refuse_opaque

NAME = "sinkscope-qk"
QKObserver = Callable[[int, bool, Tensor, Tensor], None]
"""Called as `observer(layer, rotated, query, key)`; `[batch head pos d_head]`, keys one per key/value head."""


@dataclass
class _Session:
    observer: QKObserver
    wanted: frozenset[int]
    turned: set[int] = field(default_factory=set)  # layers with rotary
    nested: bool = False  # inside the extra call without rotation


_session: ContextVar[_Session | None] = ContextVar("sinkscope_qk", default=None)


@contextmanager
def queries_and_keys(target: Target, observer: QKObserver, layers: list[int]) -> Iterator[None]:
    """For the length of a `with`, every forward pass shows its queries and keys to `observer`.

    Args:
        target: the model; plain or nnsight.
        observer: called as `observer(layer, rotated, query, key)`: with `rotated` False, before rotary (after norms on
            queries and keys), and with True as they meet. On models without rotary it is called twice with the same.
        layers: the layers to watch.

    Raises:
        UnsupportedError: a TransformerBridge, whose attention is its own, or an architecture outside transformers'
            attention interface (Falcon); inside a `with` of a cache policy or an attention observer.
    """
    refuse_opaque(target)
    refuse_in_session(target)
    session = _Session(observer, frozenset(layers))
    hooks = [(target.sub(i, target.adapter.attn), "pre", _unrotated(session, i)) for i in layers]
    token = _session.set(session)
    try:
        with attending(target, NAME, _shown), target.hooks(*hooks):
            yield
    finally:
        _session.reset(token)


def _unrotated(session: _Session, layer: int) -> Any:
    """Calls the attention module once more, with a rotation by zero."""

    def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if session.nested or kwargs.get("position_embeddings") is None:
            return
        cos, sin = kwargs["position_embeddings"]
        session.turned.add(layer)
        session.nested = True
        try:
            module(*args, **{**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))})
        finally:
            session.nested = False

    return hook


def _shown(module: Any, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The attention function transformers calls: stock output, and queries and keys for the observer."""
    session = _session.get()
    layer = int(module.layer_idx)
    if session is not None and layer in session.wanted:
        if session.nested or layer not in session.turned:
            session.observer(layer, False, query, key)
        if not session.nested:
            session.observer(layer, True, query, key)
    return attend(module, query, key, *args, **kwargs)
