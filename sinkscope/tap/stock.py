"""The attention that a model selects by itself, while the tap is in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import AttentionInterface

from sinkscope.models.target import Target
from sinkscope.tap.internals import attention_name, eager_attention, set_attention

NAME = "sinkscope"
"""Name under which transformers knows the tap."""


@dataclass
class Stock:
    """The attention that a tapped configuration selects by itself, and how often it is tapped."""

    name: str
    attention: (
        Callable[..., Any] | None
    )  # None: the one in the model's own file; stored because every layer asks for it
    times: int = 0

    @classmethod
    def of(cls, config: Any) -> Stock:
        """Return what a configuration selects now."""
        return cls(attention_name(config), AttentionInterface().get(stock_name(config)))


STOCK: dict[int, Stock] = {}
"""What tapped configurations select by themselves, by their ids."""


def stock_name(config: Any) -> str:
    """Return the name of the attention that the model uses when it is not tapped."""
    stock = STOCK.get(id(config))
    name = attention_name(config) if stock is None else stock.name
    if name == NAME:
        return "eager"
    return name


def stock_attention(module: Any) -> Callable[..., Any]:
    """Return the attention function that a module uses when it is not tapped."""
    stock = STOCK.get(id(module.config)) or Stock.of(module.config)
    return stock.attention or eager_attention(module)


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
    """Context manager with the model's own eager attention, which returns its weights."""
    before = [(config, attention_name(config)) for config in configs_of(target)]
    try:
        for config, _ in before:
            set_attention(config, "eager")
        yield
    finally:
        for config, name in before:
            set_attention(config, name)
