"""The attention that a model selects by itself, while the tap is in its place."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.models.target import Target

NAME = "sinkscope"
"""Name under which transformers knows the tap."""


def set_attention(config: Any, name: str) -> None:
    """Make modules with this configuration use this attention; configurations inside it stay as they are."""
    config._attn_implementation_internal = name  # the public setter changes the configurations inside as well


def attention_name(config: Any) -> str:
    """Return the name of the attention that modules with this configuration use."""
    # Past the look-up of configurations, which takes a dozen times as long, because it is asked for at every token.
    return str(object.__getattribute__(config, "_attn_implementation_internal"))


def eager_attention(module: Any, *args: Any, **settings: Any) -> Any:
    """Attend as the model's own file defines it."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **settings)


class Stock:
    """The attention that a configuration selects by itself; of one that was copied while it was tapped, eager.

    Attributes:
        name: Its name in the configuration.
        kind: The name of the attention that runs.
        attention: What transformers calls by this name, which a user may have replaced.
        times: How often the configuration is tapped.
        agrees: Whether it gives what sinkscope recomputes: a function of transformers does, which was compared when the
            model was opened. None: it is the user's own, and not tried yet.
    """

    def __init__(self, config: Any) -> None:
        self.name = attention_name(config)
        self.kind = "eager" if self.name == NAME else self.name
        self.attention: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get(self.kind) or eager_attention
        self.times = 0
        function = getattr(self.attention, "func", self.attention)  # of a partial one, as of a kernel
        is_of_transformers = str(getattr(function, "__module__", "")).startswith("transformers.")
        self.agrees = True if function is eager_attention or is_of_transformers else None


_LOCK = threading.Lock()
_BEFORE_EAGER: dict[int, Stock] = {}
STOCK: dict[int, Stock] = {}
"""What tapped configurations select by themselves, by their ids."""


def stock_of(config: Any) -> Stock:
    """Return what a configuration selects when it is not tapped."""
    return STOCK.get(id(config)) or Stock(config)


@contextmanager
def switched(target: Target, name: str, before: dict[int, Stock]) -> Iterator[frozenset[int]]:
    """Context manager in which every configuration of the model selects an attention, in all threads; yields their ids.

    Args:
        target: The model; it may be switched several times.
        name: The attention.
        before: What the configurations select by themselves, by their ids, while they are switched.
    """
    configs = target.configs
    with _LOCK:
        for config in configs:
            if id(config) not in before:
                before[id(config)] = Stock(config)
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
