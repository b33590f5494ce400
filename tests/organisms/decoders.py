"""A tiny random model of every decoder type of transformers, with the multipliers that released checkpoints have.

The defaults of configuration classes hide multipliers behind 1, and layers of one kind after each other; here windows,
mixtures, grouped queries and hybrid layers all occur within four layers of width 64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCABULARY = 384
_SIZES = {
    1024: """max_position_embeddings n_positions n_ctx max_seq_len max_target_positions model_max_length
        max_sequence_length""",
    500: "ngram_vocab_size_base",
    128: "mamba_d_ssm mamba_d_inner",
    96: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dim_ff dff ffn_hidden_size
        intermediate_size_mlp dense_intermediate_size n_inner""",
    64: """hidden_size n_embd d_model embedding_dim embedding_size emb_dim word_embed_proj_dim input_embedding_size
        output_embedding_size sliding_window sliding_window_size attention_chunk_size window_size local_attention
        attention_window_size keep_window_size lru_width attention_hidden_size rel_extent llm_hidden dim_model_base
        floor_scale out_hidden_size embed_dim max_source_positions""",
    50: "shape_vocab_size pronunciation_vocab_size",
    48: """moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size shared_intermediate_size
        shared_experts_intermediate_size moe_shared_expert_intermediate_size""",
    32: "index_topk image_size",
    24: "q_lora_rank qk_head_dim",
    16: """swa_head_dim head_dim dim_head kv_channels kv_lora_rank qk_nope_head_dim v_head_dim index_head_dim
        linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_state mamba_d_head mamba_head_dim
        ssm_state_size state_size mamba_chunk_size chunk_size attention_head_dim hidden_size_per_layer_input block_size
        expert_hidden index_n_heads
        router_hidden_size o_lora_rank head_size ple_embed_dim hc_lowrank mamba_headdim block_multiple_of
        shape_embed_dim pronunciation_embed_dim index_block_size num_mel_bins prompt_mid_dim classifier_proj_size""",
    8: """qk_rope_head_dim mamba_n_heads mamba_num_heads mamba_dt_rank time_step_rank laurel_rank rotary_dim d_rel
        gated_norm_rank adapter_rank n_mamba_heads patch_size""",
    4: """num_hidden_layers n_layer n_layers num_layers num_blocks decoder_layers encoder_layers num_decoder_layers
        num_encoder_layers num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads
        encoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads
        num_experts n_routed_experts num_local_experts moe_num_experts linear_num_value_heads linear_num_heads
        prompt_length layer_group_size""",
    3: "moe_layer_end_index conv_L_cache task_type_vocab_size",
    2: """num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups num_experts_per_tok
        num_experts_per_token moe_topk moe_k linear_num_key_heads type_vocab_size o_groups pad_token_id
        index_topk_blocks depth num_layers_per_stack n_layers_per_attn_res_block""",
    1: """n_shared_experts num_shared_experts moe_num_shared_experts n_group topk_group num_expert_group
        first_k_dense_replace num_dense_layers num_mem_blocks eos_token_id eod_token_id sep_token_id n_langs
        audio_channels""",
    0: "bos_token_id decoder_start_token_id cls_token_id start_token_id num_mtp_layers",
    VOCABULARY: "vocab_size vocab_size_per_layer_input unpadded_vocab_size n_vocab",
}
_SMALL = {name: size for size, names in _SIZES.items() for name in names.split()}
_SMALL["initializer_range"] = 0.1
_LEFT_OUT = set(
    """layer_types mlp_layer_types layers_block_type no_rope_layers moe_layers full_attn_idxs attention_layers
    attention_types hybrid_layer_ids indexer_types layer_rope_theta num_attention_heads_per_layer
    activation_sparsity_pattern cross_attention_layers mtp_layers_block_type block_types attn_layers architectures
    transformers_version model_type dtype torch_dtype _name_or_path mlp_only_layers attn_layer_indices id2label label2id
    num_labels compress_ratios kv_source_layers rope_parameters_per_layer quantization_config per_layer attn_type_list
    moe_layer_freq""".split()
)
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
_BLOCKS = {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": 32}
_LATENT = {"head_dim": 8, "num_key_value_heads": 4}
_LATENT_TYPES = "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa minicpm3 youtu".split()
_MULTIPLIERS = {"residual_multiplier": 0.22, "embedding_multiplier": 12.0, "attention_multiplier": 0.0625}
_GRANITE = "granite granite_swa granitemoe granitemoe_swa granitemoeshared".split()
_INDEXER = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 32,
    "indexer_compress_ratio": 4,
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_OWN = {
    **{name: _WINDOWS for name in "gemma2 gemma3_text cohere2 exaone4 olmo3 ministral gpt_oss".split()},
    **dict.fromkeys(_LATENT_TYPES, _LATENT),
    **dict.fromkeys(_GRANITE, _MULTIPLIERS),
    "granitemoehybrid": _MULTIPLIERS | _LINEAR,
    "bailing_hybrid": _LATENT | _LINEAR,
    "kimi_linear": _LATENT | _LINEAR,
    "bamba": {"attn_layer_indices": [1, 3]},
    "cohere_compass_text": _WINDOWS | {"rope_parameters": dict.fromkeys(_WINDOWS["layer_types"], _ROPE)},
    "dbrx": {
        "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note_text": _LATENT
    | {"layer_types": ["indexed_attention", "sliding_attention"] * 2, "swa_q_lora_rank": 24, "swa_kv_lora_rank": 16}
    | {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 24,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon": {"num_kv_heads": 4},
    "falcon_h1": {"mlp_multipliers": [0.88, 0.2], "attention_out_multiplier": 0.9, "key_multiplier": 0.4},
    "gemma3n_text": _WINDOWS | {"num_kv_shared_layers": 1, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "hrm_text": {"num_hidden_layers": 16, "H_cycles": 2, "L_cycles": 3},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": _LATENT | {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2},
    "minimax": _LINEAR | {"sliding_window": None},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2, "index_n_heads": 2},
    "mllama": {"cross_attention_layers": [1]},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
    "olmo_hybrid": _LINEAR | {"linear_num_key_heads": 4, "num_key_value_heads": 4},
    "qwen3_next": _LINEAR,
    "qwen4_exp": _INDEXER,
    "qwen4_exp_text": _INDEXER,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "rwkv": {"attention_hidden_size": 64},
    "smollm3": {"no_rope_layer_interval": 2},
    "xlstm": {"chunk_size": 16, "qk_dim_factor": 1.0, "ffn_round_up_to_multiple_of": 16},
    "zamba": _BLOCKS
    | {"attn_layer_period": 2, "attn_layer_offset": 1, "attention_hidden_size": 128, "num_key_value_heads": 4}
    | {"n_mamba_heads": 2, "use_mamba_kernels": False},
    "zamba2": _BLOCKS
    | {"num_key_value_heads": 4, "n_mamba_heads": 8, "num_query_groups": 4, "attention_hidden_size": 128},
    "zaya": {"num_experts_per_tok": 1},
}
_OWN["deepseek_v2"] = _LATENT | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2}
_OWN["dots1"] = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}


def small_settings(config, own: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a small configuration, from a default one."""
    fields = config.to_dict()
    parts = set(getattr(config, "sub_configs", None) or {})
    parts |= {name for name, value in fields.items() if isinstance(value, dict) and name.endswith("_config")}
    settings = {}
    for name, value in fields.items():
        if name in _LEFT_OUT or name.startswith("_"):
            continue
        if name in parts:
            part = getattr(config, name, None)
            if hasattr(part, "to_dict"):
                is_text = name in ("text_config", "decoder", "decoder_config")
                settings[name] = small_settings(part, own if is_text else {})
        elif name in _SMALL:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_unset = value is None and name in ("intermediate_size", "head_dim", "sliding_window")
            if is_unset or (is_number and not (value == 0 and name == "sliding_window")):
                settings[name] = _SMALL[name]
    return settings | own


def decoder_config(model_type: str):
    """A small configuration of a type; a test of a type that this version of transformers lacks is skipped."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    config_class, own = CONFIG_MAPPING[model_type], _OWN.get(model_type, {})
    try:
        config = config_class()
    except Exception:  # some have no defaults that agree with each other
        config = config_class(**own)
    return config_class(**small_settings(config, own))


@torch.no_grad()
def decoder(model_type: str):
    """A random causal language model of a type; nothing is zero, and nothing is tiny."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(decoder_config(model_type)).float().eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)

    def noise(tensor: torch.Tensor) -> torch.Tensor:
        return torch.randn(tensor.shape, generator=generator)

    done = set()
    for module in model.modules():
        kind = type(module).__name__
        for name, tensor in module.named_parameters(recurse=False):
            if id(tensor) in done or not tensor.is_floating_point():
                continue
            done.add(id(tensor))
            is_state = any(part in name.lower() for part in ("a_log", "conv", "dt_", "time_")) or "Conv1d" in kind
            if tensor.ndim >= 2 and not is_state and "Conv2d" not in kind:
                fan_in = 16 if "Embedding" in kind else tensor.shape[0 if kind == "Conv1D" else -1]
                tensor.copy_(noise(tensor) * min(0.5, fan_in**-0.5))
            elif tensor.ndim == 1 and name.endswith(("bias", "weight", "_states_scale", "residual_scale")):
                tensor.add_(noise(tensor) * (0.05 if name == "bias" else 0.1))
            elif not tensor.isfinite().all() or name in ("sinks", "altup_scale"):
                tensor.copy_(noise(tensor) * 0.1)
        for name, tensor in module.named_buffers(recurse=False):
            if name == "layer_scalar":
                tensor.add_(noise(tensor) * 0.2)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        generation.bos_token_id, generation.eos_token_id, generation.pad_token_id = 0, 1, 2
    return model


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of single bytes, with BOS 0, EOS 1 and padding 2."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "</s>": 1, "<pad>": 2, **{letter: 3 + i for i, letter in enumerate(letters)}}
    vocabulary |= {f"<{i}>": i for i in range(len(vocabulary), VOCABULARY)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
