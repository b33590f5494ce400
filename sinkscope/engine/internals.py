"""What sinkscope uses of transformers and torch that is not public; of the attention that a model selects, `stock`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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
        packed: What `generate_batch` and what it is made of raise: they put the tokens of several texts into one row,
            so that a position says nothing about its place in a text.
    """

    acts_here: Callable[[], bool]
    check: Callable[[str, dict[str, Any], Any], None]
    prompting: Callable[[bool], None]
    packed: Exception


@contextmanager
def following_generate(model: Any, follower: GenerateFollower) -> Iterator[None]:
    """Context manager in which the `generate` of a causal language model tells a follower what it does.

    Blocks may end in any order, so the last of them puts back what stood on the model.
    """
    attributes = vars(model)
    followed = getattr(attributes.get("_prefill"), "__self__", None)
    if not isinstance(followed, _Followed):
        followed = _Followed(model)
    followed.followers.append(follower)
    try:
        yield
    finally:
        followed.followers.remove(follower)
        if not followed.followers:
            for name in followed.own:
                attributes.pop(name, None)
            attributes.update(followed.before)


class _Followed:
    """Stands on a model in place of methods that `generate` calls.

    Attributes:
        followers: Who follows it.
        own: What the model calls by itself, by name.
        before: What of that stood on the model, and not on its class.
    """

    def __init__(self, model: Any) -> None:
        attributes = vars(model)
        methods = {"_prefill": self.prefill, "_get_candidate_generator": self.candidates, _BATCHING: self.batch}
        self.followers: list[GenerateFollower] = []
        self.own: dict[str, Any] = {name: getattr(model, name, None) for name in methods}
        self.before = {name: attributes[name] for name in methods if name in attributes}
        attributes.update(methods)

    def __deepcopy__(self, _memo: Any) -> _Followed:
        """Stay what it is on a copy of the model, which nobody lets generate."""
        return self

    def prefill(self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        """Read a prompt."""
        followers = self._acting()
        for follower in followers:
            follower.check("_prefill", model_kwargs, generation_config)
        for follower in followers:
            follower.prompting(True)
        try:
            return self.own["_prefill"](input_ids, generation_config, model_kwargs, **more)
        finally:
            for follower in followers:
                follower.prompting(False)

    def candidates(self, *args: Any, **kwargs: Any) -> Any:
        """Begin assisted generation."""
        for follower in self._acting():
            follower.check("_get_candidate_generator", {}, None)
        return self.own["_get_candidate_generator"](*args, **kwargs)

    def batch(self, *_: Any, **__: Any) -> Any:
        """Refuse to put several texts into one row."""
        raise self.followers[-1].packed

    def _acting(self) -> list[GenerateFollower]:
        return [follower for follower in self.followers if follower.acts_here()]
