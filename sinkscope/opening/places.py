"""Propose where a model keeps its parts: names say places, and sums of one pass say which of several is right.

1. One pass over a small model keeps what enters and leaves each module of the first layer of each kind, and which
   modules attend.
2. Names say where the parts may be.
3. Where a norm may stand in several places, the first way is taken with which the residual stream is the sum of the
   parts. The sums also measure constant factors.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from einops import EinopsError
from torch import Tensor, nn
from transformers import PreTrainedModel

from sinkscope.engine.attention import Attention
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import Listener, tapped
from sinkscope.errors import UnsupportedError
from sinkscope.models.adapters import PATHS, Adapter, Found, NotInferredError, layer_kinds, layers_at, stack_of
from sinkscope.models.checkpoints.config import cpu_by_default, cut_depth
from sinkscope.models.experts import experts_of
from sinkscope.models.grouped_heads import head_projection
from sinkscope.models.hooks import Hook, first_tensor, on_output
from sinkscope.models.target import LayerInput, Target
from sinkscope.models.weights import input_width, is_transposed
from sinkscope.opening.sums import TOKENS, Values, mlp_sum, read, relative_error, residual_sums

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
_WIDE = re.compile("intermediate_size|ffn_dim|ffn_hidden|n_inner|d_ff")
_REACH = re.compile("sliding_window|window_size|attention_chunk_size|local_attention|index_topk$")
_BLOCK = re.compile("index_topk_blocks|index_block_size")
_MOST = ((_WIDE, 32), (_REACH, 6), (_BLOCK, 2))
"""Sizes in configurations, and what they are at most in a sample."""
_SAME = 1e-3  # largest relative distance between two passes
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None, "attn_factor": 1.0}
"""Fields of an adapter where layers differ."""


@dataclass
class _Seen:
    """What is seen of the attention of a layer."""

    module: nn.Module
    has_sinks: bool = False
    value: Tensor | None = None


def proposed(target: Target, numbers: list[int], row: Adapter | None) -> Found:
    """Return the adapter that names, or a row that somebody wrote, and sums say of a model.

    Args:
        target: A small random model; of its adapter, the base and the layers are read.
        numbers: For each layer of the whole model, the number of the first one of its kind.
        row: Where the parts are, if somebody wrote it.

    Raises:
        NotInferredError: A part was not found.
    """
    attends: dict[int, _Seen] = {}

    def see(call: Attention) -> None:
        if call.layer in attends and not call.is_repeated:
            raise NotInferredError(f"layer {call.layer} computes attention twice")
        has_sinks = call.settings.get("s_aux") is not None
        attends.setdefault(call.layer, _Seen(call.module, has_sinks, call.value))

    layers, values = sorted({*numbers}), dict[int, Values]()
    with suppress(AttributeError, TypeError, UnsupportedError):  # some models cannot run under its name, or are refused
        values = _read_all(target, layers, tapped(target, Listener(see)))
    if not attends:
        values = _read_all(target, layers, eager(target))
        target = replace(target, adapter=replace(target.adapter, attention_interface=False))
        for layer in layers:
            parts = Parts(target.layers[layer])
            for path in parts.there(ATTENTION if row is None else row.attn.split("|"))[:1]:
                if (path, "rows") in values[layer].kept:
                    attends[layer] = _Seen(parts.modules[path])
    if not attends:
        raise NotInferredError("no softmax attention was found in its layers, or none of one layer alone")
    kinds = dict[int, Fields]()
    for layer in layers:
        kinds[layer] = _fields(target, values[layer], attends.get(layer), row)
    return _common_adapter(target, kinds, numbers)


def _read_all(target: Target, layers: Iterable[int], tap: AbstractContextManager[Any]) -> dict[int, Values]:
    """What passes each module of some layers in one pass."""
    values, hooks = dict[int, Values](), list[Hook]()
    for layer in layers:
        module = target.layers[layer]
        values[layer] = Values(layer, {})
        hooks += values[layer].hooks(module, dict(module.named_modules()))
    read(target, hooks, max(values), tap)
    for layer in layers:
        entered = values[layer].entered("")
        if not values[layer].ran:
            raise NotInferredError(f"layer {layer} does not run in a pass over text")
        if entered is None or entered.shape[-1] != target.d_model:
            raise NotInferredError(f"its layers do not get one residual stream of width {target.d_model}")
    return values


# -- one layer ---------------------------------------------------------------------------------------------------------


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


def _fields(target: Target, values: Values, seen: _Seen | None, row: Adapter | None) -> Fields:
    """What is found in a layer."""
    parts, fields = Parts(target.layers[values.layer]), Fields()
    if row is None:
        fields = _placed(parts, values, parts.named(None if seen is None else seen.module))
    else:
        for name in PATHS:
            for path in parts.there((getattr(row, name) or "").split("|"))[:1]:
                fields[name] = path
    if fields.get("down") and fields.get("up"):
        fields["fused_gate_up"] = parts.is_fused(fields)
    factors, _ = _measured(values, fields)
    values = values.with_paths(fields)
    fields |= {name: factors[name] for name in factors if name == "attn_factor"}
    if "mlp" in fields:
        adds = "write_factor" in factors and not parts.has_buffers
        fields |= {"adds": adds, "write_factor": factors["write_factor"] if adds else 1.0}
        fields |= mlp_sum(values).fit() or {}
    if seen is not None:
        fields["learned_sinks"] = seen.has_sinks
    if fields.get("fused_qkv"):
        fields["qkv_layout"] = "beside"
        if seen is not None and seen.value is not None:
            fields["qkv_layout"] = _layout(target, values.left("fused_qkv"), seen.value)
    return fields


def _measured(values: Values, fields: Fields) -> tuple[dict[str, float], int]:
    """Factors of what a layer adds, and how many of its parts are in sums that do not hold."""
    factors, wrong = dict[str, float](), 0
    for each in residual_sums(values.with_paths(fields)):
        measured = each.fit()
        factors |= measured or {}
        if measured is None:
            wrong += max(1, len(each.parts))
    return factors, wrong


def _placed(parts: Parts, values: Values, fields: Fields) -> Fields:
    """The fields with the places of norms and of what is read between the parts: the first way whose sums hold."""
    mids = [*parts.there(MID), fields.get("mlp"), fields.get("up"), None]
    writes, writers = [Fields()], list[str | None]([None])
    if "mlp" in fields:
        mlps = filter(None, dict.fromkeys(fields.get(name) for name in ("mlp", "experts", "down")))
        writes = list[Fields]()
        for norm, mlp in itertools.product([*parts.there(MLP_NORM), None], mlps):
            if not f"{norm}.".startswith(f"{mlp}."):
                writes.append({"mlp": mlp, "post_mlp_norm": norm})
    if "attn" in fields:
        around = filter(None, [fields["attn"].rpartition(".")[0], fields.get("o")])
        writers = [*parts.there(ATTENTION_NORM), None, *around]
    best: Fields = {**fields, "mid": None, "attn_out": None, **writes[0]}
    fewest = _measured(values, best)[1] + 1
    for mid, write, writer in itertools.product(mids, writes, writers):
        if mid is not None and mid == writer:
            continue
        way = {**fields, **write, "mid": mid, "attn_out": writer}
        problems = _measured(values, way)[1]
        if mid in (fields.get("mlp"), fields.get("up")) and problems:  # it may read a norm that no module gives
            continue
        if problems + (mid is None) < fewest:
            best, fewest = way, problems + (mid is None)
    return best


def _layout(target: Target, given: Tensor, value: Tensor) -> str | None:
    """How queries, keys and values stand in what one module gives, by the values that attention gets."""
    for layout in ("beside", "by head"):
        adapter = replace(target.adapter, qkv_layout=layout, q=None, k=None, v=None)
        with suppress(RuntimeError, ValueError, EinopsError):
            heads = head_projection("v", replace(target, adapter=adapter), given).transpose(1, 2)
            if torch.equal(heads, value):
                return layout
    return None


# -- all layers --------------------------------------------------------------------------------------------------------


def _common_adapter(target: Target, kinds: dict[int, Fields], numbers: list[int]) -> Found:
    """One adapter for all kinds of layers, by the number of the first layer of each.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where an adapter has one value.
    """
    found: dict[str, list[Any]] = {}
    for fields in kinds.values():
        for name, value in fields.items():
            values = found.setdefault(name, [])
            if value not in values:
                values.append(value)
    settings: Fields = {}
    for name, values in found.items():
        if name in PATHS:
            paths = [path for path in values if path is not None]
            settings[name] = "|".join(paths) or None
        elif len(values) == 1:
            settings[name] = values[0]
        elif name in _IF_MIXED:
            settings[name] = _IF_MIXED[name]
        else:
            raise NotInferredError(f"{name!r} of the adapter differs between layers: {', '.join(map(str, values))}")
    if "mlp" not in settings:
        raise NotInferredError("no MLP was found in its layers")
    if len(kinds) > 1:
        rows = dict[int, Adapter]()
        for number, fields in kinds.items():
            own: dict[str, Any] = {name: fields.get(name) for name in PATHS}
            rows[number] = Adapter(target.adapter.model_type, target.adapter.layers, **own)
        settings["rows"] = tuple(rows[number] for number in numbers)
    adapter = replace(target.adapter, **settings)
    layer = max(*kinds, 1)  # one of another kind than the first may read what that has kept
    begins = layer < len(target.layers) and begins_at(target, layer, layer)
    return replace(adapter, from_any_layer=begins)


@torch.no_grad()
def begins_at(target: Target, layer: int, last: int) -> bool:
    """Return whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    ids = torch.tensor([[2, 3, 4]])
    left = list[tuple[Tensor, bool]]()

    def keep(output: Any) -> None:
        left.append((first_tensor(output).clone(), isinstance(output, tuple)))

    before, after = [(target.layers[number], "post", on_output(keep)) for number in (layer - 1, last)]
    with target.hooks(before, after):
        target.forward(ids, last_layer=last)
    try:
        with target.hooks(after):
            target.forward(ids, last_layer=last, start=LayerInput(layer, *left[0]))
    except (LookupError, TypeError, ValueError):  # layers pass on more than the residual stream, or do not run
        return False
    return relative_error(left[2][0], left[1][0]) < _SAME


