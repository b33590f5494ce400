"""What a model object is made of: its modules, their classes and sizes, and what somebody replaced in them.

A proof of a model holds for other objects of the same structure, unless a function of the object itself was replaced:
such a function may compute anything, so its object has a proof of its own.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from sinkscope.models.modes import has_hooks

_WRAPPERS = ("nnsight", "sinkscope")
"""Packages whose functions in the place of a method call the module's own."""


@dataclass(frozen=True)
class Structure:
    """The structure of a model.

    Attributes:
        modules: What each module is.
        kinds: For each layer, the number of the first one that is made in the same way.
        is_own: Whether somebody put functions into modules of this object.
    """

    modules: tuple[Any, ...]
    kinds: tuple[int, ...]
    is_own: bool


def structure_of(hf: nn.Module, layers: list[nn.Module]) -> Structure:
    """Return the structure of a model, which changes if somebody replaces a module, a size or a function.

    Args:
        hf: The model.
        layers: Its decoder layers.
    """
    described = dict[nn.Module, Any]()
    parts = list[Any]()
    is_own = False
    for path, module in hf.named_modules():
        cls: Any = type(module)
        functions = _functions(module)
        is_own = is_own or bool(functions)
        words = [cls, cls.forward, *functions]
        for name, weight in module.named_parameters(recurse=False):
            words += (name, weight.shape, weight.dtype)
        described[module] = tuple(words)
        parts += (path, described[module])
    firsts = dict[Any, int]()
    kinds = list[int]()
    for number, layer in enumerate(layers):
        own = list[Any]()
        for path, module in layer.named_modules():
            own += (path, described[module])
        kinds.append(firsts.setdefault(tuple(own), number))
    return Structure(tuple(parts), tuple(kinds), is_own)


def _functions(module: nn.Module) -> list[Any]:
    """Functions that stand in the place of what the class has; none of those that only call that."""
    functions = list[Any]()
    for name, value in list(vars(module).items()):  # another thread may enter or leave a block
        if name[0] == "_" or not (name == "forward" or isinstance(value, FunctionType | MethodType | partial)):
            continue
        if name == "forward" and hasattr(module, "_hf_hook"):  # accelerate brings weights, and calls what stood here
            value = vars(module).get("_old_forward", value)
        names = {str(getattr(each, "__module__", None)).partition(".")[0] for each in (type(value), value)}
        function = getattr(value, "__func__", value)
        if names.isdisjoint(_WRAPPERS) and function is not getattr(type(module), name, None):
            functions.append(function)
    return functions


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
