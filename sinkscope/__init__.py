"""Find the attention sink of a language model, verify it by ablation, and repair what it breaks.

Names are imported when first used, so that `import sinkscope` is instant and loads no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {  # public name -> where it lives; measurements come from the registry
    "load": "sinkscope.models.load",
    "models": "sinkscope.models.names",
    "Target": "sinkscope.models.target",
    "trace": "sinkscope.trace.run",
    "Intervention": "sinkscope.interventions.base",
    "Event": "sinkscope.interventions.base",
    "Ablate": "sinkscope.interventions.edits",
    "Write": "sinkscope.interventions.edits",
    "SinkDetector": "sinkscope.interventions.sink_detector",
    "SinkPatch": "sinkscope.interventions.sink_patch",
    "LoopGuard": "sinkscope.kv.loopguard.guard",
    "LoopServe": "sinkscope.kv.loopserve.serve",
    "Conversation": "sinkscope.kv.loopserve.conversation",
    "generate": "sinkscope.generate",
    "sinks_over_training": "sinkscope.sinks.first_token.training",
    "report": "sinkscope.report.build",
    "Result": "sinkscope.results",
    "SinkscopeError": "sinkscope.errors",
}

if TYPE_CHECKING:
    from sinkscope.attention.barcode import barcode as barcode
    from sinkscope.attention.lines import line_weights as line_weights
    from sinkscope.attention.locking import locking as locking
    from sinkscope.attention.overlap import line_overlap as line_overlap
    from sinkscope.attention.rotary import rotary_invariance as rotary_invariance
    from sinkscope.errors import SinkscopeError as SinkscopeError
    from sinkscope.generate import generate as generate
    from sinkscope.interventions.base import Event as Event
    from sinkscope.interventions.base import Intervention as Intervention
    from sinkscope.interventions.edits import Ablate as Ablate
    from sinkscope.interventions.edits import Write as Write
    from sinkscope.interventions.sink_detector import SinkDetector as SinkDetector
    from sinkscope.interventions.sink_patch import SinkPatch as SinkPatch
    from sinkscope.kv.loopguard.guard import LoopGuard as LoopGuard
    from sinkscope.kv.loopserve.conversation import Conversation as Conversation
    from sinkscope.kv.loopserve.serve import LoopServe as LoopServe
    from sinkscope.models.load import load as load
    from sinkscope.models.names import models as models
    from sinkscope.models.target import Target as Target
    from sinkscope.report.build import report as report
    from sinkscope.results import Result as Result
    from sinkscope.sinks.attack.attack import cluster_attack as cluster_attack
    from sinkscope.sinks.attack.clusters import token_clusters as token_clusters
    from sinkscope.sinks.attack.detect import detect_attack as detect_attack
    from sinkscope.sinks.first_token.find import find_sinks as find_sinks
    from sinkscope.sinks.first_token.marking_heads import marking_heads as marking_heads
    from sinkscope.sinks.first_token.massive import massive_activations as massive_activations
    from sinkscope.sinks.first_token.positions import token_positions as token_positions
    from sinkscope.sinks.first_token.screen import neuron_screen as neuron_screen
    from sinkscope.sinks.first_token.separate import separability as separability
    from sinkscope.sinks.first_token.training import sinks_over_training as sinks_over_training
    from sinkscope.sinks.patch.evaluate import evaluate_patch as evaluate_patch
    from sinkscope.sinks.patch.make import make_patch as make_patch
    from sinkscope.sinks.repetition.atlas import sink_atlas as sink_atlas
    from sinkscope.sinks.repetition.converge import convergence as convergence
    from sinkscope.sinks.repetition.divergence import divergence as divergence
    from sinkscope.sinks.repetition.repeat import repeat_norms as repeat_norms
    from sinkscope.sinks.repetition.repeat_attention import repeat_attention as repeat_attention
    from sinkscope.trace.run import trace as trace


class _Callable(ModuleType):
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
            value.__class__ = _Callable
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def _names() -> list[str]:
    from sinkscope.registry import entries

    measured = [name for name, entry in entries().items() if entry.decorator == "measurement"]
    return sorted({*_HOME, *measured, "__version__"})


def _function(name: str) -> Any:
    return getattr(import_module(_HOME[name]), name)


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return _names()
    if name == "loops":  # a package of functions, none of which bears its name
        return import_module("sinkscope.loops")
    if name in _HOME:
        return globals().setdefault(name, _function(name))  # the module, where one of that name was imported before
    if not name.startswith("_"):
        from sinkscope.registry import entries

        entry = entries().get(name)
        if entry is not None and entry.decorator == "measurement":
            return globals().setdefault(name, entry.load())
    raise AttributeError(f"module 'sinkscope' has no attribute {name!r}; it has: {', '.join(_names())}")


def __dir__() -> list[str]:
    return _names()
