"""Names that the parts of a layer have in known architectures; a layer has the first that is there.

A part in a new place is served as soon as its name is here. What stands at a name is proved, never believed.
"""

from __future__ import annotations

ATTENTION = """self_attn linear_attn mamba conv norm_attn_norm.attn attn.attention attention.self attn self_attention
    attention multi_head_attention temporal_block mixer""".split()
"""Attention, or what stands in its place in some layers."""
QUERY = "q_proj.linear q_proj q_b_proj Wq query".split()
KEY = "k_proj.linear k_proj Wk key".split()
VALUE = "v_proj.linear v_proj Wv value".split()
FUSED = "qkv_proj query_key_value c_attn Wqkv".split()
"""Queries, keys and values in one module. These, and the output projection, are parts of the attention."""
OUTPUT = "o_proj.linear o_proj out_proj dense c_proj Wo".split()
OUTPUT_BESIDE = ["attention.output.dense"]
"""The output projection, where it stands beside the attention."""
ATTENTION_NORM = """post_self_attn_layernorm post_attention_layernorm post_norm1 post_operator_norm attn_sconv
    attention.output.dense""".split()
"""What stands between attention and residual stream."""
MID = """pre_feedforward_layernorm pre_mlp_layernorm pre_ff_layernorm feedforward_layernorm norm_attn_norm.norm_2 norm_2
    ln_2 layernorm2 final_layer_norm ffn_norm mlp_norm channel_pre_norm attention.output.LayerNorm
    post_attention_layernorm""".split()
"""What reads the residual stream between attention and MLP, before the MLP itself."""
MLP = "mlp feed_forward ffn block_sparse_moe mlp_block mixer".split()
MLP_NORM = """mlp.post_mlp_layernorm post_mlp_layernorm post_feedforward_layernorm post_norm2 post_ffn_norm""".split()
"""What stands between MLP and residual stream."""
EXPERTS = ["", "experts"]
"""The fused experts: the MLP itself, or a part of it."""
SHARED = ["", "shared_experts", "shared_expert", "shared_mlp"]
"""The shared expert in a mixture, or beside it; the first is that of an MLP without one."""
SHARED_GATE = "shared_expert_gate"
PROJECTIONS = """down_proj up_proj gate_proj|down_proj gate_up_proj|dense_4h_to_h dense_h_to_4h|c_proj c_fc|fc2 fc1
    |w2 w3 w1|fc_out fc_in|Wo Wi|2 0|output_linear input_linear|output.dense intermediate.dense""".split("|")
"""Down, up and gate of an MLP, each three beside each other."""
NORM_INSIDE = "ffn_sub_norm"
"""A norm before the down projection of an MLP: behind it, no module gives a factor of a neuron."""
