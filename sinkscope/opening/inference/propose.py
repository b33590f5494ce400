"""Propose the adapter of a model by the names of its parts; sums tell which of several places is the right one.

A table of names says where the first layer of each kind may have its parts. One pass shows which of
these layers attend. Where a part has several names in a layer, or norms may stand in several places, each way
is tried until the sums of `inference.sums` hold, which also measure the factors; where none holds, no norm is believed.

`inference.proof` then proves the adapter on the model's own weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.engine.tap import attention_rows, listening
from sinkscope.errors import SinkscopeError, UnsupportedError, first_line
from sinkscope.models.adapters import (
    DRAFT,
    PATHS,
    Adapter,
    Found,
    NotInferredError,
    layer_kinds,
    not_inferred,
    stack_of,
)
from sinkscope.models.experts import experts_of
from sinkscope.models.hooks import Hook, first_tensor, forward_parameters, on_input, on_output
from sinkscope.models.partial_pass import LayerInput
from sinkscope.models.target import Target
from sinkscope.models.weights import input_width, is_transposed
from sinkscope.opening.inference.sums import LayerSums, layer_sums, token_ids

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

Fields = dict[str, str | bool | float | None]
"""What was found of a layer, by the fields of an adapter; nothing of parts that it does not have."""
Attending = tuple[nn.Module, bool]
"""A module that attends, and whether it has learned sinks."""
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None, "attn_factor": 1.0}  # where layers differ
_LENGTH = 9
_SHORT = 3  # tokens of a pass that begins at a layer
_SAME = 1e-3  # largest relative distance between its end and that of a whole pass
_NOWHERE: dict[str, Any] = {
    **dict.fromkeys(("q", "k", "v", "o", "fused_qkv", "mid", "up", "gate")),
    **dict.fromkeys(("attn", "mlp", "down"), "-"),
}
"""Parts of an adapter that a layer may lack."""


def propose(hf: nn.Module, row: Adapter | None = None) -> Found:
    """Propose the adapter of a model from a few passes over a few tokens. The model is left as it was.

    Args:
        hf: The model.
        row: Where its parts are, if somebody wrote it; then only the rest is looked for, and if that fails, the row
            stays as it is, because the probe says what is wrong with it.

    Raises:
        UnsupportedError: Some part was not found; the message says which, and shows the row to write.
    """
    model: Any = hf
    draft = replace(DRAFT, model_type=str(model.config.model_type))
    try:
        if row is not None:
            draft = Found(**vars(row))
        stack = stack_of(model)
        draft = replace(draft, base=base_path(model, stack), layers=stack)
        with torch.no_grad():
            adapter = _proposed(Target(model, model, "hf", draft), row)
        return adapter if row is None else replace(adapter, **vars(row))
    except (MemoryError, torch.OutOfMemoryError, SinkscopeError):
        raise
    except Exception as error:  # a model may do anything in a pass
        if row is not None:
            return draft
        if not isinstance(error, NotInferredError):
            error = NotInferredError(f"a pass raised {type(error).__name__}: {first_line(error)}")
        raise not_inferred(draft, error) from None


def _proposed(target: Target, row: Adapter | None = None) -> Found:
    calls = dict[int, Attending]()
    try:
        calls = _attention(target)
    except (AttributeError, TypeError):  # some models outside the interface cannot run under its name
        pass
    if not calls:
        paths = row.attn.split("|") if row else ATTENTION
        attn = [next(iter(_Parts(layer).there(paths)), "") for layer in target.layers]
        target = replace(target, adapter=replace(target.adapter, attention_interface=False))
        rows = tuple(Adapter("", attn=path) for path in attn)
        outside = replace(target, adapter=replace(target.adapter, rows=rows, o=None))
        try:
            calls = _attention(outside)
        except UnsupportedError:
            pass
    if not calls:
        raise NotInferredError("no softmax attention was found in its layers, or none of one layer alone")
    kinds = dict[int, Fields]()
    for layer in sorted({*layer_kinds(target.layers)}):
        kinds[layer] = _fields(target, layer, calls.get(layer), row)
    return _common_adapter(target, kinds)


def _common_adapter(target: Target, kinds: dict[int, Fields]) -> Found:
    """One adapter for all kinds of layers, by the number of the first layer of each.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where an adapter has one value.
    """
    settings: dict[str, Any] = {}
    for name in dict.fromkeys(name for fields in kinds.values() for name in fields):
        values = list(dict.fromkeys(fields[name] for fields in kinds.values() if name in fields))
        if name in PATHS:
            settings[name] = "|".join(str(path) for path in values if path is not None) or None
        elif len(values) == 1:
            settings[name] = values[0]
        elif name in _IF_MIXED:
            settings[name] = _IF_MIXED[name]
        else:
            raise NotInferredError(f"{name!r} of the adapter differs between layers: {', '.join(map(str, values))}")
    if "mlp" not in settings:
        raise NotInferredError("no MLP was found in its layers")
    rows = dict[int, Adapter]()
    for number, fields in kinds.items():
        paths: dict[str, Any] = {name: fields.get(name) for name in PATHS}
        rows[number] = Adapter(target.adapter.model_type, target.adapter.layers, **paths)
    if len(kinds) > 1:
        settings["rows"] = tuple(rows[number] for number in layer_kinds(target.layers))
    layer = max(*kinds, 1)  # one of another kind than the first may read what that has kept
    settings["from_any_layer"] = layer < len(target.layers) and begins_at(target, layer, layer)
    return replace(target.adapter, **settings)


def _attention(target: Target) -> dict[int, Attending]:
    """What attends in the first layer of each kind, by layer."""
    layers, calls, ran = sorted({*layer_kinds(target.layers)}), dict[int, Attending](), set[int]()

    def see(call: Attention) -> None:
        if call.layer in calls and not call.is_repeated:
            raise NotInferredError(f"layer {call.layer} computes attention twice")
        calls.setdefault(call.layer, (call.module, call.settings.get("s_aux") is not None))

    def see_rows(layer: int, _first: int, _rows: Tensor) -> None:
        calls[layer] = (target.sub(layer, "attn"), False)

    def enter(layer: int, hidden: Tensor) -> None:
        if layer in ran:
            raise NotInferredError(f"layer {layer} runs several times in a pass")
        expected, shape = (1, _LENGTH, target.d_model), tuple(hidden.shape)
        if shape != expected:
            raise NotInferredError(f"its layers do not get one residual stream of shape {expected}, but of {shape}")
        ran.add(layer)

    hooks: list[Hook] = [(target.layers[layer], "pre", on_input(partial(enter, layer))) for layer in layers]
    if target.adapter.attention_interface:
        tap = listening(target, see, proving=True)
    else:
        tap = attention_rows(target, see_rows, layers=layers, proving=True)
    with tap, target.hooks(*hooks):
        target.forward(token_ids(target, _LENGTH), last_layer=max(layers))
    for layer in layers:
        if layer not in ran:
            raise NotInferredError(f"layer {layer} does not run in a pass over text")
    return calls


def _fields(target: Target, layer: int, call: Attending | None, row: Adapter | None) -> Fields:
    """What is found in a layer: of each choice the first way for which its sums hold, or else the last."""
    parts = _Parts(target.layers[layer])
    fields: Fields = {}
    if row is not None:
        for name in PATHS:
            paths = parts.there((getattr(row, name) or "").split("|"))
            if paths:
                fields[name] = paths[0]
        choices = parts.layouts(fields)
    else:
        fields = parts.mlp()
        attention = parts.attention(call)
        if attention.get("attn") != fields.get("mlp"):
            fields |= attention
        choices = parts.choices(fields)
    if call is not None:
        fields["learned_sinks"] = call[1]
    if fields.get("down") and fields.get("up"):
        fields["fused_gate_up"] = parts.is_fused(fields)
    for _, ways in choices:
        fields |= ways[0]
    sums = _sums_of(target, layer, fields)
    for sites, ways in choices + choices:  # again, because one choice may hide another
        for way in ways:
            if sums.problems.keys().isdisjoint(sites):
                break
            fields |= way
            sums = _sums_of(target, layer, fields)
    if "attn.hook_z" in sums.problems:
        fields["o"] = None
    if "hook_attn_out" not in sums.problems:
        fields["attn_factor"] = sums.factors["attn_factor"]
    if "mlp" in fields:
        adds = "hook_mlp_out" not in sums.problems and not parts.has_buffers
        fields |= {"adds": adds, "write_factor": sums.factors["write_factor"] if adds else 1.0}
        fields |= sums.edits.factors
    return fields


def _sums_of(target: Target, layer: int, fields: Fields) -> LayerSums:
    adapter = replace(target.adapter, **{**_NOWHERE, **fields})
    (sums,) = layer_sums(replace(target, adapter=adapter), [layer], measures=True)
    return sums


def base_path(model: Any, stack: str) -> str:
    """Return the path of the innermost module around the layers that takes token ids."""
    base = stack
    while base and "input_ids" not in forward_parameters(type(model.get_submodule(base))):
        base = base.rpartition(".")[0]
    return base


class _Parts:
    """The modules of a layer, by path, and what names say of them."""

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

    def attention(self, call: Attending | None) -> Fields:
        """Return what names say of attention, or of what stands in its place."""
        if call is None:
            attn = self.there(ATTENTION)
            return {"attn": attn[0]} if attn else {}
        (attn,) = (path for path, module in self.modules.items() if module is call[0])
        fields: Fields = {"attn": attn}
        fields["o"] = self._linear(OUTPUT, attn) or self._linear(OUTPUT_BESIDE)
        fields["fused_qkv"] = self._linear(FUSED, attn)
        for name, paths in (("q", QUERY), ("k", KEY), ("v", VALUE)):
            fields[name] = self._linear(paths, attn)
        return fields

    def mlp(self) -> Fields:
        """Return what names say of the MLP; empty if there is none."""
        block = next(iter(self.there(MLP)), "")
        fields: Fields = {}
        for path in self.there(EXPERTS, block):
            if experts_of(self.modules[path]) is not None and not fields:
                fields = {"mlp": block, "experts": path, "shared_gate": self._linear([SHARED_GATE], block)}
        inside = [f"{block}.{shared}".strip(".") for shared in SHARED]
        for parent, projections in itertools.product(dict.fromkeys(inside + SHARED), PROJECTIONS):
            down, up, gate = (self._linear([path], parent) for path in f"{projections} .".split()[:3])
            if down is None or up is None:
                continue
            if self.there([NORM_INSIDE], parent):  # no module gives a factor of a neuron
                up = gate = None
            return {"mlp": block or parent, **fields, "down": down, "up": up, "gate": gate}
        return fields

    def is_fused(self, known: Fields) -> bool:
        """Return whether `up` gives gate and up side by side."""
        down, up = self.modules[str(known["down"])], self.modules[str(known["up"])]
        return 2 * input_width(down) == len(getattr(up, "weight", ())) and not is_transposed(up)

    def layouts(self, known: Fields) -> list[tuple[tuple[str, ...], list[Fields]]]:
        """Return layouts that q, k and v may have in one module, after the sites that tell the right one."""
        forms = ["beside"]
        if known.get("fused_qkv"):
            forms = ["beside", "by head", None]
        return [(("attn.hook_q", "attn.hook_k", "attn.hook_v"), [{"qkv_layout": form} for form in forms])]

    def choices(self, known: Fields) -> list[tuple[tuple[str, ...], list[Fields]]]:
        """Return ways to place the parts, after the sites that tell the right one; the last one believes no norm."""
        writes, additions = list[Fields](), list[Fields]()
        mids: list[Any] = [None]
        if "mlp" in known:
            mids = [*self.there(MID), known["mlp"], known.get("up"), None]
            mlps = filter(None, dict.fromkeys(known.get(name) for name in ("mlp", "experts", "down")))
            for norm, mlp in itertools.product([*self.there(MLP_NORM), None], mlps):
                if not f"{norm}.".startswith(f"{mlp}."):
                    writes.append({"mlp": mlp, "post_mlp_norm": norm})
            writes.append(writes[0])
        if "attn" in known:
            around = filter(None, [str(known["attn"]).rpartition(".")[0], known.get("o")])
            for mid, writer in itertools.product(mids, [*self.there(ATTENTION_NORM), None, *around]):
                if mid is None or mid != writer:
                    additions.append({"mid": mid, "attn_out": writer})
            additions.insert(1, {"mid": None, "attn_out": None})  # parallel parts
            additions.append(additions[1])
        further = [(("hook_mlp_out",), writes), (("hook_attn_out", "hook_resid_mid"), additions)]
        return self.layouts(known) + [pair for pair in further if pair[1]]


def begins_at(target: Target, layer: int, last: int) -> bool:
    """Return whether a pass may begin at a layer: with what entered it in a whole pass, it gives the same."""
    ids = token_ids(target, _SHORT)
    starts = list[LayerInput]()
    ends = list[Tensor]()

    def take(output: Any) -> None:
        starts.append(LayerInput(layer, first_tensor(output).clone(), isinstance(output, tuple)))

    ending = target.layers[last], "post", on_output(lambda output: ends.append(first_tensor(output).clone()))
    with target.hooks((target.layers[layer - 1], "post", on_output(take)), ending):
        target.forward(ids, last_layer=last)
    try:
        with target.hooks(ending):
            target.forward(ids, last_layer=last, start=starts[0])
    except (LookupError, TypeError, ValueError):  # layers pass on more than the residual stream, or do not run
        return False
    return relative_error(ends[1], ends[0]) < _SAME
