"""Where the adapters of models come from.

They are inferred from traces, so inference stands above the models. The package names it (`sinkscope.FINDER`), and it
is imported when the first adapter is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import sinkscope
from sinkscope.models.adapters import Adapter
from sinkscope.models.target import Target


def adapter_of(target: Target, *, proves: bool = True) -> Adapter:
    """The adapter of a model, as `sinkscope.inference.find.adapter_of` finds it.

    Args:
        target: The model; its own adapter is not read.
        proves: Whether what is inferred is proved at once, in the first layers.

    Raises:
        UnsupportedError: Nothing could be inferred, or the probe refuses it.
    """
    return _finder().adapter_of(target, proves=proves)


def prove(target: Target) -> None:
    """Prove a whole model, as `sinkscope.inference.find.prove` does.

    Raises:
        UnsupportedError: There is a problem; the message says what, and what to try.
    """
    _finder().prove(target)


def _finder() -> Any:
    return import_module(sinkscope.FINDER)
