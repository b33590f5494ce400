"""The kinds of model objects: the plain module inside one, and one wrapped around a plain module."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.call_cache import bridge_hooks
from sinkscope.models.loading.config import first_line
from sinkscope.models.modules.parts import Kind
from sinkscope.models.shards import split_weight
from sinkscope.models.target import Target

_LIBRARIES = {"bridge": ("TransformerLens", "transformer-lens"), "nnsight": ("nnsight", "nnsight")}
"""What wraps a model, and its package."""
_SPLITTING = {
    "FSDPModule": "FSDP2",
    "FullyShardedDataParallel": "FSDP",
    "PipelineIdentityLayer": "pipeline parallelism",
}
"""Classes of modules that are there only if a model is split."""
_STYLES = (
    *("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise"),
    *("rowwise", "rowwise_split_input", "rowwise_rep", "moe_tp_experts"),
    *("embedding_rowwise", "embedding_colwise", "replicated_with_grad_allreduce", "replicate"),
)
"""Styles of tensor parallelism after which a hook sees the columns of a process, or the whole."""


def unwrap(model: object, *, loads: bool = True) -> tuple[nn.Module, Kind]:
    """The plain Hugging Face module inside `model`, and the kind of object that `model` is.

    Weights of a model of nnsight that was made by name are loaded, if it `loads`.

    Raises:
        SinkscopeError: `model` is none of the three kinds.
        UnsupportedError: The model is split over processes.
    """
    hf, kind = _inside(model, loads)
    split = _split_by(hf)
    if split is None and kind != "hf" and split_weight(hf) is not None:
        split = f"tensor parallelism inside a {type(model).__name__} (a plain Hugging Face model is served)"
    if split is not None:
        raise UnsupportedError(
            f"this {type(hf).__name__} is split over processes by {split}, which is not served: load it in one process "
            "(device_map= spreads it over devices), or let transformers split it by tensor parallelism alone"
        )
    return hf, kind


def _split_by(hf: nn.Module) -> str | None:
    """By what a model is split over processes; None if it is whole, or split in a way that is served."""
    for module in hf.modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _SPLITTING:
                return _SPLITTING[cls.__name__]
    found = split_weight(hf)
    if found is not None:
        return _split_otherwise(hf, getattr(hf.config, "distributed_config", None), found[0])
    if (getattr(hf, "tp_size", None) or 1) > 1:
        return "tensor parallelism of transformers before 5.19, which does not say who holds what"
    return None


def _split_otherwise(hf: Any, settings: Any, name: str) -> str | None:
    """What about the split of a model is not served, if one of its weights is split."""
    if settings is None:
        return f"something else than transformers ({name} is a DTensor)"
    if settings.dp_size > 1:
        return "FSDP2"
    if settings.ep_size > 1:
        return "expert parallelism"
    for part, style in hf.tp_plan.items():
        is_linear = style == "packed_colwise" and "experts" not in part
        if style not in _STYLES or is_linear:
            return f"tensor parallelism in the style {style!r} ({part})"
    return None


def _inside(model: object, loads: bool) -> tuple[nn.Module, Kind]:
    if isinstance(model, Target):
        return model.hf, model.kind
    inside = getattr(model, "_orig_mod", None)  # of a compiled model
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inside = model.module
    if isinstance(inside, nn.Module):
        return _inside(inside, loads)
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
        return _inside(wrapper.get_base_model(), loads)
    packages = {cls.__module__.split(".")[0] for cls in type(model).__mro__}
    if "nnsight" in packages:
        load_weights: Any = getattr(model, "dispatch", None)
        if loads and callable(load_weights):
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


def wrap(hf: Any, tokenizer: Any, backend: Kind) -> Any:
    """Wrap `hf` as the requested kind of object. Bridge and nnsight change `hf` in place, so do not use it elsewhere.

    The tokenizer is copied first, because both set padding and special tokens on theirs. TransformerLens and nnsight
    are imported here.

    Raises:
        UnsupportedError: TransformerLens or nnsight is not installed, or cannot wrap this architecture.
        SinkscopeError: There is no tokenizer.
    """
    if backend == "hf":
        return hf
    if tokenizer is None:
        raise SinkscopeError(
            f"backend={backend!r} needs a tokenizer and the model came without one; give tokenizer=..., or use "
            'backend="hf"'
        )
    library, package = _LIBRARIES[backend]
    tokenizer = copy.deepcopy(tokenizer)
    try:
        if backend == "bridge":
            return _bridge(hf, tokenizer)
        return import_module("nnsight").TransformersModel(hf, tokenizer=tokenizer, task="text-generation")
    except ImportError as error:
        raise UnsupportedError(
            f"backend={backend!r} needs {package}, which cannot be imported ({error}): pip install {package}, or use "
            'backend="hf"'
        ) from None
    except Exception as error:
        raise UnsupportedError(
            f'{library} cannot wrap this {hf.config.model_type} model ({first_line(error)}); backend="hf" can'
        ) from error


def _bridge(hf: Any, tokenizer: Any) -> Any:
    cls: Any = import_module("transformer_lens.model_bridge").TransformerBridge
    config = hf.config
    if config.model_type == "falcon" and config.new_decoder_architecture:
        raise ValueError("its fused query, key and value are interleaved by group")
    if getattr(config, "vision_config", None) is not None:
        try:
            import_module("torchvision")
        except Exception:  # a broken one counts as missing for TransformerLens, too
            # Booting would run `pip install torchvision`, which may replace torch in the user's environment.
            raise ValueError("it needs torchvision for models with images: pip install torchvision") from None
    if not config.architectures:
        config.architectures = [type(hf).__name__]
    # The bridge makes a second tokenizer from the path of this one, which may be on a hub, unless it is told that
    # this one adds BOS; whether it really does is found out by encoding a text.
    tokenizer.init_kwargs.setdefault("name_or_path", "")
    tokenizer.init_kwargs["add_bos_token"] = True
    name = getattr(config, "_name_or_path", "")
    if "/" not in name:  # it may be an alias of TransformerLens, which warns of those
        name = type(hf).__name__
    bridge = cls.boot_transformers(name, hf_model=hf, tokenizer=tokenizer, dtype=hf.dtype)
    for module, _, fn in bridge_hooks(bridge):
        module.register_forward_pre_hook(fn, with_kwargs=True)
    return bridge