# -- the small model ---------------------------------------------------------------------------------------------------


def model_within(hf: Any) -> Any:
    """Return the model of transformers inside a wrapper, whose class alone takes a configuration."""
    for module in hf.modules():
        if isinstance(module, PreTrainedModel):
            return module
    return hf


def kinds_of(hf: Any) -> list[int]:
    """Return, for each layer of a model, the number of the first of its kind in an unchanged model of the class."""
    layers = layers_at(hf, stack_of(hf))
    with suppress(Exception):  # a class may take no configuration alone
        with torch.device("meta"):
            plain = type(model_within(hf))(copy.deepcopy(hf.config))
        kinds = layer_kinds(layers_at(plain, stack_of(plain)))
        if len(kinds) == len(layers):
            return kinds
    return layer_kinds(layers)


def sample_of(hf: Any, kinds: list[int]) -> Any:
    """Return a small random model of the class of another one, in float32 on the CPU.

    It has the first layer of each kind and those before it, narrow MLPs, and windows of a few tokens.

    Args:
        hf: The other model, whose weights are not read.
        kinds: What `kinds_of` says of it.
    """
    config = copy.deepcopy(hf.config)
    config.distributed_config = None  # it is whole in every process
    config._attn_implementation = "eager"
    text = config.get_text_config()
    cut_depth(text, max(*kinds, 1) + 1)  # at least two
    text.vocab_size, text.pad_token_id = _VOCABULARY, 0
    for name in ("max_position_embeddings", "n_positions"):
        if isinstance(getattr(text, name, None), int):
            setattr(text, name, max(TOKENS, getattr(text, name)))
    for name, value in list(vars(text).items()):
        for pattern, most in _MOST:
            if pattern.search(name) and isinstance(value, int) and value > most:
                setattr(text, name, most)
    with cpu_by_default(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        sample = type(model_within(hf))(config).float().eval().requires_grad_(False)
        _copy_factors(hf, sample)
        _randomise(sample)
    return sample


def _copy_factors(hf: Any, sample: Any) -> None:
    """Give modules the constants that follow from the depth of the whole model, as those of MiniCPM3."""
    for path, module in sample.named_modules():
        with suppress(AttributeError):  # the user's model may lack the module
            there = vars(hf.get_submodule(path))
            vars(module).update({name: there[name] for name in there if isinstance(there[name], float)})


def _randomise(sample: Any) -> None:
    """Draw weights with which every part gives numbers of about one size."""
    for name, weight in sample.named_parameters():
        if weight.ndim >= 2 and "conv" not in name:
            weight.normal_(std=min(0.5, weight.shape[-1] ** -0.5))
        else:
            weight.nan_to_num_().add_(0.1 * torch.randn_like(weight))
