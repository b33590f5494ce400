"""The attention tap: the single attention function and mask function that tapped models use.

Listeners see the attention of every layer as the model computes it, may replace it, and may request its rows. If none
has anything to do, the model's own attention runs with the model's own mask, so the result equals the stock one bit for
bit (under a cache policy, up to rounding where a sliding window would have dropped keys). The tap does not know who
listens, so measurements work under cache policies and guards.

Measurements listen through `attention_rows`, which shows them the rows of a layer at once. The rows include everything
the architecture does to its scores: soft cap, window, padding, learned sink logits. Under a cache policy they cover the
keys that the cache keeps.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import ref

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from sinkscope.engine.attention import (
    NAME,
    STOCK,
    Attention,
    AttentionOutput,
    AttentionRows,
    Shown,
    Stock,
    eager,
    stock_of,
    switched,
)
from sinkscope.engine.visible import CausalMask, FunctionMask, MaskSource, TensorMask, additive
from sinkscope.errors import UnsupportedError
from sinkscope.models.hooks import Hook, without_compiler
from sinkscope.models.layers import layer_window
from sinkscope.models.quirks import attends_again, check_no_indexer
from sinkscope.models.target import Target


@dataclass(eq=False)
class Listener:
    """What sees the attention of a model in the thread that made it: a measurement, or a run with its actors.

    Attributes:
        see: Called with the attention of every layer.
        first_query: Column of the first query of the call, if it is known.
        has_gaps: Whether tokens are missing in the cache, so that a mask by the place of keys would be wrong.
        idle: Whether it has nothing to do by itself. If all listeners are idle, the model computes attention alone.
        was_reached: Whether attention of the model came by.
        functions: The function of the latest mask for each length of windows or chunks, None for full attention.
        latest: The queries of the latest attention.
        outside: Called with a module that attends while the decoder is in no call, which may refuse it.
        in_call: Whether the decoder is in a call.
        thread: Number of the thread.
    """

    see: Callable[[Attention], None]
    first_query: int | None = None
    has_gaps: bool = False
    idle: bool = False
    was_reached: bool = False
    functions: dict[int | None, FunctionMask] = field(default_factory=dict)
    latest: ref[Tensor] | None = None
    outside: Callable[[Any], None] | None = None
    in_call: bool = False
    thread: int = field(default_factory=threading.get_ident)


def check_attention_known(target: Target) -> None:
    """Refuse a model that attends by a function of the user's own.

    Raises:
        UnsupportedError: It does.
    """
    for config in target.configs:
        if not stock_of(config).is_known:
            raise UnsupportedError(
                f"attention is a function of your own, registered as {stock_of(config).name!r}, which cannot be "
                "recomputed for some keys or queries: load the model with attn_implementation='sdpa', or put back what "
                "transformers has by that name"
            )


@contextmanager
def tapped(target: Target, listener: Listener) -> Iterator[None]:
    """Context manager: every configuration of the model selects the tap's attention, at which somebody listens.

    The names are registered with transformers once; this changes no other model. A model may be tapped several times.
    Attention outside transformers' interface is not seen. An attention of the user's that was registered without a mask
    function gets one that makes no masks: transformers looks the name up twice while it makes a mask, and another
    thread may enter or leave in between.
    """
    if NAME not in AttentionInterface():
        AttentionInterface.register(NAME, _attend)
        AttentionMaskInterface.register(NAME, _mask)
    for config in target.configs:
        name = stock_of(config).kind
        if name not in ALL_MASK_ATTENTION_FUNCTIONS:
            AttentionMaskInterface.register(name, _no_mask)
    with switched(target, NAME, STOCK, listener), without_compiler():
        yield


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> AttentionOutput:
    """The attention function that transformers calls in every layer."""
    stock = STOCK.get(id(module.config)) or stock_of(module.config)
    listeners = _listening(stock, module)
    is_idle = all(listener.idle for listener in listeners)
    has_gaps = any(listener.has_gaps for listener in listeners)
    check_no_indexer(module, kwargs)
    function: FunctionMask | None = getattr(attention_mask, _FUNCTION, None)
    if has_gaps:
        if function is None:
            function = _function_without_mask(listeners, module, attention_mask, kwargs)
        attention_mask = None  # it is by the place of keys
        is_idle = is_idle and (function is None or function.is_causal)
    if is_idle:
        if has_gaps:
            attention_mask = stock.unmasked(query, key)
        return stock.attention(module, query, key, value, attention_mask, **kwargs)
    is_repeated = attends_again(listeners[0].latest, query)
    listeners[0].latest = ref(query)
    if function is None and not (isinstance(attention_mask, Tensor) and attention_mask.ndim == 4):
        function = _function_of_layer(listeners, module, kwargs)
    first_query = _first_query(listeners, key.shape[2] - query.shape[2])
    placement = _placement(function, attention_mask, has_gaps, first_query, query.shape[2], key.shape[2])
    call = Attention(
        module=module,
        layer=int(module.layer_idx),
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        source=placement.source,
        first_key=placement.first_key,
        first_query=placement.first_query,
        settings=kwargs,
        selected=stock,
        is_repeated=is_repeated,
        **_scores_of(stock, module, query, kwargs),
    )
    for listener in listeners:
        listener.see(call)
    return call.finish()


def _listening(stock: Stock, module: Any) -> list[Listener]:
    """The listeners of this thread, each told that attention came by; a plain loop, because every layer comes here."""
    thread = threading.get_ident()
    listeners: list[Listener] = []
    for listener in stock.users:
        if listener.thread == thread:
            if listener.outside is not None and not listener.in_call:
                listener.outside(module)
            listener.was_reached = True
            listeners.append(listener)
    return listeners


def _scores_of(stock: Stock, module: Any, query: Tensor, settings: dict[str, Any]) -> dict[str, Any]:
    """How scores are made: their factor, a soft cap, and learned sinks."""
    scaling = settings.get("scaling")
    softcap = settings.get("softcap")
    sinks = settings.get("s_aux")
    if scaling is None:  # what the model passes takes precedence: some models scale their queries (OPT)
        scaling = getattr(module, "scaling", None) or query.shape[-1] ** -0.5
    if stock.kind == "sdpa":  # it drops these, or refuses to run
        softcap = sinks = None
    return {"scaling": float(scaling), "softcap": softcap, "sinks": sinks}


def _function_without_mask(
    listeners: list[Listener], module: Any, mask: Any, settings: dict[str, Any]
) -> FunctionMask | None:
    """What a mask was made of that does not come with it, where tokens are missing in the cache; None if none was made.

    A mask that was moved to another device comes without it, and still shows everything.

    Raises:
        UnsupportedError: The layer has made a mask of its own.
    """
    if isinstance(mask, Tensor) and mask.ndim == 4 and bool(additive(mask, torch.float32).any()):
        raise UnsupportedError(
            f"{type(module).__name__} makes a mask of its own for the keys that it finds, which says nothing of a "
            "cache that has lost tokens: use another model for cache policies and guards that prune"
        )
    return _function_of_layer(listeners, module, settings)


def _function_of_layer(listeners: list[Listener], module: Any, settings: dict[str, Any]) -> FunctionMask | None:
    """The function of which the mask of a layer would be made, by the window or chunk that it says; None if none was.

    It says it in the call, or in its configuration.
    """
    window = settings.get("sliding_window")
    if window is None:
        window = layer_window(module.config, int(module.layer_idx))
    function = None
    for listener in listeners:
        functions = listener.functions
        if function is None and functions:
            function = functions.get(window) or functions.get(None) or next(iter(functions.values()))
    return function


@dataclass(frozen=True)
class _Placement:
    """What says who sees whom in an attention, and the columns of its first key and query."""

    source: MaskSource
    first_key: int
    first_query: int


def _first_query(listeners: list[Listener], by_keys: int) -> int:
    """The column of the first query, which a listener may know, and else follows from the number of keys."""
    first_query = by_keys
    for listener in listeners:
        if listener.first_query is not None:
            first_query = listener.first_query
    return first_query


def _placement(
    function: FunctionMask | None, mask: Any, has_gaps: bool, first_query: int, n_queries: int, n_keys: int
) -> _Placement:
    """Where the queries and keys of an attention stand.

    Args:
        function: The function of its mask. None: the mask itself says who sees whom, or there is none.
        mask: The mask.
        has_gaps: Whether tokens are missing in the cache.
        first_query: The column of the first query.
        n_queries: Number of queries.
        n_keys: Number of keys.
    """
    if function is not None:
        source = function if has_gaps or not function.is_skipped else CausalMask()
        return _Placement(source, function.first_key, function.first_query)
    if isinstance(mask, Tensor) and mask.ndim == 4:
        # It ends with the last query, and has a column for each token so far, or for each key.
        total = first_query + n_queries
        first_key = max(0, total - n_keys)
        return _Placement(TensorMask(mask, first_query, max(0, total - mask.shape[-1])), first_key, first_query)
    return _Placement(CausalMask(), 0, first_query)


_FUNCTION = "sinkscope_function"
"""Attribute of a mask, which lives as long as its call, that holds the function of which it was made."""


def _mask(*, config: Any, **kwargs: Any) -> Any:
    """The mask function that transformers calls once per forward call and kind of layer: the model's own mask.

    What it was made of is kept with it. Where tokens are missing in the cache, a mask would be by the place of keys:
    one without content brings what it would be made of to the layers that it is for.
    """
    stock = STOCK.get(id(config)) or stock_of(config)
    name = stock.kind
    listeners: list[Listener] = []
    has_gaps = False
    for listener in stock.users:
        if listener.thread == threading.get_ident():
            listeners.append(listener)
            has_gaps = has_gaps or listener.has_gaps
    if has_gaps:
        shape = kwargs["batch_size"], 1, kwargs["q_length"], kwargs["kv_length"]
        mask = torch.ones((), dtype=torch.bool, device=kwargs.get("device")).expand(shape)
    else:
        mask = ALL_MASK_ATTENTION_FUNCTIONS[name](config=config, **kwargs)
    function = FunctionMask(
        kwargs.get("mask_function", causal_mask_function),
        kwargs.get("attention_mask"),
        by_vmap=bool(kwargs.get("use_vmap", False)),
        local=kwargs.get("local_size"),
        first_query=int(kwargs.get("q_offset", 0)),
        first_key=int(kwargs.get("kv_offset", 0)),
        is_skipped=mask is None
        and ALL_MASK_ATTENTION_FUNCTIONS[name] is not _no_mask
        and "flash" not in name
        and kwargs.get("allow_is_causal_skip", True)
        and not kwargs.get("allow_is_bidirectional_skip", False),
    )
    for listener in listeners:
        listener.functions[function.local] = function
    if mask is not None:
        with suppress(AttributeError, TypeError):
            setattr(mask, _FUNCTION, function)
    return mask


def _no_mask(**_: Any) -> None:
    """The mask function of an attention that has none, to which transformers gives no mask either."""


@contextmanager
def attention_rows(
    target: Target,
    observer: Shown,
    *,
    layers: list[int] | None = None,
    begin: int = 0,
    at_once: bool = True,
) -> Iterator[None]:
    """Context manager: every forward pass in this context shows its attention rows to `observer`.

    Args:
        target: The model.
        observer: Called with `AttentionRows`; of a model that is split over processes, with those of all heads.
        layers: Layers to show, which attend. None shows all.
        begin: The first query whose row is shown.
        at_once: Whether a layer shows all its rows at once, where the model does not build them itself.

    Raises:
        UnsupportedError: The model attends by a function of the user's own, or gives no rows.
    """
    wanted = target.attending if layers is None else layers
    shown = of_all_heads(target, observer)

    def see(call: Attention) -> None:
        if call.layer in wanted:
            call.show(shown, first=begin, at_once=at_once)

    is_bridge = target.kind == "bridge"
    if not is_bridge and target.adapter.attention_interface:
        check_attention_known(target)
        with tapped(target, Listener(see)):
            yield
        return
    hooks = list[Hook]()
    for layer in wanted:

        def read(*values: Any, layer: int = layer) -> None:
            rows = values[-1] if is_bridge else _returned_rows(target, layer, values[-1])
            observer(AttentionRows(layer, begin, rows[:, :, begin:].float()))

        if is_bridge:
            module = target.model.hook_dict[f"blocks.{layer}.attn.hook_pattern"]
        else:
            module = target.sub(layer, "attn")
        hooks.append((module, "post", read))
    with nullcontext() if is_bridge else eager(target), target.hooks(*hooks):
        yield


def of_all_heads(target: Target, fn: Shown) -> Shown:
    """Return what shows rows to a function; of a model that is split over processes, those of all heads."""
    if target.processes == 1:
        return fn

    def show(rows: AttentionRows) -> None:
        pos = None if rows.pos is None else target.shards.gather(rows.pos, target.n_kv_heads, 1)
        fn(replace(rows, probs=target.shards.gather(rows.probs, target.n_heads, 1), pos=pos))

    return show


def _returned_rows(target: Target, layer: int, output: Any) -> Float[Tensor, "batch head query key"]:
    """The attention rows that a module outside transformers' attention interface returns beside its output."""
    rows = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(rows, Tensor) or rows.ndim != 4:
        raise UnsupportedError(
            f"layer {layer} of {target.name} does not return its attention, which is computed inside its module: use "
            "another model for attention"
        )
    return rows


def check_attention_visible(target: Target) -> None:
    """Refuse a model whose attention does not go through transformers.

    Raises:
        UnsupportedError: It is a TransformerBridge, or its modules compute attention themselves.
    """
    if target.kind == "bridge":
        raise UnsupportedError(
            "a TransformerBridge computes its own attention, on which no cache policy, guard, knockout or observer "
            "acts: give the plain Hugging Face model"
        )
    if not target.adapter.attention_interface:
        raise UnsupportedError(
            f"a model of type {target.adapter.model_type!r} computes attention inside its modules, where no cache "
            "policy, guard, knockout or attention observer reaches it: use another model for these; find-sinks and "
            "edits work on this one"
        )
