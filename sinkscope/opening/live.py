"""The view of a model that a user holds as a `Target`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sinkscope.errors import SinkscopeError, UnsupportedError, warn
from sinkscope.models.loading.backends import unwrap
from sinkscope.models.modules.stack import DRAFT
from sinkscope.models.target import Target
from sinkscope.opening.device_attention import is_misread
from sinkscope.opening.inference.find import adapter_of


def target_of(model: object, tokenizer: Any = None) -> Target:
    """View `model` as a Target (a Target is returned unchanged). Names propose its adapter if it has no row.

    Weights of a model of nnsight that was made by name are loaded.

    Warns if the model runs with an attention that drops its soft cap, as transformers 5.17 chooses for Gemma 2, or that
    is wrong on its device.
    """
    if isinstance(model, Target):
        return model
    hf, kind = unwrap(model)
    config: Any = hf.config
    if tokenizer is None:  # a bridge and nnsight change theirs, `load` keeps the original on the module
        tokenizer = getattr(hf, "tokenizer", None) or getattr(model, "tokenizer", None)
    if tokenizer is not None and not callable(tokenizer):
        raise SinkscopeError(f"tokenizer={tokenizer!r}: expected a tokenizer of transformers")
    origin = getattr(hf, "sinkscope_name", None) or getattr(config, "_name_or_path", "")
    label = str(origin or type(hf).__name__).rstrip("/").split("/")[-1]
    cap = getattr(config.get_text_config(), "attn_logit_softcapping", None)
    if cap is not None and getattr(config, "_attn_implementation", None) == "sdpa":
        warn(
            f"{label} runs with SDPA attention, which drops its soft cap of {cap:g}: the numbers are those of the "
            "model as it runs, not as it was trained; load it with attn_implementation='eager' or sinkscope.load"
        )
    target = Target(model, hf, kind, DRAFT, tokenizer, label)
    adapter = adapter_of(target)
    if not adapter.base or not hasattr(hf, adapter.base.partition(".")[0]):
        raise UnsupportedError(f"{type(hf).__name__} has no head that gives logits: load it with AutoModelForCausalLM")
    target = replace(target, adapter=adapter)
    if is_misread(target):
        warn(
            f"{label} runs with SDPA attention, which PyTorch gets wrong on {target.device} at the last token of rows "
            "of 1 + 32 n tokens; load it with attn_implementation='eager' or sinkscope.load"
        )
    return target
