"""Interventions, each with a right answer by plain means: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sinkscope as ss
from sinkscope import kv

from .families import FAMILIES, HIDDEN, Family

BIG = 10_000
LAYER, NEURONS, HEAD = 1, [3, 17], 1
VECTOR = torch.linspace(-1, 1, HIDDEN)
Draw = Mapping[str, Any]


@dataclass(frozen=True)
class Edit:
    """What is done to the model, and what is right then.

    Attributes:
        make: Makes the interventions, which are entered one after the other.
        by_hand: Changes a copy of the model in the same way, by plain means.
        alone: Right is the same intervention on each row by itself, called in the plainest way: it has a memory.
        budget: Whether it evicts, so that every call after the prompt depends on how the prompt was cut.
        events: Whether an event is logged where logits change.
        fits: Draws to which it belongs.
    """

    make: Callable[[], Sequence[Any]]
    by_hand: Callable[[nn.Module, Family], Any] = lambda model, family: None
    alone: bool = False
    budget: bool = False
    events: bool = False
    fits: Callable[[Draw], bool] = lambda draw: True


def clear_columns(module: nn.Module, columns: list[int]) -> None:
    """What enters a linear module at these places has no effect."""
    with torch.no_grad():
        if type(module).__name__ == "Conv1D":
            module.weight[columns] = 0
        else:
            module.weight[:, columns] = 0


def zero_neurons(model: nn.Module, family: Family) -> None:
    clear_columns(family.block(model, LAYER).get_submodule(family.down), NEURONS)


def zero_head(model: nn.Module, family: Family) -> None:
    clear_columns(family.block(model, LAYER).get_submodule(family.out), list(range(16 * HEAD, 16 * HEAD + 16)))


def add_vector(model: nn.Module, family: Family) -> None:
    def add(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + VECTOR.to(output[0].dtype), *output[1:])
        return output + VECTOR.to(output.dtype)

    family.block(model, LAYER).register_forward_hook(add)


def has_mlp(draw: Draw) -> bool:
    return FAMILIES[draw["family"]].down is not None


ZERO = {"by_hand": zero_neurons, "fits": has_mlp, "events": True}
EVICTS = {"alone": True, "budget": True}


def _zero() -> Any:
    return ss.Ablate(layer=LAYER, neurons=NEURONS)


EDITS = {
    "full": Edit(lambda: [kv.Full()]),
    "guard": Edit(lambda: [ss.LoopGuard(budget=BIG)]),
    "h2o": Edit(lambda: [kv.H2O(budget=BIG)]),
    "snapkv": Edit(lambda: [kv.SnapKV(budget=BIG)]),
    "streaming": Edit(lambda: [kv.StreamingLLM(budget=BIG)]),
    "tova": Edit(lambda: [kv.TOVA(budget=BIG)]),
    "loopserve": Edit(lambda: [ss.LoopServe(alpha=1.0, budget=BIG)]),
    "observe": Edit(lambda: [kv.Observe(lambda rows: None)]),
    "trace": Edit(lambda: []),
    "zero": Edit(lambda: [_zero()], **ZERO),
    "zero|guard": Edit(lambda: [_zero() | ss.LoopGuard(budget=BIG)], **ZERO),
    "zero;full": Edit(lambda: [_zero(), kv.Full()], **ZERO),
    "head": Edit(lambda: [ss.Ablate(heads=[(LAYER, HEAD)])], zero_head, events=True),
    "add": Edit(lambda: [ss.Add(VECTOR, f"blocks.{LAYER}.hook_resid_post")], add_vector),
    "streaming 12": Edit(lambda: [kv.StreamingLLM(budget=12)], **EVICTS),
    "h2o 12": Edit(lambda: [kv.H2O(budget=12)], **EVICTS),
    "tova 12": Edit(lambda: [kv.TOVA(budget=12)], **EVICTS),
    "snapkv 12": Edit(lambda: [kv.SnapKV(budget=12, window=6)], **EVICTS),
    "adakv 12": Edit(lambda: [kv.AdaKV(budget=12, window=6)], **EVICTS),
    "pyramid 12": Edit(lambda: [kv.Pyramid(budget=12, window=4)], **EVICTS),
    "mean": Edit(lambda: [ss.Ablate(layer=LAYER, neurons=NEURONS, value="mean")], alone=True, fits=has_mlp),
    "patch": Edit(lambda: [ss.SinkPatch(layer=LAYER, neurons=[3])], alone=True, fits=has_mlp),
    "tensor 8 bits": Edit(lambda: [ss.Quantize(activations=8, scale="tensor")], alone=True, fits=has_mlp),
}
