"""Watch for sinks where none should be: sink neurons that fire at later positions, as tokens arrive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Event, Run
from sinkscope.interventions.edits import NeuronEdit, NeuronValues


@dataclass(frozen=True, kw_only=True)
class SinkDetector(NeuronEdit):
    """Raises an alarm at repeated tokens and cluster attacks; it changes nothing in the model.

    A position's score is the value of each sink neuron divided by its level, averaged over the neurons: 1 at a sink,
    near 0 at ordinary tokens. The rule holds at a position other than 0 if at least `hits` of the last `window`
    positions score `threshold` or more. Each time it begins to hold, `run.events` gets an event of kind "alarm" with
    the position and the score. Only the last `window` answers of a row are stored, however long it grows.

    Attributes:
        sites: Sink neurons of one MLP (or of one expert).
        levels: Value of each neuron at a sink, e.g. at BOS; `detect_attack` measures these.
        threshold: Lowest score that counts as a hit.
        hits: Number of hits within the window that raise an alarm.
        window: Number of latest positions considered.

    Example:
        >>> SinkDetector(layer=1, neurons=[7890], levels=[42.0]).hits
        2
    """

    levels: Sequence[float] = ()
    threshold: float = 0.5
    hits: int = 2
    window: int = 4

    KIND: ClassVar[str] = "alarm"
    EDITS: ClassVar[bool] = False

    def __post_init__(self, layer: int | None, neurons: int | Sequence[int]) -> None:
        super().__post_init__(layer, neurons)
        if len(self.groups()) > 1:
            raise SinkscopeError(
                f"sites in {len(self.groups())} places: a detector watches neurons of one MLP or one expert; make one "
                "for each, and enter them together with |"
            )
        levels = tuple(float(v) for v in self.levels)
        if len(levels) != len(self.sites) or not all(math.isfinite(v) and v != 0 for v in levels):
            raise SinkscopeError(
                f"levels={list(self.levels)!r} for {len(self.sites)} neurons: give each neuron's value at a sink, not 0"
            )
        if not 1 <= self.hits <= self.window:
            raise SinkscopeError(f"hits={self.hits}, window={self.window}: expected 1 <= hits <= window")
        if not math.isfinite(self.threshold):
            raise SinkscopeError(f"threshold={self.threshold}: give a share of the level at a sink, such as 0.5")
        object.__setattr__(self, "levels", levels)

    def summary(self, run: Run) -> str:
        """The number of alarms."""
        count = run.counts[self.KIND]
        return f"SinkDetector gave {count or 'no'} alarm{'' if count == 1 else 's'}."

    def scores(self, values: Float[Tensor, "batch pos neuron"]) -> Float[Tensor, "batch pos"]:
        """How sink-like each position is; 1 means as much as the first token."""
        return (values.float() / torch.tensor(self.levels, device=values.device)).mean(-1)

    def new_values(self, values: NeuronValues) -> None:
        """Change nothing; apply the rule to the new positions. Padding takes no place in its window."""
        scores, call, group, memory = self.scores(values.old.detach()), values.call, values.group, values.memory
        index = values.index
        real = index >= 0
        place = torch.where(real, real.cumsum(1) - 1, index.shape[1])  # padding goes to a column that is cut off

        def packed(values: Tensor) -> Tensor:
            room = torch.zeros(len(index), index.shape[1] + 1, dtype=values.dtype, device=values.device)
            return room.scatter_(1, place, values)[:, :-1]

        hit = packed((scores >= self.threshold) & (index > 0))
        counts, onset = running_rule(hit, real.sum(1), self.hits, self.window, memory)
        at, packed_scores = packed(index), packed(scores)

        def make() -> list[Event]:
            rows, columns = (t.tolist() for t in onset.nonzero(as_tuple=True))
            found = zip(rows, columns, at[onset].tolist(), packed_scores[onset].tolist(), strict=True)
            return [
                Event(row, call.step, p, group.layer, None, self.KIND, {"score": score, "hits": int(counts[row, c])})
                for row, c, p, score in found
            ]

        values.run.log(make)


def running_rule(
    hit: Shaped[Tensor, "batch pos"], lengths: Int[Tensor, " batch"], hits: int, window: int, memory: dict[str, Tensor]
) -> tuple[Int[Tensor, "batch pos"], Bool[Tensor, "batch pos"]]:
    """Apply the rule to new positions, continuing from `memory` ("tail": last answers; "on": the rule held).

    Args:
        hit: Whether each new position is a hit. A row's positions come first; entries after them are ignored.
        lengths: Number of new positions in each row.
        hits: Number of hits needed within the window.
        window: Number of latest positions considered.
        memory: State from earlier calls, empty in the first; it is updated in place.

    Returns:
        Number of hits among the last positions, and where the rule begins to hold.
    """
    batch, new = hit.shape
    tail = memory.get("tail", hit.new_zeros(batch, window - 1)).to(hit.device)
    on = memory.get("on", hit.new_zeros(batch, 1)).to(hit.device)
    joined = torch.cat([tail, hit], 1)
    counts = joined.unfold(1, window, 1).sum(-1)
    inside = torch.arange(new, device=hit.device) < lengths[:, None]
    holds = torch.cat([on, (counts >= hits) & inside], 1)
    onset = holds[:, 1:] & ~holds[:, :-1] & inside
    keep = lengths[:, None] + torch.arange(window - 1, device=hit.device)
    memory.update(tail=joined.gather(1, keep), on=holds.gather(1, lengths[:, None]))
    return counts, onset
