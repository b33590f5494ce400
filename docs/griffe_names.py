"""For the site only: `sinkscope.models` is a function and a package; its package is what paths lead through."""

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
