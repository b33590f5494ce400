"""The same on a TransformerBridge, whose attention is its own: visibility and rows through its hook points.

Some architectures (OPT) leave attention to the model below; then the session has seen it, and nothing is done here.
A bridge builds the whole query x key matrix in every layer, so long contexts belong on the plain model.
"""

from __future__ import annotations

import threading
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
        queries: dict[int, Tensor] = {}  # by thread
        pairs.append((points[place + "hook_attn_scores"], "post", _scores(session, layer, queries)))
        pairs.append((points[place + "hook_pattern"], "post", _pattern(session, layer)))
        # Of models without rotary positions the projection is what attends. Where rotary positions are applied out of
        # sight (NeoX, Phi-3) neither hook fires, and `Session.window_rows` says so.
        rotary = place + "hook_rot_q" in points
        point = points.get(place + ("hook_rot_q" if rotary else "q.hook_out"))
        if point is not None and (rotary or session.target.adapter.absolute_positions):
            pairs.append((point, "post", _queries(session, queries)))
    return pairs


def _scores(session: Session, layer: int, queries: dict[int, Tensor]) -> Any:
    def hook(_module: Any, _args: Any, _kwargs: Any, scores: Tensor) -> Tensor | None:
        kv = session.layer(layer)
        if (query := queries.pop(threading.get_ident(), None)) is not None:
            session.remember(layer, query)
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
        if call is None or not watches or layer in session.attended:
            return
        index, kv = call.on(pattern.device), session.layer(layer)
        heads = session.target.n_kv_heads
        pos = session.positions(layer, pattern[:, :heads, :1].transpose(2, 3))
        for watch in watches:
            first = 0 if watch.last is None else max(0, pattern.shape[2] - watch.last)
            probs = pattern[:, :, first:].float()
            watch.fn(Rows(layer, first, probs, pos, index[:, first:], None, kv, call))

    return hook


def _queries(session: Session, queries: dict[int, Tensor]) -> Any:
    def hook(_module: Any, _args: Any, _kwargs: Any, query: Tensor) -> None:
        if query.ndim == 3:  # a projection: batch pos (head d_head)
            query = query.unflatten(-1, (session.target.n_heads, -1)).transpose(1, 2)
        queries[threading.get_ident()] = query  # remembered where scores follow: those are a bridge's own

    return hook
