"""The same on a TransformerBridge, whose attention is its own: visibility and rows through its hook points.

A bridge builds the whole query x key matrix in every layer, so long contexts belong on the plain model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sinkscope.kv.session import Session


def bridge_hooks(session: Session) -> list[tuple[Any, str, Any]]:
    """Hooks for `Target.hooks`: scores are masked, patterns shown to observers, rotated queries kept."""
    points = session.target.model.hook_dict
    pairs: list[tuple[Any, str, Any]] = []
    for layer in range(session.target.n_layers):
        place = f"blocks.{layer}.attn."
        pairs.append((points[place + "hook_attn_scores"], "post", _scores(session, layer)))
        pairs.append((points[place + "hook_pattern"], "post", _pattern(session, layer)))
        if place + "hook_rot_q" in points:
            pairs.append((points[place + "hook_rot_q"], "post", _queries(session, layer)))
    return pairs


def _scores(session: Session, layer: int) -> Any:
    def hook(_module: Any, _args: Any, _kwargs: Any, scores: Tensor) -> Tensor | None:
        kv = session.layer(layer)
        if session.call is None or kv is None:
            return None
        index = session.call.on(scores.device)
        ok = session.visible(layer, index, kv.pos)
        ok = ok.repeat_interleave(scores.shape[1] // ok.shape[1], 1)
        return torch.where(ok, scores, torch.finfo(scores.dtype).min)

    return hook


def _pattern(session: Session, layer: int) -> Any:
    from sinkscope.kv.session import Rows

    def hook(_module: Any, _args: Any, _kwargs: Any, pattern: Tensor) -> None:
        call, watches = session.call, session.watched(layer)
        if call is None or not watches:
            return
        index, kv = call.on(pattern.device), session.layer(layer)
        heads = session.target.n_kv_heads
        pos = session.positions(layer, pattern[:, :heads, :1].transpose(2, 3))
        for watch in watches:
            first = 0 if watch.last is None else max(0, pattern.shape[2] - watch.last)
            probs = pattern[:, :, first:].float()
            watch.fn(Rows(layer, first, probs, pos, index[:, first:], None, kv, call))

    return hook


def _queries(session: Session, layer: int) -> Any:
    def hook(_module: Any, _args: Any, _kwargs: Any, query: Tensor) -> None:
        session.remember(layer, query.transpose(1, 2))

    return hook
