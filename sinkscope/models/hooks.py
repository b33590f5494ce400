"""Hooks on modules: what they see of a call, and what they may put in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.models.experts import Args, Kwargs
from sinkscope.models.shards import Shards, check_no_gradient, split_of

Hook = tuple[nn.Module, str, Any]
"""A module, a moment, and a function with the signature of torch's hooks. Moments are "pre", "first" (before all others
that are "pre"), "post", and "always" (after an error, too)."""
AroundCall = Generator[tuple[Args, Kwargs] | None, Any]
"""Yields once: gives the arguments with which a module is to run (None: those that it has), and takes its output."""


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
        owned: Whether they see the calls of this thread alone, whatever other threads do with the model meanwhile.
    """
    with without_compiler(), ExitStack() as stack:
        for module, when, fn in hooks:
            is_before = when in ("first", "pre")
            if owned:
                fn = _of_this_thread(fn, 3 if is_before else 4)
            if is_before:
                handle = module.register_forward_pre_hook(fn, with_kwargs=True, prepend=when == "first")
            else:
                handle = module.register_forward_hook(fn, with_kwargs=True, always_call=when == "always")
            stack.callback(handle.remove)
        yield


def _of_this_thread(fn: Callable[..., Any], arguments: int) -> Callable[..., Any]:
    """A hook that acts in calls of this thread alone."""
    owner = threading.get_ident()

    def hook(*given: Any) -> Any:
        # PyTorch adds a hook before it notes that the hook takes keywords: a call that runs meanwhile gives none.
        if threading.get_ident() != owner or len(given) != arguments:
            return None
        return fn(*given)

    return hook


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


def on_input(fn: Callable[[Tensor], Tensor | None], columns: list[int] | None = None) -> Callable[..., Any]:
    """Return a forward pre-hook with kwargs: `fn` sees the hidden states that enter a module, and may return others.

    Args:
        fn: The function.
        columns: The columns that it sees and returns; None for all.
    """
    change = _changing(fn, "in_features", columns)

    def hook(module: object, args: Args, kwargs: Kwargs) -> Any:
        new = change(module, hidden_of(args, kwargs))
        if new is None:
            return None
        return with_hidden(args, kwargs, new)

    return hook


def on_hidden(fn: Callable[[Tensor], Tensor | None], columns: list[int] | None = None) -> Callable[..., Any]:
    """Return a forward hook with kwargs: `fn` sees the hidden states that leave a module, and may return others.

    The arguments are those of `on_input`.
    """
    change = _changing(fn, "out_features", columns)

    def hook(module: object, _args: object, _kwargs: object, output: Any) -> Any:
        new = change(module, first_tensor(output))
        if new is None or not isinstance(output, tuple | list):
            return new
        return type(output)([new, *output[1:]])

    return hook


def on_output(fn: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a forward hook with kwargs: `fn` sees what a module returns, and may return something else."""
    change = _changing(fn, "out_features", None)
    return lambda module, _args, _kwargs, output: change(module, output)


def _changing(fn: Callable[[Any], Any], side: str, columns: list[int] | None) -> Callable[[Any, Any], Any]:
    """What replaces the tensor that a hook on a module sees."""
    numbers = device_copies(torch.tensor(columns or []))

    def change(module: Any, seen: Any) -> Any:
        split = split_of(module, side, seen)
        if split is not None:
            return _change_part(fn, seen, columns, *split)
        if columns is None:
            return fn(seen)
        places = numbers(seen)
        new = fn(seen[..., places])
        if new is None:
            return None
        # A copy, because others may need the caller's tensor, and so does autograd.
        return seen.index_copy(-1, places, new.to(seen.dtype))

    return change


def _change_part(fn: Callable[[Any], Any], part: Tensor, columns: list[int] | None, shards: Shards, size: int) -> Any:
    """What replaces the part of a tensor that a process holds; `fn` sees the whole, or the whole of some columns."""
    if columns is None:
        new = fn(shards.gather(part, size))
    else:
        new = fn(shards.columns(part, columns, size))
    if not isinstance(new, Tensor):
        return new
    check_no_gradient(part)
    if columns is None:
        return shards.part(new, part.shape[-1])
    places, here = shards.here(columns, size)
    changed = part.clone()
    changed[..., here] = new[..., places].to(part.dtype)
    return changed


def device_copies(tensor: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that gives a tensor on the device of another one; it is moved once, not in every call."""

    def copy_for(other: Tensor) -> Tensor:
        nonlocal tensor
        if tensor.device != other.device:
            tensor = tensor.to(other.device)
        return tensor

    return copy_for


def first_tensor(output: Any) -> Tensor:
    """Return the hidden states in the output of a layer or attention module (a tensor, or first in a tuple)."""
    if isinstance(output, tuple | list):
        return output[0]
    return output
