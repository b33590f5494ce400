"""Interventions, each with a right answer by plain means: one row each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sinkscope as ss
from experiments.papers.loopguard.variants import Timed
from sinkscope import kv
from sinkscope.loops import MonitorSettings

from .families import FAMILIES, HIDDEN, Family

BIG = 10_000
LAYER, NEURONS, HEAD, EXPERT = 1, [3, 17], 1, 2
ROWS_SEEN = "rows"
"""Stands for a site where the rows of attention that an observer is shown are compared."""
RESID, PATTERN = f"blocks.{LAYER}.hook_resid_post", f"blocks.{LAYER}.attn.hook_pattern"
POST, Z = f"blocks.{LAYER}.mlp.hook_post", f"blocks.{LAYER}.attn.hook_z"
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
        events: Whether something is counted where logits change.
        site: What a trace reads; None: the edit is none.
        steers: Whether it changes what is written after an alarm.
        acts: Whether it cuts the cache of each row by itself, which is replayed under masks.
        knocked: What a knockout hides, by plain means.
        fits: Draws to which it belongs.
    """

    make: Callable[[], Sequence[Any]]
    by_hand: Callable[[nn.Module, Family], Any] = lambda model, family: None
    alone: bool = False
    budget: bool = False
    events: bool = False
    site: str | None = None
    acts: bool = False
    steers: bool = False
    knocked: Any = None
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


def set_neurons(model: nn.Module, family: Family) -> None:
    def put(_module: nn.Module, args: Any) -> Any:
        post = args[0].clone()
        post[..., NEURONS] = 0.5
        return (post,)

    family.block(model, LAYER).get_submodule(family.down).register_forward_pre_hook(put)


def zero_head(model: nn.Module, family: Family) -> None:
    width = getattr(model.config, "head_dim", None) or 16
    clear_columns(family.block(model, LAYER).get_submodule(family.out), list(range(width * HEAD, width * HEAD + width)))


def add_vector(model: nn.Module, family: Family) -> None:
    def add(_module: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] + VECTOR.to(output[0]), *output[1:])
        return output + VECTOR.to(output)

    family.block(model, LAYER).register_forward_hook(add)


def zero_expert(model: nn.Module, family: Family) -> None:
    down = family.block(model, LAYER).get_submodule(family.experts).down_proj
    with torch.no_grad():
        if down.shape[1] == HIDDEN:
            down[EXPERT, :, NEURONS] = 0
        else:
            down[EXPERT, NEURONS] = 0


def has_experts(draw: Draw) -> bool:
    return FAMILIES[draw["family"]].experts is not None and draw["wrapper"] != "lora"


def add_before(model: nn.Module, family: Family) -> None:
    """The first layer reads the vector as well."""

    def add(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0] + VECTOR.to(args[0]), *args[1:]), kwargs
        hidden = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": hidden + VECTOR.to(hidden)}

    family.block(model, 0).register_forward_pre_hook(add, with_kwargs=True)


def has_mlp(draw: Draw) -> bool:
    return FAMILIES[draw["family"]].down is not None


def has_gate(draw: Draw) -> bool:
    """Whether an MLP has a linear factor of its own."""
    return draw["family"] in ("llama", "qwen3", "mistral", "gemma2", "gemma3", "granite", "olmo2", "phi3", "gemma4")


def add_and_zero(model: nn.Module, family: Family) -> None:
    zero_neurons(model, family)
    add_vector(model, family)


class RowsSeen:
    """What an observer is shown, in one tensor: rows of all queries and heads of all layers, over columns."""

    def __init__(self) -> None:
        self._rows: dict[int, list[Tensor]] = {}

    def __call__(self, shown: Any) -> None:
        self.add(shown.layer, shown.probs)

    def add(self, layer: int, rows: Tensor) -> None:
        """Note rows `[batch head query key]` of a call."""
        self._rows.setdefault(layer, []).append(rows.detach().clone())

    def joined(self, length: int) -> Tensor:
        """All of them `[batch layer*head query key]`; the keys of a call end where its queries do, at the latest."""
        layers: list[Tensor] = []
        for _, parts in sorted(self._rows.items()):
            wide = [nn.functional.pad(rows, (0, length - rows.shape[-1])) for rows in parts]
            layers.append(torch.cat(wide, 2))
        return torch.cat(layers, 1)


