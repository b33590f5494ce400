"""Find the attention sink of a language model, verify it by ablation, and repair what it breaks.

Names are imported when first used, so that `import sinkscope` is instant and loads no torch. `__init__.pyi` says where
each of them lives, for Python and for type checkers; measurements are found where they are defined.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
FINDER = "sinkscope.inference.find"  # finds the adapters of models, which know of nothing above them

_FORMER = {  # names of earlier versions, for one release
    "cluster_attack": "attack",
    "evaluate_patch": "patch_eval",
    "line_weights": "lines",
    "make_patch": "patch_make",
    "marking_heads": "heads",
}
_SHARED = ("lines", "models", "trace")  # names of packages that are functions as well
_HOMES: dict[str, str] = {}


class _CallableModule(ModuleType):
    """`lines`, `models` and `trace` are packages as well as functions: calling one calls its function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self.__name__.rpartition(".")[2])(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(_function(self.__name__.rpartition(".")[2]), name)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(_function(self.__name__.rpartition(".")[2]))


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if type(value) is ModuleType and name in _SHARED:  # the import system hangs a submodule below its package
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _homes() -> dict[str, str]:
    """The public names and the module of each, as the stub states them."""
    if not _HOMES:
        import re
        from pathlib import Path

        stub = Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")
        for module, name in re.findall(r"^from (sinkscope\.\S+) import (\w+) as \2$", stub, re.MULTILINE):
            _HOMES[name] = module
    return _HOMES


def _function(name: str) -> Any:
    return getattr(import_module(_homes()[name]), name)


def _measurements() -> dict[str, str]:
    from sinkscope.files.catalog import marked

    return {one.name: one.module for one in marked("measurement")}


def _names() -> list[str]:
    return sorted({*_homes(), *_measurements(), "loops", "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _names()
    if name == "loops":  # a package of functions, none of which bears its name
        return import_module("sinkscope.loops")
    if name in _FORMER:
        import warnings

        warnings.warn(f"sinkscope.{name} is now sinkscope.{_FORMER[name]}", DeprecationWarning, stacklevel=2)
        return getattr(sys.modules[__name__], _FORMER[name])
    if name in _homes():
        return globals().setdefault(name, _function(name))  # the module, where one of that name was imported before
    if not name.startswith("_") and name in _measurements():
        return globals().setdefault(name, getattr(import_module(_measurements()[name]), name))
    raise AttributeError(f"module 'sinkscope' has no attribute {name!r}; it has: {', '.join(_names())}")


def __dir__() -> list[str]:
    return _names()
