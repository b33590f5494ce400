"""What sinkscope uses of transformers and torch that is not public; of the attention that a model selects, `stock`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn

from sinkscope.errors import UnsupportedError


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


class Follower(Protocol):
    """What follows `generate`, which alone knows which calls read a prompt.

    A chunked prompt may end with a chunk of one token, which looks like a generated token to the model.

    Attributes:
        prompting: Whether `generate` is reading a prompt.
    """

    prompting: bool

    @property
    def acts_here(self) -> bool:
        """Whether it is concerned by what the current thread does."""
        ...

    def note_told(self, told: Mapping[str, Any]) -> None:
        """Note what `generate` is told, by name, before it makes masks for a cache of fixed size."""
        ...

    def begin_generation(self, method: str, options: dict[str, Any], settings: Any) -> None:
        """Refuse a kind of generation, or note its settings.

        Args:
            method: The method of the model that `generate` calls: `_prefill`, or `_get_candidate_generator` for
                assisted generation.
            options: Arguments of the forward call.
            settings: The generation settings.
        """
        ...


@contextmanager
def following_generate(model: Any, follower: Follower) -> Iterator[None]:
    """Context manager in which the `generate` of a causal language model tells a follower what it does.

    Runs may end in any order, so the last of them puts back what stood on the model.
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
        methods = {
            "_prefill": self.prefill,
            "_get_candidate_generator": self.candidates,
            "init_continuous_batching": self.batch,
            "prepare_inputs_for_generation": self._preparing(model),
        }
        self.followers: list[Follower] = []
        self.own: dict[str, Any] = {name: getattr(model, name, None) for name in methods}
        self.before = {name: attributes[name] for name in methods if name in attributes}
        attributes.update(methods)

    def __deepcopy__(self, _memo: Any) -> _Followed:
        """Stay what it is on a copy of the model, which nobody lets generate."""
        return self

    def prefill(self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        """Read a prompt."""
        followers = self._begun("_prefill", model_kwargs, generation_config)
        for follower in followers:
            follower.prompting = True
        try:
            return self.own["_prefill"](input_ids, generation_config, model_kwargs, **more)
        finally:
            for follower in followers:
                follower.prompting = False

    def candidates(self, *args: Any, **kwargs: Any) -> Any:
        """Begin assisted generation."""
        self._begun("_get_candidate_generator", {}, None)
        return self.own["_get_candidate_generator"](*args, **kwargs)

    def batch(self, *_: Any, **__: Any) -> Any:
        """Refuse to put several texts into one row."""
        raise UnsupportedError(
            "continuous batching puts several texts into one row, where an edit, a policy or a guard cannot tell their "
            "tokens apart: use model.generate inside the `with`"
        )

    def _preparing(self, model: Any) -> Any:
        """What prepares the inputs of a call, and has the signature of the model's own, which transformers reads."""
        own = getattr(model, "prepare_inputs_for_generation", None)

        def prepare(*args: Any, **kwargs: Any) -> Any:
            for follower in self.followers:
                if follower.acts_here:
                    follower.note_told(kwargs)
            return self.own["prepare_inputs_for_generation"](*args, **kwargs)

        return prepare if own is None else wraps(own)(prepare)

    def _begun(self, method: str, options: dict[str, Any], settings: Any) -> list[Follower]:
        """Tell followers that generation begins; those that are concerned."""
        followers = [follower for follower in self.followers if follower.acts_here]
        for follower in followers:
            follower.begin_generation(method, options, settings)
        return followers
