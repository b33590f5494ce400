"""The adapters of 22 architectures, written by hand: what inference has to give."""

from __future__ import annotations

from dataclasses import replace

from sinkscope.models.adapters import Found

_LLAMA = Found("llama")
_SANDWICH = replace(
    _LLAMA,
    mid="pre_feedforward_layernorm",
    attn_out="post_attention_layernorm",
    post_mlp_norm="post_feedforward_layernorm",
)

ROWS = {
    a.model_type: a
    for a in (
        _LLAMA,
        *(replace(_LLAMA, model_type=t) for t in ("mistral", "qwen2", "qwen3", "gemma", "olmo")),
        *(replace(_SANDWICH, model_type=t) for t in ("gemma2", "gemma3_text")),
        replace(
            _SANDWICH,
            model_type="gemma3",
            layers="model.language_model.layers",
        ),
        replace(_SANDWICH, model_type="olmo2", mid="mlp"),
        *(replace(_LLAMA, model_type=t, experts="mlp.experts") for t in ("mixtral", "qwen3_moe")),
        replace(
            _LLAMA,
            model_type="qwen2_moe",
            down="mlp.down_proj|mlp.shared_expert.down_proj",
            up="mlp.up_proj|mlp.shared_expert.up_proj",
            gate="mlp.gate_proj|mlp.shared_expert.gate_proj",
            experts="mlp.experts",
            shared_gate="mlp.shared_expert_gate",
        ),
        replace(
            _LLAMA,
            model_type="glm4_moe",
            down="mlp.down_proj|mlp.shared_experts.down_proj",
            up="mlp.up_proj|mlp.shared_experts.up_proj",
            gate="mlp.gate_proj|mlp.shared_experts.gate_proj",
            experts="mlp.experts",
        ),
        replace(_LLAMA, model_type="gpt_oss", experts="mlp.experts", learned_sinks=True),
        replace(
            _LLAMA,
            model_type="phi3",
            up="mlp.gate_up_proj",
            gate=None,
            fused_gate_up=True,
            q=None,
            k=None,
            v=None,
            fused_qkv="self_attn.qkv_proj",
        ),
        replace(
            _LLAMA,
            model_type="phi",
            down="mlp.fc2",
            up="mlp.fc1",
            gate=None,
            o="self_attn.dense",
            mid=None,
        ),
        Found(
            "gpt2",
            layers="transformer.h",
            attn="attn",
            down="mlp.c_proj",
            up="mlp.c_fc",
            gate=None,
            q=None,
            k=None,
            v=None,
            fused_qkv="attn.c_attn",
            o="attn.c_proj",
            mid="ln_2",
            absolute_positions=True,
        ),
        Found(
            "gpt_neox",
            layers="gpt_neox.layers",
            attn="attention",
            down="mlp.dense_4h_to_h",
            up="mlp.dense_h_to_4h",
            gate=None,
            q=None,
            k=None,
            v=None,
            fused_qkv="attention.query_key_value",
            qkv_layout="by head",
            o="attention.dense",
            mid=None,
        ),
        Found(
            "opt",
            layers="model.decoder.layers",
            mlp="fc2",
            down="fc2",
            up="fc1",
            gate=None,
            o="self_attn.out_proj",
            mid="final_layer_norm",
            absolute_positions=True,
        ),
        Found(
            "falcon",
            layers="transformer.h",
            attn="self_attention",
            down="mlp.dense_4h_to_h",
            up="mlp.dense_h_to_4h",
            gate=None,
            q=None,
            k=None,
            v=None,
            fused_qkv="self_attention.query_key_value",
            qkv_layout=None,
            o="self_attention.dense",
            mid=None,
            attention_interface=False,
        ),
    )
}
