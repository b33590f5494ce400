"""Tiny random models of many architectures, and where each keeps what is edited by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import transformers as tf
from torch import nn

from .model_copies import Original

VOCAB, LAYERS, HIDDEN, HEADS = 160, 3, 64, 4
BOS, EOS, PAD = 0, 1, 2
IMAGE_TOKENS = (159, 157, 158)
"""Ids of an image's tokens, and of its begin and end."""
_ENDS = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
    "max_position_embeddings": 2048,
    "intermediate_size": 96,
    **_ENDS,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}
_LLAMA = {**_GROUPED, "head_dim": 16}
_WINDOW = {"sliding_window": 24}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GPT2 = {
    "vocab_size": VOCAB,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 2048,
    "initializer_range": 0.2,
    **_ENDS,
}


@dataclass(frozen=True)
class Family:
    """How a model is made, and the paths of its parts.

    Attributes:
        config: Makes its configuration.
        layer: Path of a layer, with {} for its number.
        down: Path of the down projection in a layer; None: the MLP has experts.
        out: Path of the output projection of attention in a layer.
        mask_second: Whether the second argument of its call is the attention mask.
        positions: Whether a call takes `position_ids`.
        window: Its sliding window or the length of its chunks, if it has any.
        absolute: Whether places are counted in the whole row, with its padding, unless the call says them.
        dispatches: Whether its layers look an attention function up by its name.
        shares_keys: Whether layers read the keys of earlier ones.
        masked: Whether transformers makes its mask by the functions that read positions as documents.
        experts: Path of the experts in a layer, if it has any.
    """

    config: Callable[[], Any]
    layer: str = "model.layers.{}"
    down: str | None = "mlp.down_proj"
    out: str = "self_attn.o_proj"
    mask_second: bool = True
    positions: bool = True
    window: int | None = None
    absolute: bool = False
    dispatches: bool = True
    shares_keys: bool = False
    masked: bool = True
    experts: str | None = None

    def block(self, model: nn.Module, number: int) -> nn.Module:
        return model.get_submodule(self.layer.format(number))


