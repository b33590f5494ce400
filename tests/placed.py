"""Devices that do not exist: tensors that say they are on one, and an error where an operation mixes two of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sinkscope.models.call_cache import CACHE_NAMES


class Placed(Tensor):
    """A CPU tensor that says it is elsewhere."""

    held: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, real: Tensor, place: torch.device) -> Placed:
        shape = real.shape, real.stride(), real.storage_offset()
        made = Tensor._make_wrapper_subclass(cls, *shape, dtype=real.dtype, device=real.device)
        made.held, made.place = real, place
        return made

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What Python sees; torch itself knows a CPU."""
        return self.place

    def tolist(self) -> Any:
        """Numbers, as any device gives them."""
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Made(TorchFunctionMode):
    """`torch.tensor` asks torch itself for the device."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and "device" in kwargs:
            return to(func(*args, **{**kwargs, "device": "cpu"}), kwargs["device"] or "cpu")
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], Tensor):
            args, kwargs = args[:1], {"device": args[1].device, "dtype": args[1].dtype}
        return func(*args, **kwargs)


class _Places(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


@contextmanager
def places() -> Iterator[None]:
    """A `with` in which tensors can be made on such devices."""
    with _Made(), _Places():
        yield


def _run(func, args, kwargs: dict[str, Any]):
    name, where = func.__name__.partition(".")[0], kwargs.get("device")
    if where is not None:
        kwargs = {**kwargs, "device": "cpu"}
    # Single numbers may come from a CPU.
    found = {x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.dim()}
    if len(found) > 1 and name != "_to_copy":
        raise RuntimeError(f"{name}: tensors on {', '.join(sorted(map(str, found)))}")
    if where is None:
        where = next(iter(found), "cpu")
    args, kwargs = tree_map(lambda x: x.held if isinstance(x, Placed) else x, (args, kwargs))
    return tree_map(lambda x: to(x, where), func(*args, **kwargs))


def to(x: Any, where: Any) -> Any:
    """A tensor, on such a device; what else there is stays."""
    is_there = not isinstance(x, Tensor) or torch.device(where).type == "cpu"
    return x if is_there else Placed(x.detach(), torch.device(where))


def spread(model, where: list[str]) -> None:
    """Put each layer on a device, and everything else on that of the first, as `device_map="auto"` does."""
    for name, module in model.named_modules():
        layer = name.removeprefix("model.layers.").partition(".")[0]
        place = where[int(layer)] if layer.isdigit() else where[0]
        for table in (module._parameters, module._buffers):
            table.update({key: to(value, place) for key, value in table.items()})
        if name == f"model.layers.{layer}":
            module.register_forward_pre_hook(_bring(place), with_kwargs=True)


def _bring(place: str):
    def move(x):
        return x.to(place) if isinstance(x, Tensor) else x

    def hook(_module, args, kwargs):
        return tree_map(move, args), {k: v if k in CACHE_NAMES else tree_map(move, v) for k, v in kwargs.items()}

    return hook
