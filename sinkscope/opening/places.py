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
from sinkscope.models.checkpoints.config import cpu_by_default, cut_depth
from sinkscope.models.hooks import first_tensor, on_hidden
from sinkscope.models.target import LayerInput, Target, parts_of
from sinkscope.models.weights import experts_of, input_width, is_transposed
from sinkscope.opening.proof import (
    EXACT,
    TOKENS,
    Record,
    mlp_sum,
    reads_heads,
    relative_error,
    residual_sums,
    text_of,
)  # fmt: skip

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
_VOCABULARY = 64
_MOST = {
    "intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff": 32,
    "sliding_window|window_size|attention_chunk_size|local_attention|index_topk$": 6,
    "index_topk_blocks|index_block_size": 2,
}
"""Sizes in configurations, and what they are at most in a sample."""
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None, "attn_factor": 1.0}
"""Fields of an adapter where layers differ."""


@torch.enable_grad()
def proposed(target: Target, records: Mapping[int, Record], numbers: Sequence[int], row: Adapter | None) -> Found:
    """Return the adapter that names, or a row that somebody wrote, and sums say of a model.

    Args:
        target: A small random model; of its adapter, all but the paths are read.
        records: What passed its layers.
        numbers: For each layer of the whole model, the number of the first one of its kind.
        row: Where the parts are, if somebody wrote it.

    Raises:
        NotInferredError: A part was not found.
    """
    kinds, attends = dict[int, Fields](), False
    for layer in sorted({*numbers}):
        record, written = records[layer], None
        if row is not None:
            written = Fields(parts_of(target.layers[layer], row))
        attn = _attends(target, record, written)
        attends = attends or attn is not None
        kinds[layer] = _fields(target, record, attn, written)
    if not attends:
        raise NotInferredError("no softmax attention was found in its layers, or none of one layer alone")
    adapter = _common_adapter(target.adapter, kinds, numbers)
    return replace(adapter, from_any_layer=_begins(target, records[max(records)]))


# -- one layer ---------------------------------------------------------------------------------------------------------


def _attends(target: Target, record: Record, written: Fields | None) -> str | None:
    """The path of the module that attends with a softmax; None if none is seen to, or returns rows unseen."""
    if record.call is not None:
        return next(path for path, module in record.modules.items() if module is record.call.module)
    if target.adapter.attention_interface:
        return None
    for path in _there(record, ATTENTION)[:1] if written is None else [written.get("attn", "")]:
        output = record.output.get(path)
        if isinstance(output, tuple) and len(output) > 1 and getattr(output[1], "ndim", 0) == 4:
            return path
    return None


def _there(record: Record, paths: Iterable[str], parent: str = "") -> list[str]:
    """Those paths below a parent that the layer has."""
    inside = [f"{parent}.{path}".strip(".") for path in paths]
    return [path for path in inside if path in record.modules and path]


def _linear(record: Record, paths: Iterable[str], parent: str = "") -> str | None:
    """The first of some parts that has a matrix, whatever wraps it."""
    for path in _there(record, paths, parent):
        if path != parent and any(parameter.ndim == 2 for parameter in record.modules[path].parameters()):
            return path
    return None


def _named(record: Record, attends: str | None) -> Fields:
    """What names say of a layer.

    Args:
        record: The layer.
        attends: The module that attends, as a pass has shown; None if none does.
    """
    fields = _named_mlp(record)
    attn = attends or next(iter(_there(record, ATTENTION)), None)
    if attn is None or attn == fields.get("mlp"):
        return fields
    fields["attn"] = attn
    if attends is not None:
        for name, paths in OF_ATTENTION.items():
            fields[name] = _linear(record, paths, attn)
        fields["o"] = fields["o"] or _linear(record, OUTPUT_BESIDE)
    return fields


def _named_mlp(record: Record) -> Fields:
    """What names say of the MLP; empty if there is none."""
    block = next(iter(_there(record, MLP)), "")
    fields: Fields = {}
    for path in _there(record, EXPERTS, block):
        if experts_of(record.modules[path]) is not None and not fields:
            fields = {"mlp": block, "experts": path, "shared_gate": _linear(record, [SHARED_GATE], block)}
    inside = [f"{block}.{shared}".strip(".") for shared in SHARED]
    for parent, projections in itertools.product(dict.fromkeys(inside + SHARED), PROJECTIONS):
        down, up, gate = [_linear(record, [path], parent) for path in f"{projections} .".split()[:3]]
        if down is None or up is None:
            continue
        if _there(record, [NORM_INSIDE], parent):
            up = gate = None
        return {"mlp": block or parent, **fields, "down": down, "up": up, "gate": gate}
    return fields


def _fields(target: Target, record: Record, attends: str | None, written: Fields | None) -> Fields:
    """What is found in a layer: the parts that are named or written, and measured factors."""
    fields = _placed(record, _named(record, attends)) if written is None else written
    if fields.get("down") and fields.get("up"):
        down, up = record.modules[fields["down"]], record.modules[fields["up"]]
        is_double = 2 * input_width(down) == len(getattr(up, "weight", ()))
        fields["fused_gate_up"] = is_double and not is_transposed(up)
    factors, _ = _measured(record, fields)
    if "attn_factor" in factors:
        fields["attn_factor"] = factors["attn_factor"]
    if "mlp" in fields:
        has_buffers = any(True for _ in record.modules[""].buffers(recurse=False))  # a factor, other in every layer
        fields["adds"] = "write_factor" in factors and not has_buffers
        fields["write_factor"] = factors["write_factor"] if fields["adds"] else 1.0
        total = mlp_sum(record, fields)
        measured = None if total is None else total.fit()
        fields |= measured or {}
    if attends is not None:
        fields["learned_sinks"] = record.call is not None and record.call.settings.get("s_aux") is not None
    if fields.get("fused_qkv"):
        fields["qkv_layout"] = "beside" if record.call is None else _layout(target, record, fields)
    return fields


