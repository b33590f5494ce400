"""Generation under interventions, and the loop monitor inside servers.

`VllmLoopProcessor` is for vLLM and `SglangLoopProcessor` for SGLang. Both are made when they are first asked for,
because their base classes belong to the servers.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import resolve_name
from types import new_class
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinkscope.loops.servers.loop_row import ServingSettings as ServingSettings

_PROCESSORS = {
    "VllmLoopProcessor": (
        "sinkscope.loops.servers.vllm:VllmLoops",
        "vllm.v1.worker.gpu.sample.logits_processor:LogitsProcessor",
    ),
    "SglangLoopProcessor": (
        "sinkscope.loops.servers.sglang:SglangLoops",
        "sglang.srt.sampling.custom_logit_processor:CustomLogitProcessor",
    ),
}
"""Our class, and the interface of the server."""


def __getattr__(name: str) -> Any:
    if name == "ServingSettings":  # it loads torch, which the proxy does without
        return import_module("sinkscope.loops.servers.loop_row").ServingSettings
    if name not in _PROCESSORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    ours, needed = _PROCESSORS[name]
    try:
        classes = (resolve_name(ours), resolve_name(needed))
    except (ImportError, AttributeError):
        needed = needed.replace(":", ".")
        raise ImportError(f"{name} needs {needed}, which is not installed here; see docs/serving.md") from None
    namespace = {"__module__": __name__, "__doc__": classes[0].__doc__}
    globals()[name] = new_class(name, classes, exec_body=lambda body: body.update(namespace))
    return globals()[name]
