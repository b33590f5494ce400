"""What the names of modules say of a decoder layer: names of each part, in the order in which they count."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from torch import nn

from sinkscope.models.experts import experts_of
from sinkscope.models.weights import input_width, is_transposed

ATTENTION = """self_attn linear_attn mamba conv norm_attn_norm.attn attn.attention attention.self attn self_attention
    attention multi_head_attention temporal_block mixer""".split()
"""Attention, or what stands in its place in some layers."""
OF_ATTENTION = {
    "q": "q_proj.linear q_proj q_b_proj Wq query".split(),
    "k": "k_proj.linear k_proj Wk key".split(),
    "v": "v_proj.linear v_proj Wv value".split(),
    "fused_qkv": "qkv_proj query_key_value c_attn Wqkv".split(),
    "o": "o_proj.linear o_proj out_proj dense c_proj Wo".split(),
}
"""Parts of the attention, by the fields of an adapter."""
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
MLP_NORM = "mlp.post_mlp_layernorm post_mlp_layernorm post_feedforward_layernorm post_norm2 post_ffn_norm".split()
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

Fields = dict[str, Any]
"""What was found of a layer, by the fields of an adapter; nothing of parts that it does not have."""


class Parts:
    """The modules of a layer by path, and what names say of them."""

    def __init__(self, layer: nn.Module) -> None:
        self.modules = dict(layer.named_modules())
        self.has_buffers = any(True for _ in layer.buffers(recurse=False))  # such as a factor, other in every layer

    def there(self, paths: Iterable[str], parent: str = "") -> list[str]:
        """Return those paths below a parent that the layer has."""
        inside = [f"{parent}.{path}".strip(".") for path in paths]
        return [path for path in inside if path in self.modules and path]

    def _linear(self, paths: Iterable[str], parent: str = "") -> str | None:
        """The first of some parts that has a matrix, whatever wraps it."""
        for path in self.there(paths, parent):
            if path != parent and any(parameter.ndim == 2 for parameter in self.modules[path].parameters()):
                return path
        return None

    def named(self, attends: nn.Module | None) -> Fields:
        """Return what names say of a layer.

        Args:
            attends: The module that attends, as a pass has shown; None if none does.
        """
        fields, attn = self._mlp(), next(iter(self.there(ATTENTION)), None)
        if attends is not None:
            (attn,) = [path for path, module in self.modules.items() if module is attends]
        if attn is None or attn == fields.get("mlp"):
            return fields
        fields["attn"] = attn
        if attends is not None:
            for name, paths in OF_ATTENTION.items():
                fields[name] = self._linear(paths, attn)
            fields["o"] = fields["o"] or self._linear(OUTPUT_BESIDE)
        return fields

    def _mlp(self) -> Fields:
        """What names say of the MLP; empty if there is none."""
        block = next(iter(self.there(MLP)), "")
        fields: Fields = {}
        for path in self.there(EXPERTS, block):
            if experts_of(self.modules[path]) is not None and not fields:
                fields = {"mlp": block, "experts": path, "shared_gate": self._linear([SHARED_GATE], block)}
        inside = [f"{block}.{shared}".strip(".") for shared in SHARED]
        for parent, projections in itertools.product(dict.fromkeys(inside + SHARED), PROJECTIONS):
            down, up, gate = [self._linear([path], parent) for path in f"{projections} .".split()[:3]]
            if down is None or up is None:
                continue
            if self.there([NORM_INSIDE], parent):
                up = gate = None
            return {"mlp": block or parent, **fields, "down": down, "up": up, "gate": gate}
        return fields

    def is_fused(self, fields: Fields) -> bool:
        """Return whether `up` gives gate and up side by side."""
        down, up = self.modules[fields["down"]], self.modules[fields["up"]]
        return 2 * input_width(down) == len(getattr(up, "weight", ())) and not is_transposed(up)
