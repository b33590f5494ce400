"""What the heads of a sink need, and what makes a spike that no MLP makes: components replaced one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import compress

import torch

from sinkscope.measure.evidence import NEEDED
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.context import SinkContext
from sinkscope.sinks.first_token.effects import (
    At,
    Component,
    Edit,
    effects,
    has_key_bias,
    heads_lost,
    one_by_one,
    writers,
)
from sinkscope.sinks.first_token.members import Heads
from sinkscope.sinks.first_token.records import Carrier
from sinkscope.sinks.tokens import TokenRows

LEAST_GAIN = 0.01  # attention that a typical position must gain from something for this to be compared
MAKER_TEXTS = 2
MAKER_LENGTH = 32  # typical text in which the maker of a spike is searched


@dataclass(frozen=True)
class Carried:
    """What the heads of a sink need.

    Attributes:
        tried: The components that were replaced.
        reads: What heads read, with the share of the heads that do, the largest share first. What an attention layer
            or an MLP writes without making a spike is called the mark.
        mark: The component that writes the mark. None if no head reads one.
    """

    tried: tuple[Carrier, ...] = ()
    reads: tuple[tuple[str, float], ...] = ()
    mark: str | None = None

    @property
    def main(self) -> str | None:
        """What most heads read. None if there is no such thing."""
        if self.reads and self.reads[0][1] >= NEEDED:
            return self.reads[0][0]
        return None


def carriers(
    target: Target, ids: TokenRows, heads: Heads, at: At = 0, makers: AbstractSet[str] = frozenset()
) -> Carried:
    """Replace each component at the position by what it writes at a later one, to see whose absence ends the sink.

    "position" is what remains when everything written at the position is replaced.

    Args:
        target: The model.
        ids: The texts.
        heads: The heads that attend to the position.
        at: The position, one or one of each text.
        makers: Components that make the spike of the position.
    """
    last = max(layer for layer, _ in heads)
    written = writers(target, last)
    components = list(written)
    if has_key_bias(target):
        components.append(Component("key bias"))
    edits = [*one_by_one(components), Edit(swap=tuple(written))]
    source = (at + ids.shape[1]) // 2
    edited = effects(target, ids, edits, at=at, source=source, upto=last, attention=True)
    drops = edited.attention_drops(heads)
    *lost, lost_without_all = heads_lost(drops)
    tried = (*map(Carrier, map(str, components), lost), Carrier("position", 1 - lost_without_all))
    # Given to the typical position, what is read draws attention there; what only hides something else does not.
    turned = effects(target, ids, one_by_one(components), at=source, source=at, upto=last, attention=True)
    layer, head = torch.tensor(heads).T
    gained = (turned.attention - turned.intact_attention)[:, :, layer, head].mean(1)
    reads: dict[str, float] = {}
    marks: list[str] = []
    for number in range(len(heads)):
        needed = list(compress(components, (drops[:-1, number] >= NEEDED).tolist()))
        gains = [float(gained[components.index(one), number]) for one in needed]
        least = NEEDED * max(gains, default=0.0)
        bringing = [one for one, gain in zip(needed, gains, strict=True) if gain >= least or one.kind == "key bias"]
        if least < LEAST_GAIN:
            bringing = needed
        what, writer = _read_of(bringing, makers)
        if what is None and drops[-1, number] < NEEDED:
            what = "position"
        if what is not None:
            reads[what] = reads.get(what, 0.0) + 1 / len(heads)
        if writer is not None:
            marks.append(str(writer))
    mark = max(marks, key=marks.count) if marks else None
    return Carried(tried, tuple(sorted(reads.items(), key=lambda one: -one[1])), mark)


def _read_of(needed: Sequence[Component], makers: AbstractSet[str]) -> tuple[str | None, Component | None]:
    """What a head reads that needs some components, and the writer of a mark: the one nearest to the head."""
    if Component("key bias") in needed:
        return "key bias", None
    writing = [one for one in needed if one.layer is not None]
    if any(str(one) in makers for one in needed):
        return "spike", None
    if writing:
        return "mark", writing[-1]
    if needed:
        return str(needed[0]), None
    return None, None


def spike_maker(context: SinkContext) -> str | None:
    """The component without which the spike is gone; None if there is no single one."""
    target = context.target
    scan = context.scan
    layer = scan.spike_layers[0]
    at = context.at[:MAKER_TEXTS]
    ids = context.ids[:MAKER_TEXTS, : max(MAKER_LENGTH, context.up_to_place + 4)]
    candidates = writers(target, layer + 1)
    source = (at + ids.shape[1]) // 2
    edited = effects(target, ids, one_by_one(candidates), at=at, source=source, upto=layer, without=scan.shared_dims)
    drops = edited.drops(layer)
    best = int(drops.argmax())
    if float(drops[best]) < NEEDED:
        return None
    return str(candidates[best])
