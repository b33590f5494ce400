"""Tiny random models, nothing planted, one per architecture, made from the config class alone."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from ways.model_copies import Original

from .tokens import BOS, EOS, PAD, word_tokenizer

_SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,  # the usual 0.02 gives logits and attention too flat to tell one edit from another
}
_OWN_MHA = {"num_key_value_heads": 4}  # families without grouped queries
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # not YaRN, which warns at this length
_GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 16}

# What a family needs beside the sizes, by the names of its own config; most need nothing.
_OWN = {
    "gpt2": {"n_inner": 64, **_OWN_MHA},
    "gpt_neox": _OWN_MHA,
    "opt": {"ffn_dim": 64, "word_embed_proj_dim": 32, **_OWN_MHA},
    "falcon": {"ffn_hidden_size": 64, "new_decoder_architecture": True, "num_kv_heads": 2, **_OWN_MHA},
    "phi": _OWN_MHA,
    "phi3": {"sliding_window": None},
    "mistral": {"sliding_window": 16, "head_dim": 8},
    "mixtral": {**_MOE, "sliding_window": None},
    "qwen2": {"use_sliding_window": False},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "glm4_moe": {
        "head_dim": 8,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "attention_bias": True,
    },
    "gemma": {"head_dim": 8},
    "gemma2": _GEMMA,
    "gemma3_text": {**_GEMMA, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "olmo": _OWN_MHA,
    "olmo2": _OWN_MHA,
    "gpt_oss": {**_MOE, "head_dim": 8, "sliding_window": 16, "rope_parameters": _PLAIN_ROPE},
}
MODEL_TYPES = tuple(
    """llama mistral qwen2 qwen3 gemma olmo gemma2 gemma3_text olmo2 mixtral qwen3_moe qwen2_moe glm4_moe gpt_oss phi3
    phi gpt2 gpt_neox opt falcon""".split()
)
"""A new one joins all tests of families."""


def tiny_model(model_type: str, seed: int = 0, **overrides) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Random causal LM of `model_type` (3 layers, d_model 32, 4 heads, float32, eval) and its tokenizer."""
    key = model_type, seed, repr(sorted(overrides.items()))
    if key not in _MADE:
        _MADE[key] = Original(_made(model_type, seed, overrides))
    model = _MADE[key].copy()
    return model, word_tokenizer(model.config.vocab_size)


_MADE: dict[tuple[str, int, str], Original] = {}


def _made(model_type: str, seed: int, overrides: dict[str, Any]) -> PreTrainedModel:
    own = _OWN.get(model_type, {})
    settings = {**_SIZES, "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD} | own | overrides
    config = AutoConfig.for_model(model_type, **settings)
    # The SDPA that some versions of transformers choose for Gemma 2 drops its soft cap.
    trained = {"attn_implementation": "eager"} if model_type == "gemma2" else {}
    with torch.random.fork_rng(devices=[]), torch.no_grad():  # the caller's random numbers stay as they were
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **trained).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # biases start at 0 and norms at 1: moved, so that forgetting one shows
                parameter += 0.1 * torch.randn_like(parameter)
    model.config.architectures = [type(model).__name__]
    return model


def attention_names(model) -> list[str]:
    """The attention that the configurations of a model and of the modules inside select."""
    configs = [module.config for module in model.modules() if hasattr(getattr(module, "config", None), "model_type")]
    return [config._attn_implementation for config in configs]
