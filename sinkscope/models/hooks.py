"""Hooks on modules: what they see of a call, and what they may put in its place."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.shards import Shards

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Hook = tuple[nn.Module, str, Any]
"""A module, a moment, and a function with the signature of torch's hooks. Moments are "pre", "first" (before all others
that are "pre"), "post", and "always" (after an error, too)."""
OWN_HOOKS = set[int]()
"""Numbers of the hooks of sinkscope that are on modules."""


class _Depth(threading.local):
    """How many times this thread has gone apart."""

    value = 0


DEPTH = _Depth()


@contextmanager
def apart() -> Iterator[None]:
    """Context manager in which only those hooks of sinkscope act in this thread that are put on inside it."""
    DEPTH.value += 1
    try:
        yield
    finally:
        DEPTH.value -= 1


def has_hooks(module: nn.Module) -> bool:
    """Return whether a module has hooks of its user, which may change what it gives."""
    return not OWN_HOOKS.issuperset([*vars(module)["_forward_pre_hooks"], *vars(module)["_forward_hooks"]])


@contextmanager
def evaluating(hf: nn.Module) -> Iterator[None]:
    """Context manager in which no dropout acts; afterwards every module has the mode it had."""
    training = [module for module in hf.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


_COMPILER = threading.Lock()
_FORCED: list[AbstractContextManager[None]] = []  # a stance of the compiler for each that asks; all threads share it


@contextmanager
def without_compiler() -> Iterator[None]:
    """Context manager in which everything that `torch.compile` made, in the whole process, runs uncompiled."""
    with _COMPILER:
        _FORCED.append(torch.compiler.set_stance("force_eager"))
        _FORCED[-1].__enter__()
    try:
        yield
    finally:
        with _COMPILER:
            _FORCED.pop().__exit__(None, None, None)  # the first one's, which sets back what was before, comes last


@contextmanager
def hooked(*hooks: Hook, owned: bool = True) -> Iterator[None]:
    """Context manager with hooks.

    Args:
        hooks: The hooks.
        owned: Whether they see the calls of this thread alone, whatever other threads do with the model meanwhile, and
            none in which it has gone apart since. Others find that out themselves.
    """
    with without_compiler(), ExitStack() as stack:
        for module, when, fn in hooks:
            if owned:
                fn = partial(_in_thread, threading.get_ident(), DEPTH.value, fn)
            if when in ("first", "pre"):
                handle = module.register_forward_pre_hook(fn, with_kwargs=True, prepend=when == "first")
            else:
                handle = module.register_forward_hook(fn, with_kwargs=True, always_call=when == "always")
            OWN_HOOKS.add(handle.id)
            stack.callback(OWN_HOOKS.discard, handle.id)
            stack.callback(handle.remove)
        yield


def _in_thread(owner: int, depth: int, fn: Callable[..., Any], *values: Any) -> Any:
    """What a hook does in calls of one thread alone, unless it has gone apart since."""
    return fn(*values) if owner == threading.get_ident() and depth >= DEPTH.value else None


@lru_cache(256)
def forward_parameters(kind: type[nn.Module]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of the `forward` of a class of modules, by name.

    Of a class, because wrappers that are set on a module (of nnsight, for instance) take any arguments.
    """
    parameters = dict(inspect.signature(kind.forward).parameters)
    parameters.pop("self", None)
    return parameters


def hidden_of(args: Args, kwargs: Kwargs) -> Tensor:
    """Return the hidden states among the arguments of a call."""
    if args:
        return args[0]
    return kwargs["hidden_states"]


def with_hidden(args: Args, kwargs: Kwargs, hidden: Tensor) -> tuple[Args, Kwargs]:
    """Return the arguments of a call, with other hidden states."""
    if args:
        return (hidden, *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": hidden}


def on_hidden(module: nn.Module, when: str, fn: Callable[[Tensor], Tensor | None]) -> Hook:
    """Return a hook by which `fn` sees the hidden states that enter a module, or leave it, and may replace them.

    Where a process holds a part of them, `fn` sees the whole.
    """
    leaves = when == "post"
    shards, size = Shards(getattr(module, "weight", None)), None
    if shards.size > 1:
        size = getattr(module, "out_features" if leaves else "in_features", None)

    def hook(_module: nn.Module, args: Args, kwargs: Kwargs, output: Any = None) -> Any:
        hidden = first_tensor(output) if leaves else hidden_of(args, kwargs)
        new = fn(hidden if size is None else shards.gather(hidden, size))
        if new is None:
            return None
        if size is not None:
            new = shards.part(new, hidden)
        if not leaves:
            return with_hidden(args, kwargs, new)
        return type(output)([new, *output[1:]]) if isinstance(output, tuple | list) else new

    return module, when, hook


def first_tensor(output: Any) -> Tensor:
    """Return the hidden states in the output of a layer or attention module (a tensor, or first in a tuple)."""
    if isinstance(output, tuple | list):
        return output[0]
    return output
