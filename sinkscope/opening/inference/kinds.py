"""The one adapter that is made of what is found in each kind of layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sinkscope.models.adapters import PATHS, Adapter, Found
from sinkscope.models.modules.stack import NotInferredError, layer_kinds
from sinkscope.models.passes.short import begins_at
from sinkscope.models.target import Target

Fields = dict[str, str | bool | float | None]
"""What was found of a layer, by the fields of an adapter; nothing of parts that it does not have."""
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None, "attn_factor": 1.0}  # where layers differ


def common_adapter(target: Target, kinds: dict[int, Fields]) -> Found:
    """Return one adapter for all kinds of layers, by the number of the first layer of each.

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
        settings["rows"] = tuple(rows[number] for number in layer_kinds(target))
    layer = max(*kinds, 1)  # one of another kind than the first may read what that has kept
    settings["from_any_layer"] = layer < len(target.layers) and begins_at(target, layer, layer)
    return replace(target.adapter, **settings)
