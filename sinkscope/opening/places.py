"""Propose where a model keeps its parts: names say places, and sums of one pass say which of several is right.

1. Names say where the parts may be, and the pass which module attends.
2. Where a norm may stand in several places, the first way is taken with which the residual stream is the sum of the
   parts. The sums also measure constant factors.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from accelerate import init_empty_weights

from sinkscope.models.adapters import Adapter, NotInferredError
from sinkscope.models.checkpoints.stream import MAKING
from sinkscope.models.target import LayerInput
from sinkscope.models.weights import experts_of
from sinkscope.opening.proof import Record, read, reads_heads, sums_of

NAMES = {
    "attn": """self_attn linear_attn mamba conv norm_attn_norm.attn attn.attention attention.self attn self_attention
        attention multi_head_attention temporal_block mixer""".split(),
    "mlp": "mlp feed_forward ffn block_sparse_moe mlp_block mixer".split(),
    "mid": """pre_feedforward_layernorm pre_mlp_layernorm pre_ff_layernorm feedforward_layernorm norm_attn_norm.norm_2
        norm_2 ln_2 layernorm2 final_layer_norm ffn_norm mlp_norm channel_pre_norm attention.output.LayerNorm
        post_attention_layernorm""".split(),
    "attn_out": """post_self_attn_layernorm post_attention_layernorm post_norm1 post_operator_norm
        attention.output.dense""".split(),
    "post_mlp_norm": """mlp.post_mlp_layernorm post_mlp_layernorm post_feedforward_layernorm post_norm2
        post_ffn_norm""".split(),
    # in the attention
    "q": "q_proj.linear q_proj q_b_proj Wq query".split(),
    "k": "k_proj.linear k_proj Wk key".split(),
    "v": "v_proj.linear v_proj Wv value".split(),
    "fused_qkv": "qkv_proj query_key_value c_attn Wqkv".split(),
    "o": "o_proj.linear o_proj out_proj dense c_proj Wo attention.output.dense".split(),
    # in the MLP, or in a shared expert
    "down": "down_proj dense_4h_to_h c_proj fc2 w2 fc_out Wo 2 output_linear output.dense".split(),
    "up": "up_proj gate_up_proj dense_h_to_4h c_fc fc1 w3 fc_in Wi 0 input_linear intermediate.dense".split(),
    "gate": "gate_proj w1".split(),
    "shared": "shared_experts shared_expert shared_mlp".split(),
    "shared_gate": ["shared_expert_gate"],
    "norm inside": ["ffn_sub_norm"],  # before the down projection: behind it, no module gives a factor of a neuron
}
"""What parts are called: the first name that is there is taken, but of norms the first with which sums hold."""

Fields = dict[str, Any]
"""What was found of a layer, by the fields of an adapter; None of parts that it does not have."""
_VOCABULARY = 64
_MOST = {
    "intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff": 32,
    "sliding_window|window_size|attention_chunk_size|local_attention|index_topk$": 6,
    "index_topk_blocks|index_block_size": 2,
}
"""Sizes in configurations, and what they are at most in a sample."""


@torch.enable_grad()
def proposed(records: Mapping[int, Record], numbers: Sequence[int]) -> Adapter:
    """Return the adapter that names and sums say of a model.

    Args:
        records: What passed its layers.
        numbers: For each layer of the whole model, the number of the first one of its kind.

    Raises:
        NotInferredError: A part was not found.
    """
    settings, placed, adds = Fields(), dict[int, Fields](), True
    for layer in {*numbers}:
        fields = _placed(records[layer])
        settings |= _measured(replace(records[layer], paths=fields))
        adds = adds and settings["adds"]
        placed[layer] = {part: path for part, path in fields.items() if path is not None}
    for part, what in (("o", "softmax attention"), ("mlp", "MLP")):
        if not any(part in paths for paths in placed.values()):
            raise NotInferredError(f"no {what} was found in its layers")
    settings |= {"adds": adds, "from_any_layer": _begins(records[max(records)])}
    return replace(records[0].target.adapter, parts=tuple(placed[number] for number in numbers), **settings)


def _begins(record: Record) -> bool:
    """Whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    start = LayerInput(record.layer, record.into("").detach(), isinstance(record.output[""], tuple))
    with suppress(LookupError, TypeError, ValueError):  # layers pass on more than the stream
        return record.is_near(read(record.target, [record.layer], start)[record.layer].left(""), record.left(""))
    return False


# -- one layer ---------------------------------------------------------------------------------------------------------


def _there(record: Record, part: str, parent: str = "") -> list[str]:
    """Where a layer has modules of the names of a part below a parent."""
    modules = dict(record.module.named_modules())
    return [path for path in [f"{parent}.{name}".strip(".") for name in NAMES[part]] if path in modules]


