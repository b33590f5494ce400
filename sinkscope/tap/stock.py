"""The attention that a model selects by itself, while the tap is in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.models.draws import draws
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.short_passes import relative_error
from sinkscope.models.target import Target
from sinkscope.tap.internals import attention_functions, attention_name, eager_attention, set_attention
from sinkscope.tap.rows import attention_probs

NAME = "sinkscope"
"""Name under which transformers knows the tap."""
_KEYS = 8  # of the queries and keys by which a function of the user's own is tried
_TOLERATED = 0.02  # difference from what is recomputed, of its size; in float16 it is a thousandth


@dataclass
class Stock:
    """The attention that a tapped configuration selects by itself.

    Attributes:
        name: Its name.
        attention: What transformers calls by this name, which others may have replaced; None: the function in the
            model's own file.
        times: How often the configuration is tapped.
        agrees: Whether a function that is none of transformers' gives what sinkscope recomputes; None: not tried yet.
    """

    name: str
    attention: Callable[..., Any] | None
    times: int = 0
    agrees: bool | None = None

    @classmethod
    def of(cls, config: Any) -> Stock:
        """Return what a configuration selects now."""
        return cls(attention_name(config), attention_functions().get(stock_name(config)))

    @property
    def is_of_transformers(self) -> bool:
        """Whether it is a function of transformers, which was compared when the model was opened."""
        function = getattr(self.attention, "func", self.attention)  # of a partial one, as of a kernel
        return function is None or str(getattr(function, "__module__", "")).startswith("transformers.")

    def check_recomputed(self, module: Any, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """Refuse a function whose output for the last query is not what sinkscope recomputes of it.

        Args:
            module: An attention module.
            query: `[batch head query d_head]`, after rotary.
            key: `[batch kv_head key d_head]`.
            value: `[batch kv_head key d_value]`.
            scaling: Factor on the scores.

        Raises:
            UnsupportedError: It is not.
        """
        if self.is_of_transformers:
            return
        if self.agrees is None:
            assert self.attention is not None
            query = query[:1, :, -1:]  # which sees every key, with a mask or without
            rows = attention_probs(query, key[:1], None, scaling=scaling)
            right = rows @ per_query_head(value[:1], rows.shape[1]).float()
            given = self.attention(module, query, key[:1], value[:1], None, scaling=scaling, dropout=0.0)[0]
            self.agrees = relative_error(given.transpose(1, 2).float(), right) < _TOLERATED
        if not self.agrees:
            raise UnsupportedError(
                f"attention is a function of your own, registered as {self.name!r}, and its output is not softmax(q k) "
                "v, so that it cannot be recomputed for some keys or queries: load the model with "
                "attn_implementation='sdpa', or put back what transformers has by that name"
            )


_LOCK = threading.Lock()
_BEFORE_EAGER: dict[int, Stock] = {}
STOCK: dict[int, Stock] = {}
"""What tapped configurations select by themselves, by their ids."""


def stock_of(config: Any) -> Stock:
    """Return what a configuration selects when it is not tapped."""
    return STOCK.get(id(config)) or Stock.of(config)


def stock_name(config: Any) -> str:
    """Return the name of the attention that the model uses when it is not tapped."""
    stock = STOCK.get(id(config))
    name = attention_name(config) if stock is None else stock.name
    if name == NAME:
        return "eager"
    return name


def stock_attention(module: Any) -> Callable[..., Any]:
    """Return the attention function that a module uses when it is not tapped."""
    return stock_of(module.config).attention or eager_attention(module)


def check_recomputed(target: Target) -> None:
    """Refuse a model that attends by a function of the user's own which is not softmax(q k) v; it is tried.

    Raises:
        UnsupportedError: It does.
    """
    foreign = [stock for stock in map(stock_of, configs_of(target)) if not stock.is_of_transformers]
    if not foreign or not target.adapter.attention_interface or not target.attending:
        return
    layer = target.attending[0]
    width, processes = len(target.head_columns(layer, 0)), target.shards.size
    numbers = torch.randn(3, 1, target.n_heads // processes, _KEYS, width, generator=draws(0, "foreign attention"))
    query, key, value = numbers.to(target.device, target.dtype)
    kv_heads = target.n_kv_heads // processes
    for stock in foreign:
        module = target.sub(layer, "attn")
        stock.check_recomputed(module, query, key[:, :kv_heads], value[:, :kv_heads], width**-0.5)


def configs_of(target: Target) -> list[Any]:
    """Return every distinct configuration that the attention of the decoder, or what makes its mask, may read.

    A vision or audio tower beside the decoder attends in its own way.
    """
    path = target.adapter.base.split(".")
    around = [target.hf.get_submodule(".".join(path[:depth])) for depth in range(len(path))]
    configs: dict[int, Any] = {}
    for module in [*around, *target.base.modules()]:
        config = getattr(module, "config", None)
        if hasattr(config, "model_type"):
            configs[id(config)] = config
    return list(configs.values())


@contextmanager
def eager(target: Target) -> Iterator[None]:
    """Context manager with the model's own eager attention, which returns its weights, in all threads."""
    configs = configs_of(target)
    with _LOCK:
        for config in configs:
            before = _BEFORE_EAGER.setdefault(id(config), Stock(attention_name(config), None))
            before.times += 1
            set_attention(config, "eager")
    try:
        yield
    finally:
        with _LOCK:
            for config in configs:
                before = _BEFORE_EAGER[id(config)]
                before.times -= 1
                if before.times == 0:
                    set_attention(config, before.name)
                    del _BEFORE_EAGER[id(config)]
