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
    def __new__(cls, real: Tensor, device: torch.device) -> Placed:
        made = Tensor._make_wrapper_subclass(
            cls, real.shape, real.stride(), real.storage_offset(), dtype=real.dtype, device=real.device
        )
        made.held, made.place = real, device
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
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)) is not None:
            made = func(*args, **kwargs)
            return made if torch.device(device).type == "cpu" else Placed(made, torch.device(device))
        if func is Tensor.to and len(args) == 2 and isinstance(args[1], Tensor):
            args, kwargs = args[:1], {"device": args[1].device, "dtype": args[1].dtype, **kwargs}
        return func(*args, **kwargs)


@contextmanager
def places() -> Iterator[None]:
    """A `with` in which tensors can be made on such devices."""
    with _Made(), _Places():
        yield


class _Places(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def _run(func, args, kwargs: dict[str, Any]):
    name = func.__name__.partition(".")[0]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    asked, kwargs = kwargs.get("device"), dict(kwargs)
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    places = {x.device for x in tensors if x.dim()}  # single numbers may come from a CPU
    if len(places) > 1 and name != "_to_copy":
        raise RuntimeError(f"{name}: tensors on {', '.join(sorted(map(str, places)))}")
    real = func(*tree_map(_real, args), **tree_map(_real, kwargs))
    where = torch.device(asked) if asked is not None else next(iter(places), torch.device("cpu"))

    def back(x):
        return Placed(x, where) if isinstance(x, Tensor) and where.type != "cpu" else x

    return tree_map(back, real)


def _real(x):
    return x.held if isinstance(x, Placed) else x


def to(x: Tensor, device: str) -> Tensor:
    """The tensor, on such a device."""
    return Placed(x.detach().clone(), torch.device(device))


def spread(model, places: list[str]):
    """Put each layer on a device, and everything else on that of the first, as `device_map="auto"` does."""
    layers = model.model.layers
    for name, module in model.named_modules():
        found = name.partition("model.layers.")[2].partition(".")[0]
        place = places[int(found)] if found else places[0]
        for table in (module._parameters, module._buffers):
            for key, value in table.items():
                table[key] = None if value is None else to(value, place)
    for layer, place in zip(layers, places, strict=True):
        layer.register_forward_pre_hook(_bring(place), with_kwargs=True)


def _bring(place: str):
    def hook(_module, args, kwargs):
        def move(x):
            return x.to(place) if isinstance(x, Tensor) else x

        return tree_map(move, args), {k: v if k in CACHE_NAMES else tree_map(move, v) for k, v in kwargs.items()}

    return hook
