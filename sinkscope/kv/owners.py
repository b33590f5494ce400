"""Which run acts on the cache and the attention of a model: only one may, and others may watch."""

from __future__ import annotations

from weakref import WeakValueDictionary

from sinkscope.errors import UnsupportedError
from sinkscope.hooks.edit.base import Run

_OWNERS: WeakValueDictionary[int, Run] = WeakValueDictionary()
"""The run that acts, by the id of the model."""


def own_model(run: Run) -> None:
    """Let a run be the one that acts on its model, until it ends.

    Raises:
        UnsupportedError: Another one is.
    """
    model = id(run.target.hf)
    if _OWNERS.setdefault(model, run) is not run:
        raise UnsupportedError(
            f"{run.target.name} is already inside a `with` that acts on its cache: enter them together, "
            "`(a | b).on(model)`"
        )
    run.stack.callback(_OWNERS.pop, model, None)
