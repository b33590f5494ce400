"""Generation under interventions, and the loop monitor inside servers.

`VllmLoopProcessor` is for vLLM and `SglangLoopProcessor` for SGLang. Both are made when they are first asked for,
because their base classes belong to the servers.
"""

from __future__ import annotations

from importlib import import_module
from types import new_class
from typing import Any, NamedTuple


class _Processor(NamedTuple):
    """A class that is made of ours and of a server's.

    Attributes:
        ours: Module and class in this package.
        interfaces: Module and class of each interface of the server; a version may lack some.
    """

    ours: tuple[str, str]
    interfaces: tuple[tuple[str, str], ...]


_PROCESSORS = {
    "VllmLoopProcessor": _Processor(
        ("sinkscope.serving.vllm", "VllmLoops"),
        (
            ("vllm.v1.sample.logits_processor", "LogitsProcessor"),
            ("vllm.v1.worker.gpu.sample.logits_processor", "LogitsProcessor"),
        ),
    ),
    "SglangLoopProcessor": _Processor(
        ("sinkscope.serving.sglang", "SglangLoops"),
        (("sglang.srt.sampling.custom_logit_processor", "CustomLogitProcessor"),),
    ),
}


def __getattr__(name: str) -> Any:
    if name == "ServingSettings":
        return import_module("sinkscope.serving.loop_row").ServingSettings
    if name not in _PROCESSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    processor = _PROCESSORS[name]
    bases: list[type] = []
    for module, base in processor.interfaces:
        try:
            bases.append(getattr(import_module(module), base))
        except ImportError:  # a version of the server with one of the interfaces only
            continue
    if not bases:
        server = processor.interfaces[0][0].partition(".")[0]
        raise ImportError(f"{name} needs {server}, which is not installed here")
    module, own_name = processor.ours
    ours = getattr(import_module(module), own_name)
    namespace = {"__module__": __name__, "__doc__": ours.__doc__}
    globals()[name] = new_class(name, (ours, *bases), exec_body=lambda body: body.update(namespace))
    return globals()[name]