def _first(record: Record, part: str, parent: str = "") -> Any:
    """The first of them; None if there is none."""
    return next(iter(_there(record, part, parent)), None)


def _named_mlp(record: Record) -> Fields:
    """What names say of the MLP; empty if there is none."""
    block, fields = _first(record, "mlp") or "", Fields()
    for path in (f"{block}.experts", block):
        with suppress(AttributeError):
            if experts_of(record.module.get_submodule(path)) is not None:
                fields = {"mlp": block, "experts": path, "shared_gate": _first(record, "shared_gate", block)}
    for parent in dict.fromkeys([block, *_there(record, "shared", block), "", *_there(record, "shared")]):
        found = {part: _first(record, part, parent) for part in ("down", "up", "gate")}
        if found["down"] and found["up"]:
            if _there(record, "norm inside", parent):
                found |= {"up": None, "gate": None}
            return {"mlp": block or parent, **fields, **found}
    return fields


def _placed(record: Record) -> Fields:
    """Where a layer has its parts: what names say, and the first way to place norms with which the sums hold."""
    fields = {"": ""} | _named_mlp(record)
    mlp, experts, down = [fields.get(part) for part in ("mlp", "experts", "down")]
    attn = _first(record, "attn")
    if replace(record, paths={"attn": attn}).rows is not None:
        for part in ("q", "k", "v", "fused_qkv", "o"):
            fields[part] = _first(record, part, attn)
        fields["o"] = fields["o"] or _first(record, "o")
    if attn != mlp:
        fields["attn"] = attn
    places: dict[str, Any] = {
        "mid": [*_there(record, "mid"), mlp, None],
        "post_mlp_norm": [*_there(record, "post_mlp_norm"), None],
        "mlp": [*dict.fromkeys(filter(None, [mlp, experts, down]))] or [None],
        "attn_out": [*_there(record, "attn_out"), None, fields.get("o")],
    }

    def wrong(way: Fields) -> int:
        """How many sums do not hold, and whether nothing is known between the parts."""
        problems = sum(not each.fit() for each in sums_of(replace(record, paths=way)))
        if problems and way["mid"] in {mlp, way["attn_out"]} - {None}:  # it may read a norm that no module gives
            return len(NAMES)
        return problems + (way["mid"] is None)

    ways = itertools.product(*places.values())
    return min([fields | dict(zip(places, way, strict=True)) for way in ways], key=wrong)


def _measured(record: Record) -> Fields:
    """What is measured of a layer: factors, and the order of what is in one module."""
    found, up, post = Fields(), record.left("up"), record.into("down")
    for each in sums_of(record):
        fitted = each.fit()
        found |= fitted | {"adds": bool(fitted)}  # the last one is what leaves the layer
    if [*record.module.buffers(recurse=False)]:  # a factor, other in every layer
        found["adds"] = False
    if not found["adds"]:
        found["write_factor"] = 1.0
    if up is not None and post is not None:
        found["fused_gate_up"] = up.shape[-1] == 2 * post.shape[-1]
    if record.paths.get("fused_qkv"):
        by_head = replace(record.target.adapter, qkv_layout="by head")
        reads = reads_heads(replace(record, target=replace(record.target, adapter=by_head)), "v")
        found["qkv_layout"] = "by head" if reads else "beside"
    return found


# -- the small model ---------------------------------------------------------------------------------------------------


def sample_of(hf: Any, stack: str, depth: int) -> Any:
    """Return a small random model of the class of another one, in float32 on the CPU.

    It has narrow MLPs, and windows of a few tokens.

    Args:
        hf: The other model, whose weights are not read.
        stack: The path of its list of layers.
        depth: The number of its layers that the small one has.
    """
    config = copy.deepcopy(hf.config)
    config._attn_implementation = "eager"
    text = config.get_text_config()
    text.vocab_size, text.pad_token_id = _VOCABULARY, 0
    for name, value in list(vars(text).items()):
        for pattern, most in _MOST.items():
            if re.search(pattern, name) and isinstance(value, int) and value > most:
                setattr(text, name, most)
    with MAKING, init_empty_weights():  # but buffers are made, such as rotary frequencies
        sample: Any = type(hf)(config).eval()
    del sample.get_submodule(stack)[depth:]
    random, weights = torch.Generator().manual_seed(0), dict[str, torch.Tensor]()
    for name, weight in sample.named_parameters():  # every part gives numbers of about one size
        spread = min(0.5, weight.shape[-1] ** -0.5) if weight.ndim >= 2 else 0.1
        weights[name] = torch.normal(float(weight.ndim < 2), spread, weight.shape, generator=random)
    sample.load_state_dict(weights, strict=False, assign=True)
    return sample.float().requires_grad_(False)
