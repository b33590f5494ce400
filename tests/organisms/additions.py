"""What a layer really adds to its residual stream: the additions that it carries out, seen as torch is called.

No module's path is used. Sites of sinkscope are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

Mode = TypeVar("Mode", bound=TorchFunctionMode)
_ADDITIONS = {"add", "add_", "__add__", "__radd__", "__iadd__"}


@dataclass
class Point:
    """The residual stream somewhere in a layer, and what was added to it one after the other until then."""

    value: Tensor
    added: list[Tensor] = field(default_factory=list)


class Additions(TorchFunctionMode):
    """Follows the residual stream of one call of a layer through additions, copies and views."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._points = {id(hidden): Point(hidden.detach().clone())}
        self._alive: list[Any] = [hidden]  # so that no other tensor gets its id
        self.points: list[Point] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        streams = [value for value in tensors if id(value) in self._points]
        point = other = None
        if streams:
            point = self._points[id(streams[0])]
            if name in _ADDITIONS and len(tensors) == 2:
                other = (tensors[1] if tensors[0] is streams[0] else tensors[0]).detach().clone()
        result = func(*args, **kwargs)
        if point is None or not isinstance(result, Tensor) or result.numel() != point.value.numel():
            return result
        if other is not None and other.numel() == point.value.numel():
            added = other.reshape(point.value.shape) * kwargs.get("alpha", 1)
            new = Point(result.detach().clone().reshape(point.value.shape), [*point.added, added])
            self.points.append(new)
        elif result.dtype == streams[0].dtype and torch.equal(result.detach().flatten(), point.value.flatten()):
            new = point
        else:
            return result
        self._points[id(result)] = new
        self._alive.append(result)
        return result

    def at(self, value: Tensor) -> Point | None:
        """The point with this value; None if there is none."""
        for point in self.points:
            if value.shape == point.value.shape and is_close(value, point.value):
                return point
        return None


def is_close(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal up to rounding, relative to the largest number."""
    if one.shape != other.shape:
        return False
    size = torch.maximum(one.abs().max(), other.abs().max())
    return bool((one - other).abs().max() <= 1e-5 * size)


def followed(
    model: Any, layers: list[torch.nn.Module], ids: Tensor, follower: Callable[[Tensor], Mode]
) -> list[tuple[Mode, Tensor, Tensor]]:
    """Of each layer in a pass: a mode made of what enters it, under which it ran, what entered it and what left it."""
    seen: list[tuple[Mode, Tensor, Tensor]] = []
    running: list[tuple[Mode, Tensor]] = []
    handles = []

    def enter(_module: Any, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs["hidden_states"]
        mode = follower(hidden)
        mode.__enter__()
        running.append((mode, hidden.detach().clone()))

    def leave(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        mode, entered = running.pop()
        mode.__exit__(None, None, None)
        left = output[0] if isinstance(output, tuple | list) else output
        seen.append((mode, entered, left.detach().clone()))

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(layer.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return seen
