"""What a model object is made of: its modules, their classes, sizes and settings, and what somebody replaced in them.

A proof of a model holds for other objects of the same structure, unless a function of the object itself was replaced:
such a function may compute anything, so its object has a proof of its own.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from sinkscope.models.modes import has_hooks

_SETTINGS = (bool, int, float, str, type(None))
_IGNORED = ("layer_idx", "layer_id", "layer_number", "idx", "index", "training", "gradient_checkpointing")
"""Settings that differ between layers which compute the same, or while a model is used."""
_WRAPPERS = ("nnsight", "sinkscope")
"""Packages whose functions in the place of a method call the module's own."""
_CLASSES: set[Callable[..., Any]] = set()
"""Functions of classes that were seen; they are kept, so that no later one gets the identity of an earlier one."""


@dataclass(frozen=True)
class Structure:
    """The structure of a model.

    Attributes:
        text: All that its modules are, as one digest.
        kinds: For each layer, the number of the first one that is made in the same way.
        replaced: Functions that somebody put into modules of this object.
    """

    text: str
    kinds: tuple[int, ...]
    replaced: tuple[Any, ...]


def structure_of(hf: nn.Module, layers: list[nn.Module]) -> Structure:
    """Return the structure of a model, which changes if somebody replaces a module, a size, a setting or a function.

    Args:
        hf: The model.
        layers: Its decoder layers.
    """
    replaced, described = list[Any](), dict[int, str]()
    parts = list[str]()
    for path, module in hf.named_modules():
        described[id(module)] = str(_description(module, replaced))
        parts += (path, described[id(module)])
    firsts, kinds = dict[str, int](), list[int]()
    for number, layer in enumerate(layers):
        own = [path + described[id(module)] for path, module in layer.named_modules()]
        kinds.append(firsts.setdefault(" ".join(own), number))
    text = hashlib.sha256(" ".join(parts).encode()).hexdigest()
    return Structure(text, tuple(kinds), tuple(replaced))


def _description(module: nn.Module, replaced: list[Any]) -> list[Any]:
    """What one module of a model is: functions of the object itself are added to `replaced`."""
    cls: Any = type(module)
    _CLASSES.update((cls, cls.forward))
    words = [cls.__qualname__, id(cls), id(cls.forward)]
    for name, value in list(vars(module).items()):  # another thread may enter or leave a block
        if name[0] == "_" or name in _IGNORED:
            continue
        if isinstance(value, _SETTINGS):
            words += (name, value)
        elif name == "forward" or isinstance(value, FunctionType | MethodType | partial):
            own = _replacement(module, name, value)
            if own is not None:
                replaced.append(own)
                words += (name, id(own))
    for tensors in (vars(module)["_parameters"], vars(module)["_buffers"]):
        for name, tensor in tensors.items():
            if tensor is not None:
                words += (name, tuple(tensor.shape), tensor.dtype)
    return words


def _replacement(module: nn.Module, name: str, value: Any) -> Any:
    """A function that stands in the place of a method of the class; None if it only calls that method."""
    if name == "forward" and hasattr(module, "_hf_hook"):  # accelerate brings weights, and calls what stood here
        value = vars(module).get("_old_forward", value)
    for module_name in (type(value).__module__, getattr(value, "__module__", None)):
        if str(module_name).partition(".")[0] in _WRAPPERS:
            return None
    function = getattr(value, "__func__", value)
    if function is getattr(type(module), name, None) or (name != "forward" and isinstance(function, type)):
        return None
    return function


def without_hooks(model: nn.Module) -> nn.Module:
    """Return a model, or one with the same weights in modules of its own, which have none of the hooks of its user.

    Raises:
        Exception: Somebody has put something into a module that cannot be copied.
    """
    if not any(has_hooks(module) for module in model.modules()):
        return model
    copies: dict[int, Any] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    for module in model.modules():
        for name, value in list(vars(module).items()):  # another thread may enter or leave a block
            if "_forward_" in name and "hooks" in name:  # another thread's may be among them, which are not copied
                copies[id(value)] = type(value)()
    return copy.deepcopy(model, copies)