def _layout(target: Target, record: Record, fields: Fields) -> str | None:
    """How queries, keys and values stand in what one module gives, by what attention reads."""
    for layout in ("beside", "by head"):
        adapter = replace(target.adapter, qkv_layout=layout, q=None, k=None, v=None)
        if reads_heads(replace(target, adapter=adapter), record, "v", fields):
            return layout
    return None


def _measured(record: Record, fields: Fields) -> tuple[dict[str, float], int]:
    """Factors of what a layer adds, and how many of its parts are in sums that do not hold."""
    factors, wrong = dict[str, float](), 0
    for each in residual_sums(record, fields):
        measured = each.fit()
        factors |= measured or {}
        if measured is None:
            wrong += max(1, len(each.parts))
    return factors, wrong


def _placed(record: Record, fields: Fields) -> Fields:
    """The fields with the places of norms and of what is read between the parts: the first way whose sums hold."""
    mids = [*_there(record, MID), fields.get("mlp"), fields.get("up"), None]
    writes, writers = [Fields()], list[str | None]([None])
    if "mlp" in fields:
        mlps = filter(None, dict.fromkeys(fields.get(name) for name in ("mlp", "experts", "down")))
        ways = itertools.product([*_there(record, MLP_NORM), None], mlps)
        writes = [{"mlp": mlp, "post_mlp_norm": norm} for norm, mlp in ways if not f"{norm}.".startswith(f"{mlp}.")]
    if "attn" in fields:
        around = filter(None, [fields["attn"].rpartition(".")[0], fields.get("o")])
        writers = [*_there(record, ATTENTION_NORM), None, *around]
    best: Fields = {**fields, "mid": None, "attn_out": None, **writes[0]}
    fewest = _measured(record, best)[1] + 1
    for mid, write, writer in itertools.product(mids, writes, writers):
        if mid is not None and mid == writer:
            continue
        way = {**fields, **write, "mid": mid, "attn_out": writer}
        problems = _measured(record, way)[1]
        if mid in (fields.get("mlp"), fields.get("up")) and problems:  # it may read a norm that no module gives
            continue
        if problems + (mid is None) < fewest:
            best, fewest = way, problems + (mid is None)
    return best


# -- all layers --------------------------------------------------------------------------------------------------------


def _common_adapter(adapter: Found, kinds: Mapping[int, Fields], numbers: Sequence[int]) -> Found:
    """One adapter for all kinds of layers, by the number of the first layer of each.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where an adapter has one value.
    """
    settings: Fields = {}
    for name in dict.fromkeys(itertools.chain(*kinds.values())):
        values = list(dict.fromkeys(fields[name] for fields in kinds.values() if name in fields))
        if name in PATHS:
            settings[name] = "|".join(filter(None, values)) or None
        elif len(values) == 1 or name in _IF_MIXED:
            settings[name] = values[0] if len(values) == 1 else _IF_MIXED[name]
        else:
            raise NotInferredError(f"{name!r} of the adapter differs between layers: {', '.join(map(str, values))}")
    if "mlp" not in settings:
        raise NotInferredError("no MLP was found in its layers")
    if len(kinds) > 1:
        rows = dict[int, Adapter]()
        for number, fields in kinds.items():
            own: Fields = {name: fields.get(name) for name in PATHS}
            rows[number] = Adapter(adapter.model_type, adapter.layers, **own)
        settings["rows"] = tuple(rows[number] for number in numbers)
    return replace(adapter, **settings)


def _begins(target: Target, record: Record) -> bool:
    """Whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    start = LayerInput(record.layer, record.into[""].detach(), isinstance(record.output[""], tuple))
    ends = list[Tensor]()
    hook = (target.layers[record.layer], "post", on_hidden(ends.append))
    with suppress(LookupError, TypeError, ValueError), target.hooks(hook):
        target.forward(text_of(target), last_layer=record.layer, start=start)
    expected = first_tensor(record.output[""]).detach()
    return bool(ends) and relative_error(ends[0], expected) < EXACT  # else layers pass on more than the stream


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
    cut_depth(text, range(depth))
    text.vocab_size, text.pad_token_id = _VOCABULARY, 0
    for name, value in list(vars(text).items()):
        if name in ("max_position_embeddings", "n_positions") and isinstance(value, int):
            setattr(text, name, max(TOKENS, value))
        for pattern, most in _MOST.items():
            if re.search(pattern, name) and isinstance(value, int) and value > most:
                setattr(text, name, most)
    inside = [module for module in hf.modules() if isinstance(module, PreTrainedModel)]
    with cpu_by_default(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        cls: Any = type(inside[0] if inside else hf)  # a wrapper's takes no configuration alone
        sample = cls(config).float().eval().requires_grad_(False)
        for path, module in sample.named_modules():
            with suppress(AttributeError):  # constants that follow from the depth of the whole model (MiniCPM3)
                there = vars(hf.get_submodule(path))
                vars(module).update({name: there[name] for name in there if isinstance(there[name], float)})
        for name, weight in sample.named_parameters():  # every part gives numbers of about one size
            if weight.ndim >= 2 and "conv" not in name:
                weight.normal_(std=min(0.5, weight.shape[-1] ** -0.5))
            else:
                weight.nan_to_num_().add_(0.1 * torch.randn_like(weight))
    return sample
