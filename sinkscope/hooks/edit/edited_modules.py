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
        self._names = {module: name for name, module in target.hf.named_modules()}
        self._kept: set[nn.Module] = set()
        self._idle: set[nn.Module] = set()

    def keep(self, module: nn.Module) -> None:
        """Refuse to end without this module, if the model registers it; else nothing can be said of it."""
        if module in self._names:
            self._kept.add(module)

    def add(self, module: nn.Module, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook of an edit, which from now on also notes that its module ran."""
        self.keep(module)
        self._idle |= {module} & self._kept

        def noting(*args: Any) -> Any:
            self._idle.discard(module)
            return hook(*args)

        return noting

    def check(self) -> None:
        """Refuse a run in which an edit was lost, although the model ran.

        Raises:
            UnsupportedError: Another module has taken the place of an edited one, or an edited module never ran.
        """
        name = self._target.name
        for path in self._paths(self._kept - set(self._target.hf.modules())):
            raise UnsupportedError(
                f"{path} of {name} was replaced inside the `with`, so that the edit there was lost: replace it (or "
                "add an adapter) before the `with`",
                page=PAGE,
            )
        for path in self._paths(self._idle):
            raise UnsupportedError(
                f"{path} of {name} never ran while the model did, so that the edit there was lost: its work was done "
                "in another way (a fused kernel, a captured graph, a skipped layer); switch that off, or edit another "
                "layer",
                page=PAGE,
            )

    def _paths(self, modules: set[nn.Module]) -> list[str]:
        return sorted(self._names[module] for module in modules)
