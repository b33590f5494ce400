"""What a sink does to the heads that attend to it, by the value there: nothing, or its value is written everywhere.

Attention to a place cannot tell a head that does nothing (an adaptive *nop*) from one that writes what stands at the
place (a *broadcast*); the value and the head's output can (arXiv 2606.08105). So the part of a head's output that comes
from the place is compared with all of it, and with what typical values at the place would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean as mean
from typing import Literal, NamedTuple, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.measure.margin import margin_of
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.results.claims import NEEDED, NOTHING, Claim, Contrast, Outcome, Search, percent_pair
from sinkscope.results.notation import count_of, head_name, word_form, word_list
from sinkscope.results.parts import VALUE
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.find.records import SHORT
from sinkscope.sinks.find.sinks import ordinary_position
from sinkscope.sinks.find.survey import Survey
from sinkscope.sinks.repetition.distance import output_weights
from sinkscope.tap.call import Attention
from sinkscope.tap.tap import listening

WRITES = "writes"
"""Role of the claims about the value at a place."""
Kind = Literal["nop", "broadcast", "mixed"]
TEXTS, LONG_TEXTS = 16, 4  # texts with the place that are read, and of long ones
TINY = 1e-12  # sizes below it are those of a head that writes nothing


@dataclass(frozen=True)
class HeadValue:
    """What one head writes at later queries by the value of a place that it attends to; sizes are norms through W_O.

    Attributes:
        head: The head.
        place: The words for the place.
        attention: Mean attention of later queries to it.
        share: Size of what comes from the place over that of the head's output.
        change: The same over the size of the output that it would have with a typical value at the place.
        typical: Size of what would come from there then, over that same size.
        control: As `share`, for the value of an ordinary position.
    """

    head: str
    place: str
    attention: float
    share: float
    change: float
    typical: float
    control: float

    @property
    def kind(self) -> Kind:
        """What the place does to the head."""
        if self.change <= NOTHING:
            return "nop"
        if self.share >= NEEDED:
            return "broadcast"
        return "mixed"


class _Sizes(NamedTuple):
    """Sizes of what a head writes by the value at some positions, mean square over later queries, for every text.

    Attributes:
        attention: Mean attention to the positions.
        intact: Its output.
        own: The part that comes from the positions.
        given: The output with typical values there.
        typical: The part that comes from there then.
        replaced: The difference that typical values make.
    """

    attention: Float[Tensor, "text head"]
    intact: Float[Tensor, "text head"]
    own: Float[Tensor, "text head"]
    given: Float[Tensor, "text head"]
    typical: Float[Tensor, "text head"]
    replaced: Float[Tensor, "text head"]

    def over_intact(self, size: Float[Tensor, "text head"]) -> Float[Tensor, "text head"]:
        """A size over that of the output."""
        return size / self.intact.clamp(min=TINY)

    def over_given(self, size: Float[Tensor, "text head"]) -> Float[Tensor, "text head"]:
        """A size over that of the output with typical values."""
        return size / self.given.clamp(min=TINY)


def _sizes(
    rows: Float[Tensor, "text head query key"],
    written: Float[Tensor, "text head key d_head"],
    sees: Bool[Tensor, "text query key"],
    where: Bool[Tensor, "text key"],
    typical: Bool[Tensor, "text key"],
) -> _Sizes:
    """What heads write by the value at some positions, at the queries elsewhere that see one of them.

    The typical values are those at all `typical` positions of the same text, one after another. Their mean alone would
    be too small a value, because values of different tokens cancel.
    """
    later = rearrange((sees & where[:, None]).any(-1) & ~where, "text query -> text 1 query")
    here = rearrange(where, "text key -> text 1 1 key")
    attention = (rows * here).sum(-1) * later
    output, own = rows @ written, (rows * here) @ written
    count = later.sum(-1).clamp(min=1)
    weights = rearrange(typical / typical.sum(1, keepdim=True).clamp(min=1), "text key -> text 1 key 1")
    mean = (written * weights).sum(2, keepdim=True)
    around = ((written - mean).square() * weights).sum((2, 3)) * attention.square().sum(-1)
    given = attention[..., None] * mean

    def size(tensor: Tensor, more: Tensor | float = 0.0) -> Tensor:
        """Root of the mean square over later queries, where typical values differ by `more` around their mean."""
        return (((tensor.square().sum(-1) * later).sum(-1) + more) / count).sqrt()

    return _Sizes(
        attention.sum(-1) / count,
        intact=size(output),
        own=size(own),
        given=size(output - own + given, around),
        typical=size(given, around),
        replaced=size(given - own, around),
    )


NOTHING_READ = _Sizes(*[torch.zeros(0, 0)] * 6)


def values_of(setup: Setup, survey: Survey) -> tuple[tuple[HeadValue, ...], tuple[Claim, ...]]:
    """What each head that attends to a place writes by the value there, and a claim for the heads of each kind.

    Args:
        setup: The model and its text.
        survey: Where the sinks are. Learned sink logits have no value and are left out.
    """
    values: list[HeadValue] = []
    claims: list[Claim] = []
    for place in survey.sinks:
        heads, there, elsewhere = _read(setup, survey, place)
        if not heads:
            continue
        shares, changes = there.over_intact(there.own), there.over_given(there.own)
        typical, control = there.over_given(there.typical), elsewhere.over_intact(elsewhere.own)
        kinds: dict[Kind, list[int]] = {}
        for number, head in enumerate(heads):
            sizes = [each[:, number].mean() for each in (there.attention, shares, changes, typical, control)]
            value = HeadValue(head, place.words, *map(float, sizes))
            values.append(value)
            kinds.setdefault(value.kind, []).append(number)
        for kind, numbers in kinds.items():
            taken, other, name = shares, control, "zeroed elsewhere"
            if kind == "nop":  # elsewhere these heads do not attend, so that zeroing there would change nothing either
                taken, other, name = changes, there.over_given(there.replaced), "a typical value there"
            left, beside = (1 - taken[:, numbers]).clamp(min=0), (1 - other[:, numbers]).clamp(min=0)
            claims.append(
                Claim(
                    role=WRITES,
                    subject=(VALUE,),
                    outcome=Outcome("output", heads=tuple(heads[number] for number in numbers)),
                    place=place.words,
                    value=float(left.mean()),
                    contrasts=(Contrast("intact", 1.0), Contrast("other", float(beside.mean()), 1, name)),
                    draws=len(left),
                    search=Search("heads", len(heads)),
                    margin=margin_of(left.mean(1).numpy()),
                )
            )
    return tuple(values), tuple(claims)


def _read(setup: Setup, survey: Survey, place: Place) -> tuple[list[str], _Sizes, _Sizes]:
    """The heads that attend to a place, what they write by its value, and by that of an ordinary position."""
    target, received = setup.target, survey.received
    there = place.there(received.ids)
    chosen: dict[int, list[int]] = {}
    for layer, head in received.readers(there):
        if target.adapter.o is not None and target.kind != "bridge":
            chosen.setdefault(layer, []).append(head)
    texts = there.any(1).nonzero().flatten()[: TEXTS if there.shape[1] <= SHORT else LONG_TEXTS]
    there = there[texts]
    barred = there | (torch.arange(there.shape[1]) == 0)
    attended = received.places.there[texts]
    barred[:, : attended.shape[1]] |= attended
    control = torch.nn.functional.one_hot(ordinary_position(barred), there.shape[1]).bool()
    ways: dict[int, Tensor] = {}
    for layer, heads in chosen.items():
        ways[layer] = torch.linalg.qr(output_weights(target, layer)[heads].mT).R.mT  # norms are those through W_O
    found: dict[int, tuple[_Sizes, _Sizes]] = {}

    def see(call: Attention) -> None:
        layer = call.layer
        if layer not in ways or call.is_repeated or call.value.shape[-1] != ways[layer].shape[1]:
            return
        sees = call.visible(slice(None))[:, 0].cpu()
        value = per_query_head(call.value, target.n_heads).expand(-1, target.n_heads, -1, -1)
        written = value[:, chosen[layer]].float().cpu() @ ways[layer]

        def take(_first: int, rows: Tensor) -> None:
            rows = rows[:, chosen[layer]].float().cpu()
            sizes = [_sizes(rows, written, sees, where, ~barred) for where in (there, control)]
            found[layer] = sizes[0], sizes[1]

        call.show(take, by_mask=True, chunk=there.shape[1])

    if ways:
        with listening(target, see):
            target.forward(received.ids[texts], upto=max(ways))
    if not found:
        return [], NOTHING_READ, NOTHING_READ
    names = [head_name(layer, head) for layer in found for head in chosen[layer]]
    return names, _joined([there for there, _ in found.values()]), _joined([beside for _, beside in found.values()])


def _joined(sizes: Sequence[_Sizes]) -> _Sizes:
    """The sizes of the heads of several layers."""
    return _Sizes(*(torch.cat(parts, 1) for parts in zip(*sizes, strict=True)))


def values_sentence(values: Sequence[HeadValue]) -> str:
    """How many of the heads that attend to a place do nothing by it, broadcast its value, or are between."""
    of = {kind: [value for value in values if value.kind == kind] for kind in get_args(Kind)}
    nops, broadcasts, mixed = of.values()
    parts: list[str] = []
    if nops:
        change, typical = mean([one.change for one in nops]), mean([one.typical for one in nops])
        do = word_form(len(nops), "does", "do")
        own, other = percent_pair(change, typical)
        parts.append(
            f"{len(nops)} {do} nothing by it (nop: {own} of the output comes from there, {other} by a typical value)"
        )
    if broadcasts:
        share, control = mean([one.share for one in broadcasts]), mean([one.control for one in broadcasts])
        own, other = percent_pair(share, control)
        parts.append(f"{len(broadcasts)} broadcast its value ({own} of the output; an ordinary position: {other})")
    if mixed:
        parts.append(f"{len(mixed)} {word_form(len(mixed), 'is', 'are')} between")
    return f"Of {count_of(len(values), 'head')} that attend to {values[0].place}, {word_list(parts)}."
