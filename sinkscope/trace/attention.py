"""Attention rows of every layer, recomputed in query chunks while the model's own fast attention runs underneath.

Nothing of size query x key is kept: an observer sees `rows_per_chunk` rows at a time. The rows include whatever the
architecture does to its scores: soft cap, window, padding, learned sink logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target

NAME = "sinkscope-rows"
RowObserver = Callable[[int, int, Tensor], None]
"""Called as `observer(layer, first_query, rows)` with rows `[batch head query key]`, float32."""


@dataclass
class _Session:
    observer: RowObserver
    rows_per_chunk: int
    wanted: frozenset[int] | None


_session: ContextVar[_Session | None] = ContextVar("sinkscope_rows", default=None)


@contextmanager
def attention_rows(
    target: Target, observer: RowObserver, *, layers: list[int] | None = None, rows_per_chunk: int = 256
) -> Iterator[None]:
    """For the length of a `with`, every forward pass in this context shows its attention rows to `observer`.

    Args:
        target: the model.
        observer: called as `observer(layer, first_query, rows)`; rows `[batch head query key]`, float32, after
            softmax. Where the model has learned sink logits they take part and rows sum to less than one.
        layers: only these layers; None: all.
        rows_per_chunk: queries shown at a time, so memory is `batch x head x rows_per_chunk x key`.

    On a TransformerBridge, and for architectures outside transformers' attention interface (Falcon), the model
    itself builds whole query x key matrices; they are handed on in one piece.

    Raises:
        UnsupportedError: inside a `with` of a cache policy or an attention observer.
    """
    wanted = None if layers is None else frozenset(layers)
    refuse_in_session(target)
    if target.kind == "bridge":
        with target.hooks(*_bridge_hooks(target, observer, wanted)):
            yield
        return
    interface = target.adapter.attention_interface
    hooks = [] if interface else _module_hooks(target, observer, wanted)
    token = _session.set(_Session(observer, rows_per_chunk, wanted))
    try:
        with attending(target, NAME if interface else "eager", attend), target.hooks(*hooks):
            yield
    finally:
        _session.reset(token)


def attention_probs(
    query: Float[Tensor, "batch head query d_head"],
    key: Float[Tensor, "batch kv_head key d_head"],
    mask: Bool[Tensor, "#batch #head query key"] | None,
    *,
    scaling: float,
    first_query: int,
    softcap: float | None = None,
    sinks: Float[Tensor, " head"] | None = None,
) -> Float[Tensor, "batch head query key"]:
    """Softmax of scaled scores for some rows, float32.

    Args:
        query: after rotary.
        key: after rotary, one per key/value head; query heads share them in groups.
        mask: True where a key may be seen; None: causal, the last query sees every key.
        scaling: factor on the scores.
        first_query: number of keys that the first query may see, less one (only used when `mask` is None).
        softcap: `cap * tanh(score / cap)` (Gemma 2).
        sinks: a learned logit per head that joins the softmax and is dropped (gpt-oss).
    """
    groups = query.shape[1] // key.shape[1]
    grouped = query.unflatten(1, (key.shape[1], groups)).float()
    scores = (torch.einsum("bkgqd,bknd->bkgqn", grouped, key.float()) * scaling).flatten(1, 2)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None:
        rows = torch.arange(first_query, first_query + query.shape[2], device=query.device)
        mask = torch.arange(key.shape[2], device=query.device) <= rows[:, None]
    scores.masked_fill_(~mask, torch.finfo(torch.float32).min)
    if sinks is None:
        return torch.softmax(scores, -1)
    extra = sinks.float()[None, :, None, None].expand(scores.shape[0], -1, scores.shape[2], 1)
    return torch.softmax(torch.cat([scores, extra], -1), -1)[..., :-1]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls: stock output, and rows for the observer."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    session = _session.get()
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    stock = softcap is None and s_aux is None
    watched = session is not None and (session.wanted is None or module.layer_idx in session.wanted)
    pieces: list[Tensor] = []
    if watched or not stock:
        step = session.rows_per_chunk if session is not None else 256
        offset = key.shape[2] - query.shape[2]
        for start in range(0, query.shape[2], step):
            stop = min(start + step, query.shape[2])
            mask = None if attention_mask is None else attention_mask[:, :, start:stop, : key.shape[2]]
            rows = attention_probs(
                query[:, :, start:stop],
                key,
                mask,
                scaling=scale,
                first_query=offset + start,
                softcap=softcap,
                sinks=s_aux,
            )
            if watched and session is not None:
                session.observer(int(module.layer_idx), start, rows)
            if not stock:
                grouped = rows.to(value.dtype).unflatten(1, (value.shape[1], -1))
                pieces.append(torch.einsum("bkgqn,bknd->bkgqd", grouped, value).flatten(1, 2))
    if not stock:
        return torch.cat(pieces, 2).transpose(1, 2).contiguous(), None
    out, _ = sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
    )
    return out, None


@contextmanager
def attending(target: Target, name: str, function: Callable[..., tuple[Tensor, Tensor | None]]) -> Iterator[None]:
    """For the length of a `with`, every configuration of the model asks for the attention `name`.

    Args:
        target: the model.
        name: if transformers does not know it yet, `function` is registered under it, with the masks of SDPA (once; it
            changes no model).
        function: with the signature of transformers' attention functions.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    if name not in AttentionInterface() and name != "eager":
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)
    configs = configs_of(target)
    previous = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, before in zip(configs, previous, strict=True):
            config._attn_implementation = before


def refuse_opaque(target: Target) -> None:
    """A model whose attention is not called through transformers shows no queries and keys."""
    if target.kind == "bridge" or not target.adapter.attention_interface:
        bridge = target.kind == "bridge"
        what = "a TransformerBridge" if bridge else target.adapter.model_type
        remedy = "use a plain model (backend='hf')" if bridge else "give another model"
        raise UnsupportedError(f"queries and keys of {what} are not offered: {remedy}")


def configs_of(target: Target) -> list[Any]:
    """Every distinct configuration object below the model that its attention may read."""
    found = {id(m.config): m.config for m in target.hf.modules() if hasattr(getattr(m, "config", None), "model_type")}
    return list(found.values())


def refuse_in_session(target: Target) -> None:
    """Two at a time cannot replace the attention of a model."""
    if any(str(config._attn_implementation).startswith("sinkscope-kv") for config in configs_of(target)):
        raise UnsupportedError(
            f"{target.name} is inside a `with` of a cache policy or an attention observer, which watches its attention "
            "already: measure outside of it, or enter `Observe(fn)` together with the policy",
            page="kv-session",
        )


def _bridge_hooks(target: Target, observer: RowObserver, wanted: frozenset[int] | None) -> list[tuple[Any, str, Any]]:
    def hook(layer: int) -> Any:
        return lambda _m, _a, _k, out: observer(layer, 0, out.float())

    points = target.model.hook_dict
    return [
        (points[f"blocks.{i}.attn.hook_pattern"], "post", hook(i))
        for i in range(target.n_layers)
        if wanted is None or i in wanted
    ]


def _module_hooks(target: Target, observer: RowObserver, wanted: frozenset[int] | None) -> list[tuple[Any, str, Any]]:
    def hook(layer: int) -> Any:
        return lambda _m, _a, _k, out: observer(layer, 0, out[1].float())

    return [
        (target.sub(i, target.adapter.attn), "post", hook(i))
        for i in range(target.n_layers)
        if wanted is None or i in wanted
    ]
