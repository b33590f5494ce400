"""The kinds of model objects, and the plain module inside one."""

from __future__ import annotations

from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.modules.parts import ModelKind
from sinkscope.models.shards import split_weight

_SPLITTING = ("FSDPModule", "FullyShardedDataParallel", "PipelineIdentityLayer")
"""Classes of modules that are there only if a model is split in a way that is not served."""
_STYLES = (
    *("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"),
    *("rowwise", "rowwise_split_input", "rowwise_rep", "moe_tp_experts"),
    *("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate"),
)
"""Styles of tensor parallelism after which a hook sees the columns of a process, or the whole."""


def unwrap(model: object) -> tuple[nn.Module, ModelKind]:
    """Return the plain Hugging Face module inside `model`, and the kind of object that `model` is.

    Weights of a model of nnsight that was made by name are loaded.

    Raises:
        SinkscopeError: `model` is none of the three kinds.
        UnsupportedError: The model is split over processes.
    """
    hf, kind = _inside(model)
    if not _is_served(hf, kind):
        raise UnsupportedError(
            f"this {type(model).__name__} is split over processes in a way that is not served (FSDP, a pipeline, "
            "experts, DTensors of one's own, transformers before 5.19): load it in one process (device_map= spreads it "
            "over devices), or let transformers split a plain model by tensor parallelism alone"
        )
    return hf, kind


def _is_served(hf: Any, kind: ModelKind) -> bool:
    """Whether a model is whole, or a plain one that transformers has split by tensor parallelism alone."""
    for module in hf.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _SPLITTING:
                return False
    if split_weight(hf) is None:
        return (getattr(hf, "tp_size", None) or 1) == 1
    settings = getattr(hf.config, "distributed_config", None)
    if kind != "hf" or settings is None or settings.dp_size > 1 or settings.ep_size > 1:
        return False
    for part, style in hf.tp_plan.items():
        is_linear = style == "packed_colwise" and "experts" not in part
        if style not in _STYLES or is_linear:
            return False
    return True


def _inside(model: object) -> tuple[nn.Module, ModelKind]:
    inside = getattr(model, "_orig_mod", None)  # of a compiled model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inside = model.module
    if isinstance(inside, nn.Module):
        return _inside(inside)
    original = getattr(model, "original_model", None)
    if isinstance(original, nn.Module):
        return original, "bridge"
    peft_configs: Any = getattr(model, "peft_config", None)
    if peft_configs and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in peft_configs.values()):
            raise UnsupportedError(
                f"this {type(model).__name__} puts learned tokens before the text, which sinkscope does not see: "
                "measure the model without it, or an adapter in the weights, such as LoRA"
            )
        wrapper: Any = model
        return _inside(wrapper.get_base_model())
    packages = {cls.__module__.split(".")[0] for cls in type(model).__mro__}
    if "nnsight" in packages:
        load_weights: Any = getattr(model, "dispatch", None)
        if callable(load_weights):
            load_weights()  # one made by name has none before its first trace; this does nothing afterwards
        inner = getattr(model, "_module", None) or getattr(model, "_model", None)
        if isinstance(inner, nn.Module):
            return inner, "nnsight"
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return model, "hf"
    raise SinkscopeError(
        f"{type(model).__name__} is not a model: expected a Hugging Face causal language model, a TransformerBridge "
        "or a model of nnsight (TransformersModel); load names and folders with sinkscope.load(...)"
    )
