"""The view of a model that a user holds as a `Target`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sinkscope.engine.stock import stock_of
from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.adapters import DRAFT
from sinkscope.models.shards import split_weight
from sinkscope.models.target import ModelKind, Target
from sinkscope.opening.parts import adapter_of

_SPLITTING = ("FSDPModule", "FullyShardedDataParallel", "PipelineIdentityLayer")
"""Classes of modules that show that a model is split in an unserved way."""


def _is_served(hf: Any, kind: ModelKind) -> bool:
    """Whether a model is whole, or a plain one that transformers has split by tensor parallelism alone."""
    for module in hf.modules():
        if any(cls.__name__ in _SPLITTING for cls in type(module).__mro__):
            return False
    if split_weight(hf) is None:
        return (getattr(hf, "tp_size", None) or 1) == 1
    settings = getattr(hf.config, "distributed_config", None)
    return kind == "hf" and settings is not None and max(settings.dp_size, settings.ep_size) <= 1


def _inside(model: Any) -> tuple[Any, ModelKind]:
    """The plain Hugging Face module inside `model`, and the kind of object that `model` is.

    Weights of a model of nnsight that was made by name are loaded.

    Raises:
        SinkscopeError: `model` is none of the three kinds.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return _inside(model.module)
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):  # compiled
        return _inside(model._orig_mod)
    if isinstance(getattr(model, "original_model", None), nn.Module):
        return model.original_model, "bridge"
    if getattr(model, "peft_config", None) and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise UnsupportedError(
                f"this {type(model).__name__} puts learned tokens before the text, which sinkscope does not see: "
                "measure the model without it, or an adapter in the weights, such as LoRA"
            )
        return _inside(model.get_base_model())
    if any(cls.__module__.startswith("nnsight.") for cls in type(model).__mro__):
        if callable(getattr(model, "dispatch", None)):
            model.dispatch()  # one made by name has none before its first trace; this does nothing afterwards
        return getattr(model, "_module", None) or model._model, "nnsight"
    if isinstance(model, nn.Module) and hasattr(model, "config"):
        return model, "hf"
    raise SinkscopeError(
        f"{type(model).__name__} is not a model: expected a Hugging Face causal language model, a TransformerBridge "
        "or a model of nnsight (TransformersModel); load names and folders with sinkscope.load(...)"
    )


_FAULTY = "cuda"
"""Kind of device on which SDPA may show the last query only the first key, where query heads share one head of keys.

PyTorch's memory-efficient attention takes the first row of the mask if a single query is left for a program
(pytorch/pytorch#191937; seen with 2.11 on an H100).
"""


def is_misread(target: Target) -> bool:
    """Return whether a model runs with an attention that may be wrong at the last token of a row on its device."""
    shares_one = target.n_heads > 1 and target.n_kv_heads <= target.processes
    return shares_one and target.device.type == _FAULTY and stock_of(target.config).kind == "sdpa"


def with_adapter(model: Any, hf: Any, kind: ModelKind, tokenizer: Any, name: str, store: Any = None) -> Target:
    """Return a model as a Target, whose adapter names propose if it has no row; arguments as those of `Target`.

    Raises:
        UnsupportedError: The architecture is not known.
    """
    target = Target(model, hf, kind, DRAFT, tokenizer, name, store)
    return replace(target, adapter=adapter_of(target))


def target_of(model: object, tokenizer: Any = None) -> Target:
    """View `model` as a Target (a Target is returned unchanged).

    Weights of a model of nnsight that was made by name are loaded.

    Warns if the model runs with an attention that may be wrong on its device.

    Raises:
        SinkscopeError: `model` is no model, or holds no weights.
        UnsupportedError: It is split over processes in an unserved way, or of an architecture that is not known.
    """
    if isinstance(model, Target):
        return model
    hf, kind = _inside(model)
    if not _is_served(hf, kind):
        raise UnsupportedError(
            f"this {type(model).__name__} is split over processes in a way that is not served (FSDP, a pipeline, "
            "experts, DTensors of one's own, transformers before 5.19): load it in one process (device_map= spreads it "
            "over devices), or let transformers split a plain model by tensor parallelism alone"
        )
    if tokenizer is None:  # a bridge and nnsight change theirs, `load` keeps the original on the module
        tokenizer = getattr(hf, "tokenizer", None) or getattr(model, "tokenizer", None)
    if tokenizer is not None and not callable(tokenizer):
        raise SinkscopeError(f"tokenizer={tokenizer!r}: expected a tokenizer of transformers")
    origin = getattr(hf, "sinkscope_name", None) or getattr(hf.config, "_name_or_path", "") or type(hf).__name__
    name = str(origin).rstrip("/").split("/")[-1]
    embedding = hf.get_input_embeddings()
    if next(embedding.parameters()).is_meta and not hasattr(embedding, "_hf_hook"):
        raise UnsupportedError(
            f"{name} holds no weights yet (they are on the meta device): load it with sinkscope.load(...), or "
            "make it with dispatch=True (nnsight)"
        )
    target = with_adapter(model, hf, kind, tokenizer, name)
    if is_misread(target):
        warn(
            f"{name} runs with SDPA attention, which PyTorch may get wrong on {target.device} at the last token of "
            "rows of 1 + 32 n tokens; load it with attn_implementation='eager' or sinkscope.load"
        )
    return target
