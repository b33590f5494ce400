"""What is found in each kind of layer, and the one adapter that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sinkscope.models.adapters import PATHS, Found
from sinkscope.models.modules.stack import NotInferredError
from sinkscope.models.passes.short import begins_at
from sinkscope.models.target import Target
from sinkscope.opening.inference.names import POSITIONS

Fields = dict[str, str | bool | float | None]
"""What was found of a layer, by the fields of an adapter."""
_IF_MIXED = {"learned_sinks": True, "adds": False, "qkv_layout": None, "attn_factor": 1.0}  # where layers differ


@dataclass(frozen=True)
class Kind:
    """What was found in the first layer of a kind.

    Attributes:
        number: Its number.
        parts: Paths of all of its modules.
        fields: Fields of the adapter; not those about parts that this layer does not have.
    """

    number: int
    parts: frozenset[str]
    fields: Fields

    def distinction(self, rivals: list[Kind]) -> str | None:
        """A part that layers of this kind have and layers of other kinds do not have; None if there is none."""
        own = [path for name, path in self.fields.items() if name in PATHS and isinstance(path, str)]
        for part in [*own, *sorted(self.parts, key=lambda part: (part.count("."), part))]:
            if not any(part in rival.parts for rival in rivals):
                return part
        return None


def common_adapter(target: Target, kinds: list[Kind]) -> Found:
    """One adapter for all kinds of layers.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where a row has one value.
    """
    settings: dict[str, Any] = {}
    for name in dict.fromkeys(name for kind in kinds for name in kind.fields):
        values = {kind.fields[name]: None for kind in kinds if name in kind.fields}
        if name in PATHS:
            settings[name] = _spec(name, kinds)
        elif len(values) == 1:
            (settings[name],) = values
        elif name in _IF_MIXED:
            settings[name] = _IF_MIXED[name]
        else:
            raise NotInferredError(f"{name!r} of the adapter differs between layers: {', '.join(map(str, values))}")
    if "mlp" not in settings:
        raise NotInferredError("no MLP was found in its layers")
    layer = max(kinds[-1].number, 1)  # one of another kind than the first may read what that has kept
    settings["from_any_layer"] = layer < len(target.layers) and begins_at(target, layer, layer)
    embeddings = target.hf.get_submodule(target.adapter.embed.rpartition(".")[0])
    settings["absolute_positions"] = any(hasattr(embeddings, name) for name in POSITIONS)
    return replace(target.adapter, **settings)


def _spec(name: str, kinds: list[Kind]) -> str | None:
    """The path of a part, with alternatives for kinds of layers that have it elsewhere; None if no layer has it."""
    alternatives = dict[str, None]()
    for kind in kinds:
        path = kind.fields.get(name)
        if not isinstance(path, str):
            continue
        rivals = [other for other in kinds if other.fields.get(name) != path and path in other.parts]
        if rivals:
            path = "?".join(filter(None, (kind.distinction(rivals), path)))
        alternatives[path] = None
    return "|".join(alternatives) or None
