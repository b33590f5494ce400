"""Checks of what is to be loaded: dtype, device, kind of model, vocabulary, weights."""

from __future__ import annotations

from typing import Any

import torch

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.models.adapters import ADAPTERS, adapter_for

_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "float": torch.float32,
    "f32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "half": torch.float16,
    "f16": torch.float16,
    "float64": torch.float64,
    "fp64": torch.float64,
    "double": torch.float64,
}
_CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def parse_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A torch dtype from its name ("float32", "torch.bfloat16", "fp16", ...); None and "auto" give None.

    Raises:
        SinkscopeError: no floating type that models compute in.
    """
    if dtype is None or dtype == "auto":
        return None
    found = _DTYPES.get(dtype.lower().removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found not in _DTYPES.values():
        raise SinkscopeError(
            f"dtype {str(dtype)!r} is not one that models run in; expected float32, bfloat16, float16, float64 or auto",
            page="unknown-dtype",
        )
    return found


def parse_device(device: torch.device | str | None) -> torch.device:
    """A device of this machine; None: the first cuda device if there is one, else the CPU.

    Raises:
        SinkscopeError: it is not there; the message lists those that are.
    """
    here = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]
    if torch.backends.mps.is_available():
        here.append("mps")
    if device is None:
        return torch.device(here[1] if len(here) > 1 and here[1].startswith("cuda") else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        found = None
    if found is not None:
        index = f":{found.index or 0}" if found.type == "cuda" else ""
        if f"{found.type}{index}" in here and (found.type == "cuda" or not found.index):
            return found
    raise SinkscopeError(f"device {str(device)!r} is not there; this machine has {', '.join(here)}", page="no-device")


def check_kind(name: str, raw: Any) -> None:
    """Is this (the content of config.json) a causal language model that has an adapter?

    Raises:
        SinkscopeError: it is no configuration of a model.
        UnsupportedError: another kind of model, or no adapter.
    """
    from transformers.models.auto import modeling_auto as auto

    model_type = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(model_type, str):
        raise SinkscopeError(
            f"the config.json of {name} has no model_type, so it is no transformers model; give one that has",
            page="no-config",
        )
    classes: list[str] = raw.get("architectures") or []
    causal = any(c.endswith(_CAUSAL) for c in classes)
    if model_type in ADAPTERS and (causal or not classes):
        return
    what = ""
    if raw.get("is_encoder_decoder"):
        what = "an encoder-decoder model"
    elif model_type in ADAPTERS:
        what = "not a causal language model"
    elif model_type in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES or "vision_config" in raw:
        what = "a vision model"
    elif model_type in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES and not causal:
        what = "an encoder-only model"
    if not what:
        adapter_for(model_type)
    named = f"architectures {', '.join(classes)}" if classes else f"model type {model_type}"
    raise UnsupportedError(
        f"{name} is {what} ({named}); expected a decoder-only causal language model, such as llama-2-7b or gpt2",
        page="not-causal-lm",
    )


def check_vocabulary(tokenizer: Any, hf: Any) -> None:
    """Every token of the tokenizer has a row in the embedding (special tokens other than BOS and EOS excepted).

    Some models ship a tokenizer with special tokens for images that a text model never gets to see (Gemma 3 1B).

    Raises:
        SinkscopeError: the tokenizer belongs to another model.
    """
    if tokenizer is None:
        return
    rows = hf.get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= rows:
        return
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special -= {tokenizer.bos_token_id, tokenizer.eos_token_id}
    if beyond := sorted(i for i in tokenizer.get_vocab().values() if i >= rows and i not in special):
        raise SinkscopeError(
            f"the tokenizer has {len(tokenizer):,} tokens and the embedding {rows:,} rows ({len(beyond):,} tokens have "
            "none): they belong to different models; use the tokenizer that came with the weights",
            page="vocabulary-mismatch",
        )


@torch.no_grad()
def check_finite(hf: torch.nn.Module) -> None:
    """No parameter holds NaN or infinity (those without data here, and quantised ones, are passed over).

    Raises:
        SinkscopeError: names the first that does.
    """
    for name, tensor in hf.named_parameters():
        # One number per tensor: NaN and infinity survive a sum. Cheaper than a boolean tensor of the same shape.
        if tensor.is_meta or tensor.dtype not in _DTYPES.values() or torch.isfinite(tensor.sum(dtype=torch.float64)):
            continue
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            finer = "" if tensor.dtype == torch.float32 else ", or try dtype=float32"
            raise SinkscopeError(
                f"tensor {name} holds {bad:,} values that are NaN or infinite (of {tensor.numel():,}, "
                f"{str(tensor.dtype).removeprefix('torch.')}); download the checkpoint again{finer}",
                page="nan-weights",
            )
