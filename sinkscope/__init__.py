"""Find the attention sink of a language model, verify it by ablation, and repair what it breaks.

Names are imported when first used, so that `import sinkscope` is instant and loads no torch. Type checkers read their
types in `__init__.pyi`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.2.0"

_HOME = {  # public name -> where it lives; measurements come from the table of commands
    "load": "sinkscope.opening.load",
    "models": "sinkscope.models.names",
    "Target": "sinkscope.models.target",
    "trace": "sinkscope.trace.run",
    "Intervention": "sinkscope.interventions.base",
    "Event": "sinkscope.interventions.base",
    "Ablate": "sinkscope.interventions.edits",
    "Add": "sinkscope.interventions.steer",
    "SinkPatch": "sinkscope.interventions.sink_patch",
    "LoopGuard": "sinkscope.kv.loopguard.guard",
    "LoopServe": "sinkscope.kv.loopserve.serve",
    "H2O": "sinkscope.kv",
    "TOVA": "sinkscope.kv",
    "AShape": "sinkscope.kv",
    "AdaKV": "sinkscope.kv",
    "Full": "sinkscope.kv",
    "MInference": "sinkscope.kv",
    "Observe": "sinkscope.kv",
    "Policy": "sinkscope.kv",
    "Progressive": "sinkscope.kv",
    "Pyramid": "sinkscope.kv",
    "SnapKV": "sinkscope.kv",
    "StreamingLLM": "sinkscope.kv",
    "TriShape": "sinkscope.kv",
    "Conversation": "sinkscope.kv.loopserve.conversation",
    "generate": "sinkscope.serving.generate",
    "report": "sinkscope.app.report",
    "scan": "sinkscope.app.scan",
    "view": "sinkscope.app.view.notebook",
    "Result": "sinkscope.files.result",
    "SinkscopeError": "sinkscope.errors",
}


class _CallableModule(ModuleType):
    """`models`, `trace` and `generate` are packages or modules as well as functions: calling one calls its function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _function(self.__name__.rpartition(".")[2])(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        import inspect

        return inspect.signature(_function(self.__name__.rpartition(".")[2]))


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOME and type(value) is ModuleType:  # the import system hangs a submodule below its package
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _function(name: str) -> Any:
    return getattr(import_module(_HOME[name]), name)


def _measurements() -> dict[str, str]:
    from sinkscope.app.commands import measurement_targets

    return measurement_targets()


def _names() -> list[str]:
    return sorted({*_HOME, *_measurements(), "__version__"})


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _names()
    if name == "loops":  # a package of functions, none of which bears its name
        return import_module("sinkscope.loops")
    if name in _HOME:
        return globals().setdefault(name, _function(name))  # the module, where one of that name was imported before
    if not name.startswith("_") and name in _measurements():
        module = _measurements()[name].partition(":")[0]
        return globals().setdefault(name, getattr(import_module(module), name))
    raise AttributeError(f"module 'sinkscope' has no attribute {name!r}; it has: {', '.join(_names())}")


def __dir__() -> list[str]:
    return _names()
