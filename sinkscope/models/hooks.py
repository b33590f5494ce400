"""Hooks on modules: what they see of a call, and what they may put in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from sinkscope.models.modules.experts import Args, Kwargs
from sinkscope.models.shards import cut, gathered

Hook = tuple[nn.Module, str, Any]
"""A module, "pre" or "post", and a function with the signature of torch's hooks with kwargs."""


def hidden_of(args: Args, kwargs: Kwargs) -> Tensor:
    """The hidden states among the arguments of a call."""
    if args:
        return args[0]
    return kwargs["hidden_states"]


def with_hidden(args: Args, kwargs: Kwargs, hidden: Tensor) -> tuple[Args, Kwargs]:
    """The arguments of a call, with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def on_input(fn: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A forward pre-hook with kwargs: `fn` sees the hidden states that enter a module, and may return others."""

    def hook(module: object, args: Args, kwargs: Kwargs) -> Any:
        seen = hidden_of(args, kwargs)
        new = fn(gathered(module, seen, "in_features"))
        if new is None:
            return None
        return with_hidden(args, kwargs, cut(module, new, seen))

    return hook


def on_output(fn: Callable[[Any], Any]) -> Callable[..., Any]:
    """A forward hook with kwargs: `fn` sees what a module returns, and may return something else."""

    def hook(module: object, _args: object, _kwargs: object, output: Any) -> Any:
        return cut(module, fn(gathered(module, output, "out_features")), output)

    return hook


def on_hidden(fn: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A forward hook with kwargs: `fn` sees the hidden states that leave a module, and may return others."""

    def hook(module: object, _args: object, _kwargs: object, output: Any) -> Any:
        seen = first_tensor(output)
        new = cut(module, fn(gathered(module, seen, "out_features")), seen)
        if new is None or not isinstance(output, tuple | list):
            return new
        return type(output)([new, *output[1:]])

    return hook


def first_tensor(output: Any) -> Tensor:
    """The hidden states in a layer's or attention module's output (a tensor, or a tuple that begins with one)."""
    if isinstance(output, tuple | list):
        return output[0]
    return output
