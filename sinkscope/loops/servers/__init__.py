"""Generation under interventions, and the loop monitor inside servers.

`VllmLoopProcessor` is for vLLM and `SglangLoopProcessor` for SGLang. Both are made when they are first asked for,
because their base classes belong to the servers.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from types import new_class
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.loops.servers.loop_row import ServingSettings as ServingSettings

# Our class and the interfaces of the server, as module:class; a version of the server may lack some interfaces.
_PROCESSORS = {
    "VllmLoopProcessor": (
        "sinkscope.loops.servers.vllm:VllmLoops",
        "vllm.v1.sample.logits_processor:LogitsProcessor",
        "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor",
    ),
    "SglangLoopProcessor": (
        "sinkscope.loops.servers.sglang:SglangLoops",
        "sglang.srt.sampling.custom_logit_processor:CustomLogitProcessor",
    ),
}


def __getattr__(name: str) -> Any:
    if name == "ServingSettings":  # it loads torch, which the proxy does without
        return import_module("sinkscope.loops.servers.loop_row").ServingSettings
    if name not in _PROCESSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    classes: list[Any] = []
    for place in _PROCESSORS[name]:
        module, _, class_name = place.partition(":")
        with suppress(ImportError, AttributeError):  # a version of the server with one of the interfaces only
            classes.append(getattr(import_module(module), class_name))
    if len(classes) == 1:
        needed = _PROCESSORS[name][1].replace(":", ".")
        raise ImportError(f"{name} needs {needed}, which is not installed here; see docs/serving.md")
    namespace = {"__module__": __name__, "__doc__": classes[0].__doc__}
    globals()[name] = new_class(name, tuple(classes), exec_body=lambda body: body.update(namespace))
    return globals()[name]
