"""Generation under interventions, and the loop monitor inside servers.

`VllmLoopProcessor` is for vLLM and `SglangLoopProcessor` for SGLang. Both are made when they are first asked for,
because their base classes belong to the servers.
"""

from __future__ import annotations

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
    server = _PROCESSORS[name][1].partition(".")[0]
    classes: list[Any] = []
    changed = ""
    for place in _PROCESSORS[name]:
        module, _, class_name = place.partition(":")
        try:
            classes.append(getattr(import_module(module), class_name))
        except ImportError:  # a version of the server with one of the interfaces only
            continue
        except AttributeError:
            changed = place
    if len(classes) == 1:
        problem = f"{server}, which is not installed here"
        if changed:
            problem = f"{changed.replace(':', '.')}, which this version of {server} does not have; see docs/serving.md"
        raise ImportError(f"{name} needs {problem}")
    namespace = {"__module__": __name__, "__doc__": classes[0].__doc__}
    globals()[name] = new_class(name, tuple(classes), exec_body=lambda body: body.update(namespace))
    return globals()[name]