def rows_by_hand(model: nn.Module, family: Family) -> RowsSeen:
    """Eager attention tells its rows."""
    model.set_attn_implementation("eager")
    seen = RowsSeen()
    for number in range(model.config.get_text_config().num_hidden_layers):
        attention = family.block(model, number).get_submodule(family.out.rpartition(".")[0])
        attention.register_forward_hook(lambda module, args, output, layer=number: seen.add(layer, output[1]))
    return seen


def _has_rows(draw: Draw) -> bool:
    """Whether all keys are columns and rows are told: no window drops keys, and calls are those of `Use.run`."""
    family, ways = FAMILIES[draw["family"]], ("none", "steps", "chunks", "second turn")
    tells = family.dispatches and (family.window is None or draw["cache"] == "none") and draw["cache"] in ways
    return tells and draw["call"] not in ("embeds", "everything") and draw["wrapper"] != "nnsight"


# Falcon forgets that it is causal where its attention is switched to eager, which plain means need here.
ROWS = {"site": PATTERN, "fits": lambda draw: draw["family"] != "falcon"}
ZERO = {"by_hand": zero_neurons, "fits": has_mlp, "events": True}
SOON = MonitorSettings(cooldown=8, tail_shortest=6, tail_beyond=0, tail_repeats=3)
"""Settings of a monitor that sees a repetition early."""
EVICTS = {"alone": True, "budget": True}


def _nothing() -> list[Any]:
    return []


def _zero() -> Any:
    return ss.Ablate(layer=LAYER, neurons=NEURONS)


def _along_lines(draw: Draw) -> bool:
    """Where rows of attention are asked for, eager attention reads the prompt."""
    return draw["attention"] != "eager" or draw["call"] != "everything"


