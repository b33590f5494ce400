"""The modules that a run edits. Each has to stay in its place, and to run when the model does, or an edit is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target

PAGE = "edit-lost"


class EditedModules:
    """Notes which of the edited modules ran."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._names: dict[nn.Module, str] = {}
        self._paths: dict[nn.Module, str] = {}
        self._idle: set[nn.Module] = set()

    def keep(self, module: nn.Module) -> bool:
        """Refuse to end without this module; False if the model does not register it."""
        if not self._names:
            self._names = {part: name for name, part in self._target.hf.named_modules()}
        if module not in self._names:
            return False
        self._paths[module] = self._names[module]
        return True

    def add(self, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook of an edit, which from now on also notes that its module ran."""
        if not self.keep(module):  # nothing can be said of it
            return hook
        self._idle.add(module)

        def noting(*args: Any) -> Any:
            self._idle.discard(module)
            return hook(*args)

        return noting

    def check(self) -> None:
        """Refuse a run in which an edit was lost, although the model ran.

        Raises:
            UnsupportedError: Another module has taken the place of an edited one, or an edited module never ran.
        """
        there = set(self._target.hf.modules())
        name = self._target.name
        for module, path in self._paths.items():
            if module not in there:
                raise UnsupportedError(
                    f"{path} of {name} was replaced inside the `with`, so that the edit there was lost: replace it (or "
                    "add an adapter) before the `with`",
                    page=PAGE,
                )
        for path in sorted(self._paths[module] for module in self._idle):
            raise UnsupportedError(
                f"{path} of {name} never ran while the model did, so that the edit there was lost: its work was done "
                "in another way (a fused kernel, a captured graph, a skipped layer); switch that off, or edit another "
                "layer",
                page=PAGE,
            )
