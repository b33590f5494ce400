"""The modules that a run edits. Each has to stay in its place, and to run when the model does, or an edit is lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from sinkscope.errors import UnsupportedError
from sinkscope.models.target import Target

PAGE = "edit-lost"


class EditedModules:
    """Notes which of the edited modules ran, and which are no longer part of the model."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._names: dict[nn.Module, str] = {}
        self._paths: dict[nn.Module, str] = {}
        self._idle: set[nn.Module] = set()
        self._links: dict[tuple[nn.Module, str], tuple[nn.Module, str]] = {}  # each step from the model to a module

    def keep(self, module: nn.Module) -> bool:
        """Refuse, from now on, to go on without this module; False if the model does not register it."""
        if not self._names:
            self._names = {part: name for name, part in self._target.hf.named_modules()}
        path = self._names.get(module)
        if path is None:
            return False
        self._paths[module] = path
        parent = self._target.hf
        for name in path.split("."):
            child = getattr(parent, name)
            self._links.setdefault((parent, name), (child, path))
            parent = child
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

    def check_places(self) -> None:
        """Refuse to go on without a module that was edited.

        Raises:
            UnsupportedError: Another module has taken its place.
        """
        for (parent, name), (child, path) in self._links.items():  # at every call, so as few steps as there are
            if getattr(parent, name, None) is not child:
                raise UnsupportedError(
                    f"{path} of {self._target.name} was replaced inside the `with`, so that the edit there would be "
                    "lost: replace it (or add an adapter) before the `with`",
                    page=PAGE,
                )

    def check_ran(self) -> None:
        """Refuse a run in which nothing was edited, although the model ran.

        Raises:
            UnsupportedError: An edited module never ran.
        """
        if self._idle:
            paths = sorted(self._paths[module] for module in self._idle)
            raise UnsupportedError(
                f"{paths[0]} of {self._target.name} never ran while the model did, so that the edit there was lost: "
                "its work was done in another way (a fused kernel, a captured graph, a skipped layer); switch that "
                "off, or edit another layer",
                page=PAGE,
            )
