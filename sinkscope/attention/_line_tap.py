"""What a layer's attention is made of, handed out while the model's own fast attention runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.lines.sums import Scores
from sinkscope.models.target import Target
from sinkscope.trace.attention import attend, attending, refuse_in_session, refuse_opaque

NAME = "sinkscope-lines"
ScoresObserver = Callable[[int, Scores], None]
"""Called as `observer(layer, scores)` for a pass of a single sequence."""

_observer: ContextVar[tuple[ScoresObserver, frozenset[int]] | None] = ContextVar("sinkscope_lines", default=None)


@contextmanager
def scores_of(target: Target, observer: ScoresObserver, layers: list[int]) -> Iterator[None]:
    """For the length of a `with`, every forward pass of one sequence shows its scores' parts to `observer`.

    Args:
        target: the model; plain or nnsight.
        observer: called as `observer(layer, scores)`.
        layers: the layers to watch.

    Raises:
        UnsupportedError: a TransformerBridge, whose attention is its own, or an architecture outside transformers'
            attention interface (Falcon); inside a `with` of a cache policy or an attention observer; attention that
            is neither causal nor a window.
    """
    refuse_opaque(target)
    refuse_in_session(target)
    token = _observer.set((observer, frozenset(layers)))
    try:
        with attending(target, NAME, _shown):
            yield
    finally:
        _observer.reset(token)


@torch.no_grad()
def _shown(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: stock output, and the scores' parts for the observer."""
    watching = _observer.get()
    layer = int(module.layer_idx)
    if watching is not None and layer in watching[1]:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        window = _window(attention_mask, key.shape[2])
        watching[0](layer, Scores(query[0], key[0], float(scale), window, softcap, s_aux))
    return attend(module, query, key, value, attention_mask, scaling=scaling, softcap=softcap, s_aux=s_aux, **kwargs)


def _window(mask: Tensor | None, keys: int) -> int | None:
    """What a mask leaves to see: None for all earlier keys, else how many of the last."""
    if mask is None:
        return None
    seen = mask[0, 0, :, :keys]
    if seen.dtype != torch.bool:
        seen = seen == 0
    window = int(seen[-1].sum())
    for row in {0, len(seen) // 2, len(seen) - 1}:
        last = keys - len(seen) + row
        expected = torch.zeros_like(seen[row])
        expected[max(0, last - window + 1) : last + 1] = True
        if not torch.equal(seen[row], expected):
            raise UnsupportedError(
                "lines are of causal attention, with or without a window; this mask is neither: give texts without "
                "padding"
            )
    return None if window == keys else window
