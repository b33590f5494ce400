"""Propose where a model keeps its parts: names say places, and sums of one pass say which of several is right.

1. Names say where the parts may be, and the pass which module attends.
2. Where a norm may stand in several places, the first way is taken with which the residual stream is the sum of the
   parts. The sums also measure constant factors.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinkscope.models.adapters import PATHS, Adapter, Found, NotInferredError
from sinkscope.models.checkpoints.config import plain_by_default
from sinkscope.models.hooks import on_hidden
from sinkscope.models.target import LayerInput, parts_of
from sinkscope.models.weights import experts_of
from sinkscope.opening.proof import Record, as_not_inferred, reads_heads, sums_of, text_of

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
SHARED = ["", "shared_experts", "shared_expert", "shared_mlp"]
"""The shared expert in a mixture, or beside it; the first is that of an MLP without one."""
PROJECTIONS = """down_proj up_proj gate_proj|down_proj gate_up_proj|dense_4h_to_h dense_h_to_4h|c_proj c_fc|fc2 fc1
    |w2 w3 w1|fc_out fc_in|Wo Wi|2 0|output_linear input_linear|output.dense intermediate.dense""".split("|")
"""Down, up and gate of an MLP, each three beside each other."""
NORM_INSIDE = "ffn_sub_norm"
"""A norm before the down projection of an MLP: behind it, no module gives a factor of a neuron."""

Fields = dict[str, Any]
"""What was found of a layer, by the fields of an adapter; None of parts that it does not have."""
NONE: Fields = dict.fromkeys(PATHS)
_VOCABULARY = 64
_PER_LAYER = ("layer_types", "no_rope_layers", "mlp_layer_types")  # lists in a config with an entry per layer
_MOST = {
    "intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff": 32,
    "sliding_window|window_size|attention_chunk_size|local_attention|index_topk$": 6,
    "index_topk_blocks|index_block_size": 2,
}
"""Sizes in configurations, and what they are at most in a sample."""


@torch.enable_grad()
@as_not_inferred()
def proposed(records: Mapping[int, Record], numbers: Sequence[int], row: Adapter | None) -> Found:
    """Return the adapter that names, or a row that somebody wrote, and sums say of a model.

    Args:
        records: What passed its layers; of its adapter, all but the paths are read.
        numbers: For each layer of the whole model, the number of the first one of its kind.
        row: Where the parts are, if somebody wrote it.

    Raises:
        NotInferredError: A part was not found, or layers differ where an adapter has one value.
    """
    adapter = records[0].target.adapter
    attends = {layer: _attends(records[layer]) for layer in sorted({*numbers})}
    if not any(attends.values()):
        raise NotInferredError("no softmax attention was found in its layers")
    kinds, settings, rows = list[Fields](), Fields(), dict[int, Adapter]()
    for layer, attn in attends.items():
        record = records[layer]
        fields = _placed(record, attn) if row is None else NONE | parts_of(record.module, row)
        rows[layer] = Adapter(adapter.model_type, adapter.layers, **fields)
        kinds.append(fields | _measured(replace(record, paths=fields)))
    for name in dict.fromkeys(itertools.chain(*kinds)):
        values = list(dict.fromkeys(fields[name] for fields in kinds if name in fields))
        if name in PATHS:
            settings[name] = "|".join(filter(None, values)) or None
        elif name == "adds":
            settings[name] = all(values)
        elif len(values) > 1:
            raise NotInferredError(f"{name!r} of the adapter differs between layers: {', '.join(map(str, values))}")
        else:
            settings[name] = values[0]
    if settings["mlp"] is None:
        raise NotInferredError("no MLP was found in its layers")
    settings["from_any_layer"] = _begins(records[max(records)])
    return replace(adapter, rows=tuple(rows[number] for number in numbers), **settings)


def _begins(record: Record) -> bool:
    """Whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    target, layer, given = record.target, record.layer, record.left("")
    start, ends = LayerInput(layer, record.into("").detach(), isinstance(record.output[""], tuple)), list[Tensor]()
    with suppress(LookupError, TypeError, ValueError), target.hooks(on_hidden(record.module, "post", ends.append)):
        target.forward(text_of(target), last_layer=layer, start=start)
    return bool(ends) and record.is_near(ends[0], given)  # else layers pass on more than the stream


# -- one layer ---------------------------------------------------------------------------------------------------------


def _attends(record: Record) -> str | None:
    """The path of the module that attends with a softmax; None if none is seen to, or returns rows unseen."""
    for path, module in reversed([*record.module.named_modules()]):  # what is inside comes first
        output, call = record.output.get(path), record.call
        if call is not None and call.module is module:
            return path
        has_rows = isinstance(output, tuple) and any(getattr(rows, "ndim", 0) == 4 for rows in output[1:2])
        if path and has_rows and not record.target.adapter.attention_interface:
            return path
    return None


def _there(record: Record, paths: Iterable[str], parent: str = "") -> list[str]:
    """Those paths below a parent that the layer has."""
    modules = dict(record.module.named_modules())
    inside = [f"{parent}.{path}".strip(".") for path in paths]
    return [path for path in inside if path in modules and path]


def _linear(record: Record, paths: Iterable[str], parent: str = "") -> str | None:
    """The first of some parts that has a matrix, whatever wraps it."""
    for path in _there(record, paths, parent):
        if path != parent and any(weight.ndim == 2 for weight in record.module.get_submodule(path).parameters()):
            return path
    return None