EDITS = {
    "full": Edit(lambda: [kv.Full()]),
    "guard": Edit(lambda: [ss.LoopGuard(budget=BIG)]),
    "h2o": Edit(lambda: [kv.H2O(budget=BIG)]),
    "snapkv": Edit(lambda: [kv.SnapKV(budget=BIG)]),
    "loopserve": Edit(lambda: [ss.LoopServe(alpha=1.0, budget=BIG)]),
    "rows": Edit(lambda: [kv.Observe(RowsSeen())], site=ROWS_SEEN, fits=_has_rows),
    "observe": Edit(lambda: [kv.Observe(lambda rows: None)]),
    "loopserve 0": Edit(lambda: [ss.LoopServe(alpha=1.0, budget=BIG, shortest=0)]),
    "trace": Edit(_nothing, site=RESID),
    "trace zero": Edit(lambda: [_zero()], zero_neurons, site=RESID, fits=has_mlp),
    "trace post": Edit(_nothing, site=POST, fits=has_mlp),
    "trace z": Edit(_nothing, site=Z),
    "trace logits": Edit(_nothing, site="logits"),
    "pattern": Edit(_nothing, **ROWS),
    "zero": Edit(lambda: [_zero()], **ZERO),
    "value": Edit(lambda: [ss.Ablate(layer=LAYER, neurons=NEURONS, value=0.5)], set_neurons, fits=has_mlp, events=True),
    "zero first": Edit(lambda: [ss.Ablate(layer=LAYER, neurons=NEURONS, positions="first")], alone=True, fits=has_mlp),
    "add at": Edit(lambda: [ss.Add(VECTOR, RESID, positions=slice(2, 17))], alone=True),
    "zero|guard": Edit(lambda: [_zero() | ss.LoopGuard(budget=BIG)], **ZERO),
    "zero;full": Edit(lambda: [_zero(), kv.Full()], **ZERO),
    "head": Edit(lambda: [ss.Ablate(heads=[(LAYER, HEAD)])], zero_head, events=True),
    "add": Edit(lambda: [ss.Add(VECTOR, RESID)], add_vector),
    "add embed": Edit(lambda: [ss.Add(VECTOR, "hook_embed")], add_before),
    "add;zero": Edit(lambda: [ss.Add(VECTOR, RESID), _zero()], add_and_zero, fits=has_mlp, events=True),
    "expert": Edit(
        lambda: [ss.Ablate(sites=[(LAYER, EXPERT, neuron) for neuron in NEURONS])], zero_expert, fits=has_experts
    ),
    "streaming 12": Edit(lambda: [kv.StreamingLLM(budget=12)], **EVICTS),
    "h2o 12": Edit(lambda: [kv.H2O(budget=12)], **EVICTS),
    "tova 12": Edit(lambda: [kv.TOVA(budget=12)], **EVICTS),
    "snapkv 12": Edit(lambda: [kv.SnapKV(budget=12, window=6)], **EVICTS),
    "adakv 12": Edit(lambda: [kv.AdaKV(budget=12, window=6)], **EVICTS),
    "pyramid 12": Edit(lambda: [kv.Pyramid(budget=12, window=4)], **EVICTS),
    "progressive 12": Edit(lambda: [kv.policies()["progressive"](budget=12, every=2, after=1)], **EVICTS),
    "loopserve 12": Edit(
        lambda: [ss.LoopServe(alpha=0.8, budget=12, shortest=0, interval=2, first=0, sample=8, dense_rows=2)],
        **EVICTS,
        fits=_along_lines,
    ),
    "guard|streaming 12": Edit(lambda: [kv.StreamingLLM(budget=12) | ss.LoopGuard(budget=12)], **EVICTS),
    "zero|streaming 12": Edit(lambda: [_zero() | kv.StreamingLLM(budget=12)], **EVICTS, fits=has_mlp),
    "patch;snapkv 12": Edit(
        lambda: [ss.SinkPatch(layer=LAYER, neurons=[3]), kv.SnapKV(budget=12, window=6)], **EVICTS, fits=has_mlp
    ),
    "half snapkv": Edit(lambda: [kv.SnapKV(budget=0.5, window=6)], **EVICTS),
    "a shape": Edit(lambda: [ss.sparse.AShape(first=4, local=BIG)]),
    "a shape 12": Edit(lambda: [ss.sparse.AShape(first=4, local=8)], **EVICTS, fits=_along_lines),
    "minference": Edit(lambda: [ss.sparse.MInference(vertical=BIG, slash=BIG)]),
    "minference 12": Edit(lambda: [ss.sparse.MInference(vertical=6, slash=6, last=4)], **EVICTS, fits=_along_lines),
    "guard acts": Edit(
        lambda: [ss.LoopGuard(14, anchors=3, monitor=Timed(every=5, cooldown=0, warmup=0), act="cut", steer=None)],
        acts=True,
    ),
    "guard steers": Edit(lambda: [ss.LoopGuard(14, anchors=3, monitor=SOON, act="cut")], alone=True, steers=True),
    "guard rewinds": Edit(lambda: [ss.LoopGuard(14, anchors=3, monitor=SOON)], alone=True, steers=True),
    "patch up": Edit(
        lambda: [ss.SinkPatch(layer=LAYER, neurons=[3], site="up")], alone=True, fits=has_gate, events=True
    ),
    "patch calibrated": Edit(
        lambda: [ss.SinkPatch(sites=[(LAYER, 3)], calibrated={(LAYER, 3): 0.25})], alone=True, fits=has_mlp, events=True
    ),
    "patch": Edit(lambda: [ss.SinkPatch(layer=LAYER, neurons=[3])], alone=True, fits=has_mlp, events=True),
    "mean": Edit(lambda: [ss.Ablate(layer=LAYER, neurons=NEURONS, value="mean")], alone=True, fits=has_mlp),
    "head mean": Edit(lambda: [ss.Ablate(heads=[(LAYER, HEAD)], value="mean")], alone=True),
}
