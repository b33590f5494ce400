"""The attention that a model selects by itself, while the tap is in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from sinkscope.models.target import Target
from sinkscope.tap.internals import attention_functions, attention_name, eager_attention, set_attention

NAME = "sinkscope"
"""Name under which transformers knows the tap."""


@dataclass
class Stock:
    """The attention that a tapped configuration selects by itself.

    Attributes:
        name: Its name in the configuration.
        kind: The name of the attention that runs.
        attention: What transformers calls by this name, which a user may have replaced; None: the function in the
            model's own file.
        times: How often the configuration is tapped.
        agrees: Whether a function that is none of transformers' gives what sinkscope recomputes; None: not tried yet.
    """

    name: str
    kind: str
    attention: Callable[..., Any] | None
    times: int = 0
    agrees: bool | None = None

    @classmethod
    def of(cls, config: Any) -> Stock:
        """Return what a configuration selects now."""
        name = attention_name(config)
        kind = "eager" if name == NAME else name  # of a configuration that was copied while it was tapped
        return cls(name, kind, attention_functions().get(kind))

    def function(self, module: Any) -> Callable[..., Any]:
        """Return the attention function of a module."""
        return self.attention or eager_attention(module)

    @property
    def is_of_transformers(self) -> bool:
        """Whether it is a function of transformers, which was compared when the model was opened."""
        function = getattr(self.attention, "func", self.attention)  # of a partial one, as of a kernel
        return function is None or str(getattr(function, "__module__", "")).startswith("transformers.")


_LOCK = threading.Lock()
_BEFORE_EAGER: dict[int, Stock] = {}
STOCK: dict[int, Stock] = {}
"""What tapped configurations select by themselves, by their ids."""


def stock_of(config: Any) -> Stock:
    """Return what a configuration selects when it is not tapped."""
    return STOCK.get(id(config)) or Stock.of(config)


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
def switched(target: Target, name: str, before: dict[int, Stock]) -> Iterator[frozenset[int]]:
    """Context manager in which every configuration of the model selects an attention, in all threads; yields their ids.

    Args:
        target: The model; it may be switched several times.
        name: The attention.
        before: What the configurations select by themselves, by their ids, while they are switched.
    """
    configs = configs_of(target)
    with _LOCK:
        for config in configs:
            if id(config) not in before:
                before[id(config)] = Stock.of(config)
            before[id(config)].times += 1
            set_attention(config, name)
    try:
        yield frozenset(map(id, configs))
    finally:
        with _LOCK:
            for config in configs:
                stock = before[id(config)]
                stock.times -= 1
                if stock.times == 0:
                    set_attention(config, stock.name)
                    del before[id(config)]


def eager(target: Target) -> AbstractContextManager[frozenset[int]]:
    """Return a context manager with the model's own eager attention, which returns its weights, in all threads."""
    return switched(target, "eager", _BEFORE_EAGER)