_H = "transformer.h.{}"
FAMILIES = {
    "llama": Family(lambda: tf.LlamaConfig(**_LLAMA)),
    "qwen3": Family(lambda: tf.Qwen3Config(**_LLAMA)),
    "mistral": Family(lambda: tf.MistralConfig(**_LLAMA, **_WINDOW), window=24),
    "gemma2": Family(
        lambda: tf.Gemma2Config(**_LLAMA, **_WINDOW, query_pre_attn_scalar=16), window=24, dispatches=False
    ),
    "llama4": Family(
        lambda: tf.Llama4TextConfig(
            **_LLAMA,
            intermediate_size_mlp=96,
            attention_chunk_size=16,
            moe_layers=[],
            layer_types=["chunked_attention", "full_attention", "chunked_attention"],
        ),
        down="feed_forward.down_proj",
        window=16,
    ),
    "gemma3": Family(
        lambda: tf.Gemma3TextConfig(
            **_LLAMA,
            **_WINDOW,
            query_pre_attn_scalar=16,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        ),
        window=24,
    ),
    "gemma3 image": Family(
        lambda: tf.Gemma3Config(
            text_config={
                **_LLAMA,
                **_WINDOW,
                "query_pre_attn_scalar": 16,
                "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            },
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 28,
                "patch_size": 14,
            },
            mm_tokens_per_image=4,
            image_token_index=IMAGE_TOKENS[0],
            boi_token_index=IMAGE_TOKENS[1],
            eoi_token_index=IMAGE_TOKENS[2],
            **_ENDS,
        ),
        "model.language_model.layers.{}",
        mask_second=False,
        window=24,
    ),
    "granite": Family(
        lambda: tf.GraniteConfig(
            **_LLAMA,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=4.0,
            attention_multiplier=0.25,
        )
    ),
    "olmo2": Family(lambda: tf.Olmo2Config(**_GROUPED)),
    "starcoder2": Family(lambda: tf.Starcoder2Config(**_GROUPED), down="mlp.c_proj"),
    "phi": Family(lambda: tf.PhiConfig(**_SIZES), down="mlp.fc2", out="self_attn.dense"),
    "gpt2": Family(lambda: tf.GPT2Config(**_GPT2), _H, "mlp.c_proj", "attn.c_proj", mask_second=False, absolute=True),
    "neox": Family(lambda: tf.GPTNeoXConfig(**_SIZES), "gpt_neox.layers.{}", "mlp.dense_4h_to_h", "attention.dense"),
    "opt": Family(
        lambda: tf.OPTConfig(
            **{**_SIZES, "init_std": 0.2, "ffn_dim": 96, "word_embed_proj_dim": HIDDEN},
        ),
        "model.decoder.layers.{}",
        "fc2",
        "self_attn.out_proj",
        positions=False,
    ),
    "falcon": Family(
        lambda: tf.FalconConfig(**_SIZES, num_kv_heads=4, new_decoder_architecture=True),
        _H,
        "mlp.dense_4h_to_h",
        "self_attention.dense",
        mask_second=False,
        masked=False,
        dispatches=False,
    ),
    "bloom": Family(
        lambda: tf.BloomConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=4, initializer_range=0.2, **_ENDS
        ),
        _H,
        "mlp.dense_4h_to_h",
        "self_attention.dense",
        mask_second=False,
        dispatches=False,
        positions=False,
    ),
    "mixtral": Family(
        lambda: tf.MixtralConfig(**_LLAMA, **_EXPERTS, sliding_window=None), down=None, experts="mlp.experts"
    ),
    "qwen3_moe": Family(
        lambda: tf.Qwen3MoeConfig(**_LLAMA, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
        down=None,
        experts="mlp.experts",
    ),
    "gpt_oss": Family(
        lambda: tf.GptOssConfig(
            **_LLAMA,
            **_WINDOW,
            **_EXPERTS,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        down=None,
        window=24,
        masked=False,
        dispatches=False,
        experts="mlp.experts",
    ),
    "phi3": Family(lambda: tf.Phi3Config(**_GROUPED)),
    "gemma4": Family(
        lambda: tf.Gemma4TextConfig(
            **_LLAMA,
            **_WINDOW,
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=1,
            layer_types=["sliding_attention", "full_attention", "full_attention"],
            global_head_dim=16,
        ),
        window=24,
        shares_keys=True,
    ),
    "gpt_bigcode": Family(
        lambda: tf.GPTBigCodeConfig(**_GPT2), _H, "mlp.c_proj", "attn.c_proj", mask_second=False, absolute=True
    ),
    "codegen": Family(
        lambda: tf.CodeGenConfig(**_GPT2, rotary_dim=8),
        _H,
        "mlp.fc_out",
        "attn.out_proj",
        mask_second=False,
        dispatches=False,
        absolute=True,
    ),
}


IMAGE = ("gemma3 image",)
"""Families that read images."""
INSIDE = ("falcon", "bloom", "codegen")
"""Families that compute attention inside their modules."""
ENDS: dict[str, tuple[int | None, int | None]] = {
    "usual": (EOS, PAD),
    "none": (None, PAD),
    "pad is end": (EOS, EOS),
    "pad is 0": (None, 0),
}
"""The ids of end and padding."""


@cache
def _made(name: str, dtype: str) -> Original:
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(FAMILIES[name].config()).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:  # biases of 0 and scales of 1 would hide what forgets them
                weight.add_(torch.randn_like(weight) * 0.1)
    model.requires_grad_(False)
    return Original(model.to(getattr(torch, dtype)))


def model_of(name: str, dtype: str = "float32", ends: str = "usual", device: str = "cpu") -> nn.Module:
    """A model of one's own, always the same."""
    model = _made(name, dtype).copy()
    for settings in (model.config, model.generation_config):
        settings.eos_token_id, settings.pad_token_id = ENDS[ends]
    return model.to(device)
