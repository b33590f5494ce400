"""What the heads of a sink need: components replaced one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import compress

from sinkscope.measure.evidence import NEEDED
from sinkscope.models.target import Target
from sinkscope.sinks.removal.components import Component, Edit, Heads, one_by_one
from sinkscope.sinks.removal.position_effect import KEY_BIAS, PositionEffect
from sinkscope.sinks.removal.rows import At
from sinkscope.sinks.tokens import TokenRows


@dataclass(frozen=True)
class Carried:
    """What the heads of a sink need.

    Attributes:
        main: What most heads read. None if there is no such thing.
        reads: What heads read, with the share of the heads that do, the largest share first. What an attention layer
            or an MLP writes without making a spike is called the mark.
        mark: The component that writes the mark. None if no head reads one, or if heads read those of several.
    """

    main: str | None
    reads: tuple[tuple[str, float], ...] = ()
    mark: str | None = None


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
    effect = PositionEffect(target, ids, at, (at + ids.shape[1]) // 2, heads=heads)
    components = effect.components
    lost = effect.lost([*one_by_one(components), Edit(swap=tuple(effect.written))])
    needed = effect.needed(components, lost[:-1])
    reads: dict[str, float] = {}
    marks: list[str] = []
    for number in range(len(heads)):
        what, writer = _read_of(list(compress(components, needed[:, number].tolist())), makers)
        if what is None and lost[-1, number] < NEEDED:
            what = "position"
        if what is not None:
            reads[what] = reads.get(what, 0.0) + 1 / len(heads)
        if writer is not None:
            marks.append(writer)
    mark = None
    if len(set(marks)) == 1:
        mark = marks[0]
    main = max(reads, key=lambda what: reads[what], default=None)
    if main is not None and reads[main] < NEEDED:
        main = None
    return Carried(main, tuple(sorted(reads.items(), key=lambda one: -one[1])), mark)


def _read_of(needed: Sequence[Component], makers: AbstractSet[str]) -> tuple[str | None, str | None]:
    """What a head reads that needs some components, and the writer of a mark: the one nearest to the head."""
    names = [str(one) for one in needed]
    if KEY_BIAS in needed:
        return str(KEY_BIAS), None
    if not makers.isdisjoint(names):
        return "spike", None
    if needed and needed[-1].layer is not None:
        return "mark", names[-1]
    if needed:
        return names[0], None
    return None, None
