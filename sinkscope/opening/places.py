"""Propose where a model keeps its parts: names say places, and sums of one pass say which of several is right.

1. One pass records what enters and leaves each module of the first layer of each kind, and which modules attend.
2. Names say where the parts may be (`opening.names`).
3. Where a norm may stand in several places, the first way is taken with which the residual stream is the sum of the
   parts. The sums also measure constant factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from einops import EinopsError
from jaxtyping import Float
from torch import Tensor, nn

from sinkscope.engine.attention import Attention, relative_error
from sinkscope.engine.stock import eager
from sinkscope.engine.tap import listening
from sinkscope.models.adapters import PATHS, Adapter, Found, NotInferredError
from sinkscope.models.grouped_heads import head_projection
from sinkscope.models.hooks import Hook, first_tensor, on_output
from sinkscope.models.partial_pass import LayerInput
from sinkscope.models.target import Target
from sinkscope.opening.names import ATTENTION, ATTENTION_NORM, MID, MLP_NORM, Fields, Parts
from sinkscope.opening.sample import TOKENS, token_ids

_EXACT = 1e-3  # largest relative distance from a sum
_ONE = 5e-3  # largest distance of a measured constant from 1 that rounding explains
_SHORT = 3  # tokens of a pass that begins at a layer
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None, "attn_factor": 1.0}
"""Fields of an adapter where layers differ."""


@dataclass
class Call:
    """What entered and left a module, the first tensor of each, and whether rows of attention left it as well."""

    entered: Tensor | None
    left: Tensor | None = None
    gives_rows: bool = False


Calls = dict[str, Call]
"""The call of each module of a layer, by path; that of the layer itself is called ""."""
Values = Float[Tensor, "token width"]


def proposed(target: Target, numbers: list[int], row: Adapter | None) -> Found:
    """Return the adapter that names, or a row that somebody wrote, and sums say of a model.

    Args:
        target: A small random model; of its adapter, the base and the layers are read.
        numbers: For each layer of the whole model, the number of the first one of its kind.
        row: Where the parts are, if somebody wrote it.

    Raises:
        NotInferredError: A part was not found.
    """
    attends: dict[int, tuple[nn.Module, bool]] = {}
    values: dict[int, Tensor] = {}

    def see(call: Attention) -> None:
        if call.layer in attends and not call.is_repeated:
            raise NotInferredError(f"layer {call.layer} computes attention twice")
        attends.setdefault(call.layer, (call.module, call.settings.get("s_aux") is not None))
        values.setdefault(call.layer, call.value)

    layers, calls = sorted({*numbers}), dict[int, Calls]()
    with suppress(AttributeError, TypeError):  # some models outside the interface cannot run under its name
        calls = _recorded(target, layers, listening(target, see, proving=True))
    if not attends:
        calls = _recorded(target, layers, eager(target))
        target = replace(target, adapter=replace(target.adapter, attention_interface=False))
        for layer in layers:
            module = _returns_rows(target, layer, calls[layer], row)
            if module is not None:
                attends[layer] = module, False
    if not attends:
        raise NotInferredError("no softmax attention was found in its layers, or none of one layer alone")
    kinds = dict[int, Fields]()
    for layer in layers:
        kinds[layer] = _fields(target, layer, calls[layer], attends.get(layer), values.get(layer), row)
    return _common_adapter(target, kinds, numbers)


# -- the pass ----------------------------------------------------------------------------------------------------------


def _recorded(target: Target, layers: Iterable[int], tap: AbstractContextManager[Any]) -> dict[int, Calls]:
    """The call of each module of some layers in one pass over a few tokens."""
    calls: dict[int, Calls] = {layer: {} for layer in layers}
    hooks: list[Hook] = []

    def enter(layer: int, path: str, _module: Any, args: Any, kwargs: Any) -> None:
        if not path and "" in calls[layer]:
            raise NotInferredError(f"layer {layer} runs several times in a pass")
        entered = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        calls[layer][path] = Call(None if entered is None else entered.clone())

    def leave(layer: int, path: str, _module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        call, left = calls[layer][path], first_tensor(output)
        call.left = left.clone() if isinstance(left, Tensor) else None
        call.gives_rows = isinstance(output, tuple) and len(output) > 1 and getattr(output[1], "ndim", 0) == 4

    for layer in calls:
        for path, module in target.layers[layer].named_modules():
            hooks += [(module, "pre", partial(enter, layer, path)), (module, "post", partial(leave, layer, path))]
    with torch.no_grad(), tap, target.hooks(*hooks):
        target.forward(token_ids(target, TOKENS), last_layer=max(calls))
    for layer, modules in calls.items():
        if "" not in modules:
            raise NotInferredError(f"layer {layer} does not run in a pass over text")
        entered = modules[""].entered
        expected, shape = (1, TOKENS, target.d_model), tuple([] if entered is None else entered.shape)
        if shape != expected:
            raise NotInferredError(f"its layers do not get one residual stream of shape {expected}, but of {shape}")
    return calls


def _returns_rows(target: Target, layer: int, calls: Calls, row: Adapter | None) -> nn.Module | None:
    """The attention module of a layer outside transformers' interface, which returns its rows; None if none does."""
    paths = ATTENTION if row is None else row.attn.split("|")
    parts = Parts(target.layers[layer])
    for path in parts.there(paths)[:1]:
        if path in calls and calls[path].gives_rows:
            return parts.modules[path]
    return None


