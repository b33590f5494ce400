"""Find the attention sink of a language model, verify it by ablation, and repair what it breaks.

Names are imported when first used, so that `import sinkscope` is instant and loads no torch. `__init__.pyi` says where
each of them lives, for Python and for type checkers; measurements of other packages are found by their entry points.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import lazy_loader

__version__ = "0.2.0"

ROOMS = ("kv", "loops", "bench", "sparse")
"""Packages within this one whose names are used as `sinkscope.kv.SnapKV`."""
LEFT = {
    "Event": "it is sinkscope.engine.run.Event",
    "Quantize": "it left after version 0.2.0, and nothing has its work",
    "circuit": "it is why_sink",
    "heads": "why_sink has its work",
    "lines_loss": "experiments.papers.loopserve.lines_loss of a clone has its work",
    "patch_eval": "patch(model, file=...) has its work",
    "patch_make": "it is patch",
    "precision": "it left after version 0.2.0, and nothing has its work",
    "why": "it is why_loop",
}
"""Names of version 0.2 that left, each with what to use instead."""

_stated, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _measurements() -> Mapping[str, Any]:
    from sinkscope.files.envelope import other_measurements

    return other_measurements()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _stated(name)
    if name in ROOMS:
        return import_module(f"sinkscope.{name}")
    if not name.startswith("_") and name in _measurements():
        return globals().setdefault(name, _measurements()[name].load())
    if name.startswith("__"):  # Python asks for names of its own, and the remedy may import torch
        raise AttributeError(f"module 'sinkscope' has no attribute {name!r}")
    from sinkscope.errors import NoSuchNameError, no_such_name

    elsewhere = _elsewhere(name)
    if elsewhere is None:
        raise no_such_name("sinkscope", name, __dir__())
    raise NoSuchNameError(f"module 'sinkscope' has no attribute {name!r}; {elsewhere}")


def _elsewhere(name: str) -> str | None:
    """What to use instead of a name that left, or where it is."""
    if name in LEFT:
        return LEFT[name]
    for room in ROOMS:
        if name in getattr(import_module(f"sinkscope.{room}"), "__all__", ()):
            return f"it is sinkscope.{room}.{name}"
    return None


def __dir__() -> list[str]:
    return sorted({*__all__, *_measurements(), "__version__"})