def _named_mlp(record: Record) -> Fields:
    """What names say of the MLP; empty if there is none."""
    block = next(iter(_there(record, MLP)), "")
    fields: Fields = {}
    for path in _there(record, ["experts", ""], block):
        if experts_of(record.module.get_submodule(path)) is not None:
            fields = {"mlp": block, "experts": path, "shared_gate": _linear(record, ["shared_expert_gate"], block)}
    inside = [f"{block}.{shared}".strip(".") for shared in SHARED]
    for parent, projections in itertools.product(dict.fromkeys(inside + SHARED), PROJECTIONS):
        down, up, gate = [_linear(record, [path], parent) for path in f"{projections} .".split()[:3]]
        if down is None or up is None:
            continue
        if _there(record, [NORM_INSIDE], parent):
            up = gate = None
        return {"mlp": block or parent, **fields, "down": down, "up": up, "gate": gate}
    return fields


def _placed(record: Record, attends: str | None) -> Fields:
    """Where a layer has its parts: what names say, and the first way to place norms with which the sums hold.

    Args:
        record: What passed the layer.
        attends: The module that attends, as the pass has shown; None if none does.
    """
    fields = NONE | _named_mlp(record)
    attn = attends or next(iter(_there(record, ATTENTION)), None)
    if attn != fields["mlp"]:
        fields["attn"] = attn
    if attends is not None:
        fields |= {name: _linear(record, paths, attends) for name, paths in OF_ATTENTION.items()}
        fields["o"] = fields["o"] or _linear(record, OUTPUT_BESIDE)
    mlp, up, experts, down = [fields[part] for part in ("mlp", "up", "experts", "down")]
    places: dict[str, Any] = {
        "mid": [*_there(record, MID), mlp, up, None],
        "post_mlp_norm": [*_there(record, MLP_NORM), None],
        "mlp": [*dict.fromkeys(filter(None, [mlp, experts, down]))] or [None],
        "attn_out": [*_there(record, ATTENTION_NORM), None, fields["o"]],
    }

    def wrong(way: Fields) -> int:
        """How many sums do not hold, and whether nothing is known between the parts."""
        problems = sum(not each.fit() for each in sums_of(replace(record, paths=way)))
        if problems and way["mid"] in {mlp, up, way["attn_out"]} - {None}:  # it may read a norm that no module gives
            return len(PATHS)
        return problems + (way["mid"] is None)

    ways = itertools.product(*places.values())
    return min([fields | dict(zip(places, way, strict=True)) for way in ways], key=wrong)


def _measured(record: Record) -> Fields:
    """What is measured of a layer: factors, and the order of what is in one module."""
    found, up, post = Fields(), record.left("up"), record.into("down")
    for each in sums_of(record):
        found |= each.fit()
    found.pop("start", None)
    if record.paths["mlp"]:
        has_buffers = any(True for _ in record.module.buffers(recurse=False))  # a factor, other in every layer
        found["adds"] = "write_factor" in found and not has_buffers
        if not found["adds"]:
            found["write_factor"] = 1.0
    if up is not None and post is not None:
        found["fused_gate_up"] = up.shape[-1] == 2 * post.shape[-1]
    if record.paths["fused_qkv"]:
        by_head = replace(record.target.adapter, qkv_layout="by head", v=None)
        reads = reads_heads(replace(record, target=replace(record.target, adapter=by_head)), "v")
        found["qkv_layout"] = "by head" if reads else "beside"
    return found


# -- the small model ---------------------------------------------------------------------------------------------------


def sample_of(hf: Any, depth: int) -> Any:
    """Return a small random model of the class of another one, in float32 on the CPU.

    It has narrow MLPs, and windows of a few tokens.

    Args:
        hf: The other model, whose weights are not read.
        depth: Number of layers.
    """
    config = copy.deepcopy(hf.config)
    config.distributed_config = None  # it is whole in every process
    config._attn_implementation = "eager"
    text = config.get_text_config()
    text.num_hidden_layers, text.vocab_size, text.pad_token_id = depth, _VOCABULARY, 0
    for name in _PER_LAYER:
        if isinstance(getattr(text, name, None), list):
            with suppress(AttributeError):  # some compute theirs, from a period
                setattr(text, name, getattr(text, name)[:depth])
    for name, value in list(vars(text).items()):
        for pattern, most in _MOST.items():
            if re.search(pattern, name) and isinstance(value, int) and value > most:
                setattr(text, name, most)
    with plain_by_default(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        inside = [module for module in hf.modules() if isinstance(module, PreTrainedModel)]  # of a wrapper, too
        sample = type(inside[0])(config).float().eval().requires_grad_(False)
        for path, module in sample.named_modules():
            with suppress(AttributeError):  # constants that follow from the depth of the whole model (MiniCPM3)
                there = vars(hf.get_submodule(path))
                vars(module).update({name: there[name] for name in there if isinstance(there[name], float)})
        for weight in sample.parameters():  # every part gives numbers of about one size
            if weight.ndim >= 2:
                weight.normal_(std=min(0.5, weight.shape[-1] ** -0.5))
            else:
                weight.add_(0.1 * torch.randn_like(weight))
    return sample
