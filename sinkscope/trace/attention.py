"""Attention rows, queries and keys of every layer, while the model's own fast attention runs underneath.

Nothing of size query x key is kept: an observer sees `rows_per_chunk` rows at a time. The rows include whatever the
architecture does to its scores: soft cap, window, padding, learned sink logits. Under a cache policy they are those
over what the cache keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target
from sinkscope.trace.internals import attention_name, set_attention
from sinkscope.trace.tap import Attention, alone, attention_probs, configs_of, listening

__all__ = ["QKObserver", "RowObserver", "attention_probs", "attention_rows", "queries_and_keys", "refuse_opaque"]

RowObserver = Callable[[int, int, Tensor], None]
"""Called as `observer(layer, first_query, rows)` with rows `[batch head query key]`, float32."""
QKObserver = Callable[[int, bool, Tensor, Tensor], None]
"""Called as `observer(layer, rotated, query, key)`; `[batch head pos d_head]`, keys one per key/value head."""


@contextmanager
def attention_rows(
    target: Target, observer: RowObserver, *, layers: list[int] | None = None, rows_per_chunk: int = 256
) -> Iterator[None]:
    """For the length of a `with`, every forward pass in this context shows its attention rows to `observer`.

    Args:
        target: the model.
        observer: called as `observer(layer, first_query, rows)`; rows `[batch head query key]`, float32, after
            softmax. Where the model has learned sink logits they take part and rows sum to less than one. Keys are
            those in the cache: under a cache policy the ones that it keeps, so a key's number is not its position.
        layers: only these layers; None: all.
        rows_per_chunk: queries shown at a time, so memory is `batch x head x rows_per_chunk x key`.

    On a TransformerBridge, and for architectures outside transformers' attention interface (Falcon), the model
    itself builds whole query x key matrices; they are handed on in one piece.
    """
    wanted = range(target.n_layers) if layers is None else layers

    def see(call: Attention) -> None:
        if (layer := call.layer) in wanted:
            call.show(lambda first, rows: observer(layer, first, rows), by_mask=True, chunk=rows_per_chunk)

    def whole(layer: int) -> Any:
        return lambda _m, _a, _k, out: observer(layer, 0, (out if target.kind == "bridge" else out[1]).float())

    if target.kind == "bridge":
        points = target.model.hook_dict
        with target.hooks(*((points[f"blocks.{i}.attn.hook_pattern"], "post", whole(i)) for i in wanted)):
            yield
    elif target.adapter.attention_interface:
        with listening(target, see):
            yield
    else:
        hooks = [(target.sub(i, target.adapter.attn), "post", whole(i)) for i in wanted]
        with _eager(target), target.hooks(*hooks):
            yield


@contextmanager
def queries_and_keys(target: Target, observer: QKObserver, layers: list[int]) -> Iterator[None]:
    """For the length of a `with`, every forward pass shows its queries and keys to `observer`.

    They are taken where transformers hands them to its attention function, so norms on queries and keys, fused
    projections and partial rotary need no code of their own. Before rotary they are the ones that the same module makes
    when it is told that every position is the same: it is called once more with a rotation by zero.

    Args:
        target: the model; plain or nnsight.
        observer: called as `observer(layer, rotated, query, key)`: with `rotated` False, before rotary (after norms on
            queries and keys), and with True as they meet. On models without rotary it is called twice with the same.
        layers: the layers to watch.

    Raises:
        UnsupportedError: a TransformerBridge, whose attention is its own, or an architecture outside transformers'
            attention interface (Falcon); a forward pass with a cache, into which the extra call would write.
    """
    refuse_opaque(target)
    rotary: set[int] = set()
    nested = False

    def unrotated(layer: int) -> Any:
        """Calls the attention module once more, with a rotation by zero."""

        def hook(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal nested
            if nested or kwargs.get("position_embeddings") is None:
                return
            if kwargs.get("past_key_values") is not None:
                raise UnsupportedError(
                    "queries and keys before rotary are measured by calling the attention twice, which would write "
                    "into the cache twice: run the model with use_cache=False"
                )
            cos, sin = kwargs["position_embeddings"]
            rotary.add(layer)
            nested = True
            try:
                with alone(see):
                    module(*args, **{**kwargs, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))})
            finally:
                nested = False

        return hook

    def see(call: Attention) -> None:
        if (layer := call.layer) in layers:
            if nested or layer not in rotary:
                observer(layer, False, call.query, call.key)
            if not nested:
                observer(layer, True, call.query, call.key)

    hooks = [(target.sub(i, target.adapter.attn), "pre", unrotated(i)) for i in layers]
    with listening(target, see), target.hooks(*hooks):
        yield


def refuse_opaque(target: Target) -> None:
    """A model whose attention is not called through transformers shows no queries and keys."""
    if target.kind == "bridge" or not target.adapter.attention_interface:
        bridge = target.kind == "bridge"
        what = "a TransformerBridge" if bridge else target.adapter.model_type
        remedy = "use a plain model (backend='hf')" if bridge else "give another model"
        raise UnsupportedError(f"queries and keys of {what} are not offered: {remedy}")


@contextmanager
def _eager(target: Target) -> Iterator[None]:
    before = [(config, attention_name(config)) for config in configs_of(target)]
    try:
        for config, _ in before:
            set_attention(config, "eager")
        yield
    finally:
        for config, name in before:
            set_attention(config, name)
