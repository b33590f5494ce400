"""For the site only: names that are a function and a package, and signatures of measurements as users call them."""

from __future__ import annotations

from typing import Any

import griffe


class PackagesFirst(griffe.Extension):
    """Forgets the public functions that are named like a module, before the modules themselves are read."""

    def on_module_members(self, *, mod: griffe.Module, **_: Any) -> None:
        """Called when `sinkscope/__init__.py` has been read and its submodules have not."""
        if mod.path == "sinkscope":
            for name in ("lines", "models", "trace"):
                mod.members.pop(name, None)

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Users call a measurement with a model, from which the decorator makes the function's first parameter."""
        for decorator in func.decorators:
            if str(decorator.value).startswith("measurement("):
                first = func.parameters[0]
                first.name, first.annotation, first.default = "model", "object", "None"
