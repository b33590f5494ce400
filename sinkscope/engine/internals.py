"""What sinkscope uses of transformers and torch that is not public; of the attention that a model selects, `stock`."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

_BATCHING = "init_continuous_batching"


def without_hooks(model: nn.Module) -> nn.Module:
    """Return a model with the same weights in modules of its own, which have none of the hooks of the given ones.

    Raises:
        Exception: Somebody has put something into a module that cannot be copied.
    """
    copies: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in vars(module).items():
            if "_forward_" in name and "hooks" in name:  # another thread's may be among them, which are not copied
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)


def in_backward() -> bool:
    """Return whether this thread is in a backward pass, in which checkpointed layers are computed again."""
    return torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]


def is_checkpointing(layer: nn.Module) -> bool:
    """Return whether a layer keeps no activations for the backward pass, and no cache, but is computed again in it."""
    return layer.training and bool(getattr(layer, "gradient_checkpointing", False))


@dataclass(frozen=True, eq=False)
class GenerateFollower:
    """A listener to `generate`, which alone knows which calls read a prompt.

    A chunked prompt may end with a chunk of one token, which looks like a generated token to the model.

    Attributes:
        acts_here: Says whether it is concerned by what the current thread does.
        check: Called with the name of a method of the model that `generate` calls, `_prefill` or (for assisted
            generation) `_get_candidate_generator`, the arguments of the forward call, and the generation settings; may
            raise.
        prompting: Called with True before a prompt is read, and with False afterwards.
    """

    acts_here: Callable[[], bool]
    check: Callable[[str, dict[str, Any], Any], None]
    prompting: Callable[[bool], None] = lambda _reads: None


@contextmanager
def following_generate(model: Any, follower: GenerateFollower) -> Iterator[None]:
    """Context manager in which the `generate` of a causal language model tells a follower what it does."""

    def acting() -> list[GenerateFollower]:
        return [one for one in _FOLLOWERS.get(model, ()) if one.acts_here()]

    def prefill(input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        followers = acting()
        for one in followers:
            one.check("_prefill", model_kwargs, generation_config)
        for one in followers:
            one.prompting(True)
        try:
            return type(model)._prefill(model, input_ids, generation_config, model_kwargs, **more)
        finally:
            for one in followers:
                one.prompting(False)

    def candidates(*args: Any, **kwargs: Any) -> Any:
        for one in acting():
            one.check("_get_candidate_generator", {}, None)
        return type(model)._get_candidate_generator(model, *args, **kwargs)

    with _placed(model, _prefill=prefill, _get_candidate_generator=candidates):
        with _LOCK:
            _FOLLOWERS[model] = [*_FOLLOWERS.get(model, ()), follower]
        try:
            yield
        finally:
            with _LOCK:
                _FOLLOWERS[model] = [one for one in _FOLLOWERS[model] if one is not follower]


@contextmanager
def without_continuous_batching(model: Any, error: Exception) -> Iterator[None]:
    """Context manager in which `generate_batch` and what it is made of raise an error.

    They put the tokens of several texts into one row, so that a position says nothing about its place in a text.

    Args:
        model: The causal language model.
        error: What is raised.
    """

    def refused(*_: Any, **__: Any) -> Any:
        raise error

    with _placed(model, **({_BATCHING: refused} if hasattr(type(model), _BATCHING) else {})):
        yield


_FOLLOWERS: WeakKeyDictionary[Any, list[GenerateFollower]] = WeakKeyDictionary()
_PLACED: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""How many contexts want a function in the place of a method of a model."""
_BEFORE: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()
"""What stood on the model itself before."""
_LOCK = threading.RLock()


@contextmanager
def _placed(model: Any, **functions: Any) -> Iterator[None]:
    """Context manager with functions in place of methods of a model; they leave when the last context that wants them
    ends, in whatever order contexts of several threads end.
    """
    with _LOCK:
        count, before = _PLACED.setdefault(model, Counter()), _BEFORE.setdefault(model, {})
        for name, function in functions.items():
            if not count[name]:
                if name in vars(model):
                    before[name] = vars(model)[name]
                setattr(model, name, function)
            count[name] += 1
    try:
        yield
    finally:
        with _LOCK:
            for name in functions:
                count[name] -= 1
                if not count[name]:
                    vars(model).pop(name, None)
                    vars(model).update({name: before.pop(name)} if name in before else {})