def _left(calls: Calls, path: str | None) -> Values | None:
    """What left a module; None if it did not run."""
    return _flat(calls[path].left) if path in calls else None


def _entered(calls: Calls, path: str | None) -> Values | None:
    """What entered a module; None if it did not run."""
    return _flat(calls[path].entered) if path in calls else None


def _flat(tensor: Tensor | None) -> Values | None:
    return None if tensor is None else tensor.reshape(-1, tensor.shape[-1]).double()


# -- sums --------------------------------------------------------------------------------------------------------------


def _fit(total: Values | None, *parts: Values | None) -> list[float] | None:
    """The factors with which parts add up to a total; None if they do not, or one is no part of it."""
    columns = list[Tensor]()
    for part in parts:
        if total is None or part is None or part.shape != total.shape:
            return None
        columns.append(part.flatten())
    if total is None or not columns:
        return None
    stacked, wanted = torch.stack(columns, 1), total.flatten()
    factors = torch.linalg.lstsq(stacked, wanted[:, None]).solution[:, 0]
    if not (stacked @ factors - wanted).abs().max() <= _EXACT * wanted.abs().max():
        return None
    constants = [1.0 if abs(factor - 1) < _ONE else float(f"{factor:.4g}") for factor in factors.tolist()]
    return constants if min(map(abs, constants)) >= _ONE else None


def _sums(calls: Calls, fields: Fields) -> tuple[dict[str, float], int]:
    """Factors of what a layer adds, by the adapter's fields, and how many of its sums do not hold."""
    pre, end, mid = _entered(calls, ""), _left(calls, ""), _entered(calls, fields.get("mid"))
    parts: dict[str, Values] = {}
    attn = _left(calls, fields.get("attn_out") or fields.get("attn"))
    if attn is not None:
        parts["attn_factor"] = attn
    written = _written(calls, fields) if "mlp" in fields else None
    if written is not None:
        parts["write_factor"] = written
    if pre is None or end is None or pre.shape != end.shape:
        return {}, len(parts)
    groups = [(end - pre, ["attn_factor", "write_factor"])]
    if mid is not None and mid.shape == pre.shape:
        groups = [(mid - pre, ["attn_factor"]), (end - mid, ["write_factor"])]
    factors: dict[str, float] = {}
    wrong = 0
    for total, names in groups:
        there = [name for name in names if name in parts]
        measured = _fit(total, *[parts[name] for name in there])
        if measured is None:
            wrong += len(names)
        else:
            factors.update(zip(there, measured, strict=True))
    return factors, wrong


def _written(calls: Calls, fields: Fields) -> Values | None:
    """What the MLP writes: of a norm behind it, or of a mixture and the shared expert beside it."""
    if fields.get("post_mlp_norm"):
        return _left(calls, fields["post_mlp_norm"])
    total, down = _left(calls, fields["mlp"]), fields.get("down")
    if total is not None and fields.get("experts") is not None and down and not _is_inside(fields):
        beside = _left(calls, down)
        return None if beside is None else total + beside
    return total


