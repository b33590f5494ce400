"""The plain module inside any kind of model object, and the view of it as a `Target`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.finding import adapter_of
from sinkscope.models.stack import DRAFT
from sinkscope.models.target import Kind, Target


def unwrap(model: object) -> tuple[nn.Module, Kind]:
    """The plain Hugging Face module inside `model`, and the kind of object that `model` is.

    Raises:
        SinkscopeError: `model` is none of the three kinds.
    """
    if isinstance(model, Target):
        return model.hf, model.kind
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, nn.Module):
        return unwrap(compiled)
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
        return unwrap(wrapper.get_base_model())
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


def target_of(model: object, tokenizer: Any = None, name: str | None = None) -> Target:
    """View `model` as a Target (a Target is returned unchanged). The adapter is inferred if the model has no row.

    Warns if the model runs with an attention that drops its soft cap, as transformers 5.17 chooses for Gemma 2.
    """
    if isinstance(model, Target):
        return model
    hf, kind = unwrap(model)
    config: Any = hf.config
    if tokenizer is None:  # a bridge and nnsight change theirs, `load` keeps the original on the module
        tokenizer = getattr(hf, "tokenizer", None) or getattr(model, "tokenizer", None)
    if tokenizer is not None and not callable(tokenizer):
        raise SinkscopeError(f"tokenizer={tokenizer!r}: expected a tokenizer of transformers", page="no-tokenizer")
    origin = getattr(hf, "sinkscope_name", None) or getattr(config, "_name_or_path", "")
    label = str(name or origin or type(hf).__name__).rstrip("/").split("/")[-1]
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and getattr(config, "_attn_implementation", None) == "sdpa":
        warn(
            f"{label} runs with SDPA attention, which drops its soft cap of {cap:g}: the numbers are those of the "
            "model as it runs, not as it was trained; load it with attn_implementation='eager' or sinkscope.load"
        )
    target = Target(model, hf, kind, DRAFT, tokenizer, label)
    adapter = adapter_of(target)
    if not adapter.base or not hasattr(hf, adapter.base.partition(".")[0]):
        raise UnsupportedError(
            f"{type(hf).__name__} has no head that gives logits: load it with AutoModelForCausalLM",
            page="not-causal-lm",
        )
    return replace(target, adapter=adapter)
