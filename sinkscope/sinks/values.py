"""What a sink does to the heads that attend to it: nothing, or its value is written everywhere.

Attention to a place does not tell a head that does nothing (an adaptive *nop*) from one that writes what stands at the
place (a *broadcast*); the value and the head's output do (arXiv 2606.08105). So the part of a head's output that comes
from the place is compared with the output that typical values at the place would give.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.hooks.trace.run import trace
from sinkscope.models.grouped_heads import output_factors, per_query_head
from sinkscope.models.target import Target
from sinkscope.results.claims import NEEDED, NOTHING, Claim, Claims, Contrast, Outcome, Search
from sinkscope.results.notation import count_of
from sinkscope.results.parts import VALUE, Head
from sinkscope.sinks.find.layer_scan import ordinary_position
from sinkscope.sinks.find.left import INTACT, claim_of
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.removal.components import Heads
from sinkscope.sinks.tokens import TokenRows
from sinkscope.tap.call import Attention
from sinkscope.tap.tap import listening

TEXTS = 16  # texts that are read


@dataclass(frozen=True)
class HeadValue:
    """What one head writes by the value of a place that it attends to.

    Attributes:
        head: The head.
        place: The words for the place.
        change: Size of what comes from the place, over that of the head's output with typical values there. Sizes are
            those after W_O: the root mean square over the later queries that see the place.
        control: The same of an ordinary position.
    """

    head: Head
    place: str
    change: float
    control: float

    @property
    def kind(self) -> str:
        """What the place does to the head: "nop", "broadcast" or "mixed"."""
        if self.change <= NOTHING:
            return "nop"
        return "broadcast" if self.change >= NEEDED else "mixed"


def values_of(target: Target, survey: Survey) -> tuple[tuple[HeadValue, ...], Claims]:
    """What each head that attends to a place writes by the value there, and a claim about the heads of each kind.

    Args:
        target: The model. There is nothing if no module of it reads its heads side by side.
        survey: Where the sinks are. Learned sink logits have no value and are left out.
    """
    if target.adapter.o is None:
        return (), ()
    values: list[HeadValue] = []
    claims: list[Claim] = []
    ids = survey.received.ids
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    last = survey.received.judged.shape[1]  # those from here on are not judged
    for place in survey.sinks:
        there = place.there(ids)
        barred = there | (positions == 0) | (positions >= last)
        heads = survey.received.readers(there)
        texts = there.any(1).nonzero().flatten()[:TEXTS]
        beside = ordinary_position(survey.received.norms[max(heads)[0], texts], barred[texts])
        wheres = [there[texts], torch.nn.functional.one_hot(beside, ids.shape[1]).bool()]
        read = _read(target, ids[texts], wheres, ~barred[texts], heads)
        groups: dict[str, list[int]] = {}
        for number, head in enumerate(heads):
            change, _, control = read[..., number].mean(1).tolist()
            values.append(HeadValue(Head(*head), place.words, change, control))
            groups.setdefault(values[-1].kind, []).append(number)
        for kind, numbers in groups.items():
            change, typical, control = read[..., numbers].clamp(max=1)
            other = Contrast("other", 1 - float(control.mean()), 1, "zeroed elsewhere")
            if kind == "nop":  # these heads do not attend elsewhere, where zeroing would change nothing either
                other = Contrast("other", 1 - float(typical.mean()), 1, "a typical value there")
            some = f"{len(numbers)} of " if len(numbers) < len(heads) else ""
            effect = f"the output of {some}{count_of(len(heads), 'head')} that attend to {{}}"
            attending = tuple(Head(*heads[number]) for number in numbers)
            outcome, search = Outcome("output", heads=attending, effect=effect), Search("heads", len(heads))
            left = 1 - change.mean(1)
            claims.append(claim_of("writes", (VALUE,), outcome, place.words, left, [INTACT, other], search))
    return tuple(values), tuple(claims)


def _read(target: Target, ids: TokenRows, wheres: list[Tensor], typical: Tensor, heads: Heads) -> Tensor:
    """The change of `HeadValue`, that by typical values in the same place, and the control, by text and head.

    Args:
        target: The model.
        ids: The texts.
        wheres: The positions of the place and of the control, each `[text pos]`.
        typical: All ordinary positions.
        heads: The heads.
    """
    ways: dict[int, Tensor] = {}
    for layer in {layer for layer, _ in heads}:
        ways[layer] = output_factors(target, layer)
    found: dict[int, Tensor] = {}

    def take(layer: int, value: Tensor, rows: Tensor) -> None:
        value = target.shards.gather(value, target.n_kv_heads, 1)
        rows = target.shards.gather(rows, target.n_heads, 1).cpu()
        written = per_query_head(value, target.n_heads).float().cpu() @ ways[layer]
        place, control = (_changes(rows, written, where, typical) for where in wheres)
        found[layer] = torch.cat([place, control[:1]])

    def see(call: Attention) -> None:
        if call.layer in ways:
            call.show(lambda _, rows: take(call.layer, call.value, rows), by_mask=True, chunk=ids.shape[1])

    if target.kind == "bridge":  # its values have a place of their own, and the tap does not see them
        for layer in ways:
            value, rows = trace(target, ids, [f"blocks.{layer}.attn.hook_{name}" for name in ("v", "pattern")]).values()
            take(layer, value.transpose(1, 2), rows)
    else:
        with listening(target, see):
            target.forward(ids, upto=max(ways))
    return torch.stack([found[layer][..., head] for layer, head in heads], 2)


def _changes(rows: Tensor, written: Tensor, where: Tensor, typical: Tensor) -> Tensor:
    """The change of `HeadValue` by the value at some positions, and that by typical values there, by text and head.

    The typical values are those of all `typical` positions of the text, one after another. Their mean alone would be
    too small a value, because the values of different tokens cancel.

    Args:
        rows: Attention, `[text head query key]`.
        written: What the value of each key writes, `[text head key width]`.
        where: The positions, `[text key]`.
        typical: Typical positions, `[text key]`.
    """
    to_place = rows * where[:, None, None]
    attention = to_place.sum(-1, keepdim=True) * ~where[:, None, :, None]
    later = attention > 0  # a query that does not see the place gives it exactly nothing
    weights = (typical / typical.sum(1, keepdim=True))[:, None, :, None]
    mean = (written * weights).sum(2, keepdim=True)
    around = ((written - mean).square() * weights).sum(2, keepdim=True).sqrt()

    def square(output: Tensor) -> Tensor:
        return (output.square() * later).sum((2, 3))

    own, rest = to_place @ written, (rows - to_place) @ written
    spread = square(attention * around)  # of typical values around their mean
    total = square(rest + attention * mean) + spread
    return torch.stack([square(own) / total, (square(attention * mean) + spread) / total]).sqrt().nan_to_num()
