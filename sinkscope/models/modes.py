"""What holds of modules for a while: whose hooks are on them, and that no dropout acts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

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
    return not OWN_HOOKS.issuperset([*hooks_of(module, "_forward_pre_hooks"), *hooks_of(module, "_forward_hooks")])


def hooks_of(module: nn.Module, kind: str) -> dict[int, Any]:
    """Return the hooks of a module by number, which torch keeps under the name of their kind."""
    return vars(module)[kind]


_MODES = threading.Lock()
_EVALUATED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()  # how many hold a module that was training


@contextmanager
def evaluating(hf: nn.Module) -> Iterator[None]:
    """Context manager in which no dropout acts; after the last that overlap, every module has the mode it had."""
    with _MODES:
        training = [module for module in hf.modules() if module.training or module in _EVALUATED]
        for module in training:
            _EVALUATED[module] = _EVALUATED.get(module, 0) + 1
            module.training = False
    try:
        yield
    finally:
        with _MODES:
            for module in training:
                _EVALUATED[module] -= 1
                if not _EVALUATED[module]:
                    del _EVALUATED[module]
                    module.training = True