def _neuron_factors(calls: Calls, fields: Fields) -> Fields:
    """Factors between down projections, or experts, and what the MLP gives."""
    mlp, down = _left(calls, fields["mlp"]), _left(calls, fields.get("down"))
    parts: Fields = {"down_factor": down}
    if fields.get("experts") is not None:
        parts = {"expert_factor": _left(calls, fields["experts"])}
        if down is not None and _is_inside(fields) and fields["mlp"] != fields["experts"]:
            gate = _left(calls, fields.get("shared_gate"))
            parts["shared_factor"] = down if gate is None else down * gate.sigmoid()
    measured = _fit(mlp, *parts.values())
    return {} if measured is None else dict(zip(parts, measured, strict=True))


def _is_inside(fields: Fields) -> bool:
    """Whether the shared expert is a part of the mixture, and not beside it."""
    return f"{fields['down']}.".startswith(f"{fields['mlp']}.".lstrip("."))


# -- one layer ---------------------------------------------------------------------------------------------------------


def _fields(
    target: Target,
    layer: int,
    calls: Calls,
    attends: tuple[nn.Module, bool] | None,
    value: Tensor | None,
    row: Adapter | None,
) -> Fields:
    """What is found in a layer."""
    parts, fields = Parts(target.layers[layer]), Fields()
    module, has_sinks = attends or (None, False)
    if row is None:
        fields = _placed(parts, calls, parts.named(module))
    else:
        for name in PATHS:
            for path in parts.there((getattr(row, name) or "").split("|"))[:1]:
                fields[name] = path
    if fields.get("down") and fields.get("up"):
        fields["fused_gate_up"] = parts.is_fused(fields)
    factors, _ = _sums(calls, fields)
    if "attn_factor" in factors:
        fields["attn_factor"] = factors["attn_factor"]
    if "mlp" in fields:
        adds = "write_factor" in factors and not parts.has_buffers
        fields |= {"adds": adds, "write_factor": factors["write_factor"] if adds else 1.0}
        fields |= _neuron_factors(calls, fields)
    if module is not None:
        fields["learned_sinks"] = has_sinks
    if fields.get("fused_qkv"):
        fields["qkv_layout"] = "beside"
        if value is not None:
            fields["qkv_layout"] = _layout(target, calls[fields["fused_qkv"]].left, value)
    return fields


def _placed(parts: Parts, calls: Calls, fields: Fields) -> Fields:
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
    fewest = _sums(calls, best)[1] + 1
    for mid, write, writer in itertools.product(mids, writes, writers):
        if mid is not None and mid == writer:
            continue
        way = {**fields, **write, "mid": mid, "attn_out": writer}
        problems = _sums(calls, way)[1]
        if mid in (fields.get("mlp"), fields.get("up")) and problems:  # it may read a norm that no module gives
            continue
        wrong = problems + (mid is None)
        if wrong < fewest:
            best, fewest = way, wrong
    return best


def _layout(target: Target, given: Any, value: Tensor) -> str | None:
    """How queries, keys and values stand in what one module gives, by the values that attention gets."""
    for layout in ("beside", "by head"):
        adapter = replace(target.adapter, qkv_layout=layout, q=None, k=None, v=None)
        with suppress(RuntimeError, ValueError, EinopsError):
            heads = head_projection("v", replace(target, adapter=adapter), given).transpose(1, 2)
            if torch.equal(heads, value):
                return layout
    return None


def _common_adapter(target: Target, kinds: dict[int, Fields], numbers: list[int]) -> Found:
    """One adapter for all kinds of layers, by the number of the first layer of each.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where an adapter has one value.
    """
    settings: Fields = {}
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
        settings["rows"] = tuple(rows[number] for number in numbers)
    adapter = replace(target.adapter, **settings)
    layer = max(*kinds, 1)  # one of another kind than the first may read what that has kept
    return replace(adapter, from_any_layer=layer < len(target.layers) and begins_at(target, layer, layer))


@torch.no_grad()
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
    return relative_error(ends[1], ends[0]) < _EXACT
