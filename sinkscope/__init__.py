"""Find the attention sink of a language model, verify it by ablation, and repair what it breaks.

Names are imported when first used, so that `import sinkscope` is instant and loads no torch. `__init__.pyi` says where
each of them lives, for Python and for type checkers; measurements of other packages are found by their entry points.
"""

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

import lazy_loader

__version__ = "0.2.0"

_stated, _, __all__ = lazy_loader.attach_stub(__name__, __file__)


def _measurements() -> Mapping[str, Any]:
    from sinkscope.files.kinds import other_measurements

    return other_measurements()


def __getattr__(name: str) -> Any:
    if name in __all__:
        from sinkscope.results.console import NotebookBar

        with NotebookBar() as bar:
            if "torch" not in sys.modules:
                bar("importing torch", 0, 0)
            return _stated(name)
    if not name.startswith("_") and name in _measurements():
        return globals().setdefault(name, _measurements()[name].load())
    near = get_close_matches(name, __dir__(), 1)
    remedy = f"did you mean {near[0]}?" if near else f"it has: {', '.join(__dir__())}"
    raise AttributeError(f"module 'sinkscope' has no attribute {name!r}; {remedy}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_measurements(), "__version__"})
