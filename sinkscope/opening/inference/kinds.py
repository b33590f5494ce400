"""What is found in each kind of layer, and the one adapter that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sinkscope.models.adapters import PATHS, Adapter
from sinkscope.models.hooks import on_input
from sinkscope.models.stack import NotInferredError
from sinkscope.models.target import Target
from sinkscope.opening.inference.attention_write import attention_write
from sinkscope.opening.inference.heads import heads_of
from sinkscope.opening.inference.mlp import experts_path, mlp_of, write_of
from sinkscope.opening.inference.probe import begins_at, token_ids
from sinkscope.opening.inference.stage import LENGTH, Fields, Stage, contains, largest

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

    @classmethod
    def of(cls, stage: Stage) -> Kind:
        """Find the MLP of a layer, beside its attention."""
        heads = heads_of(stage)
        fields: Fields = {"mid": None}
        experts = experts_path(stage)
        mlp, write = mlp_of(stage, experts is None)
        fields |= mlp
        if write is not None:
            fields["shared_gate"] = write.weight
            fields["down_factor" if experts is None else "shared_factor"] = write.factor
        if experts is not None:
            routed = write_of(stage, experts)
            # A shared expert inside the mixture is part of what that gives; one beside it has to be added like it.
            if write is not None and not contains(routed.mlp, str(mlp["down"])):
                if replace(write, mlp=routed.mlp) != replace(routed, factor=1.0):
                    raise NotInferredError("its shared expert stands beside the mixture, and is not simply added to it")
            write = routed
            fields |= {"experts": experts, "expert_factor": write.factor}
        if write is not None:
            fields |= {"mlp": write.mlp, "post_mlp_norm": write.post_norm}
            fields |= {"write_factor": write.write_factor, "adds": write.adds}
        of_attention = attention_write(stage, write)
        fields |= of_attention
        if heads and of_attention and heads["attn"] != of_attention["attn"]:
            fields["attn_out"] = of_attention["attn"]
        fields |= heads
        return cls(stage.number, frozenset(stage.paths.values()) - {""}, fields)

    def distinction(self, rivals: list[Kind]) -> str:
        """A part that layers of this kind have and layers of other kinds do not have.

        Raises:
            NotInferredError: There is none.
        """
        own = [path for name, path in self.fields.items() if name in PATHS and isinstance(path, str)]
        for part in [*own, *sorted(self.parts, key=lambda part: (part.count("."), part))]:
            if not any(part in rival.parts for rival in rivals):
                return part
        raise NotInferredError(f"no part tells layer {self.number} from layers of other kinds")


def common_adapter(draft: Adapter, stages: list[Stage]) -> Adapter:
    """One adapter for all kinds of layers.

    Raises:
        NotInferredError: No layer has an MLP, or layers differ where a row has one value.
    """
    kinds = [Kind.of(stage) for stage in stages]
    settings: dict[str, Any] = {}
    for name in dict.fromkeys(name for kind in kinds for name in kind.fields):
        values = list(dict.fromkeys(kind.fields[name] for kind in kinds if name in kind.fields))
        if name in PATHS:
            settings[name] = _spec(name, kinds)
        elif len(values) == 1:
            settings[name] = values[0]
        elif name in _IF_MIXED:
            settings[name] = _IF_MIXED[name]
        else:
            raise NotInferredError(f"{name!r} of the adapter is {values[0]} in one layer, {values[1]} in another")
    if "mlp" not in settings:
        raise NotInferredError("no MLP was found in its layers")
    target = stages[0].target
    layer = max(stages[-1].number, 1)  # one of another kind than the first may read what that has kept
    settings["from_any_layer"] = layer < len(target.layers) and begins_at(target, layer, layer)
    return replace(draft, **settings, absolute_positions=_has_positions(target))


def _has_positions(target: Target) -> bool:
    """Whether one token enters the first layer otherwise at any two positions."""
    entering = list[Tensor]()
    ids = token_ids(target, 1).expand(1, LENGTH)
    with target.hooks((target.layers[0], "pre", on_input(entering.append))):
        target.forward(ids, upto=0)
    stream = entering[0].reshape(LENGTH, -1)
    return largest(stream - stream[:1]) > 1e-6


def _spec(name: str, kinds: list[Kind]) -> str | None:
    """The path of a part, with alternatives for kinds of layers that have it elsewhere; None if no layer has it."""
    alternatives = dict[str, None]()
    for kind in kinds:
        path = kind.fields.get(name)
        if not isinstance(path, str):
            continue
        rivals = [other for other in kinds if other.fields.get(name) != path and path in other.parts]
        if rivals:
            path = f"{kind.distinction(rivals)}?{path}"
        alternatives[path] = None
    return "|".join(alternatives) or None
