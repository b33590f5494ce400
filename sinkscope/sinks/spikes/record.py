"""A spike as a result has it: what was chosen on one half of the texts, in numbers of the other half."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.errors import SinkscopeError
from sinkscope.results.notation import Neuron
from sinkscope.results.table import Row
from sinkscope.sinks.spikes.spike import Parts, PlaceWords
from sinkscope.sinks.spikes.tables import WRITES, Done, Effect, Erased, Role, Size, SpikeKey, Writer, Written
from sinkscope.sinks.spikes.why_tables import Condition, Conditioned, Constancy, Mark, Purpose, PurposeKey


@dataclass(frozen=True, kw_only=True)
class SpikeResult:
    """A spike as a result says it: what was chosen on one half of the texts, in numbers of the other half.

    Attributes:
        place: Where it is.
        layers: First and last layer of the run in which it stands out.
        peak: The layer after which it is largest.
        highest: The layer of the run after which its norm is farthest above the typical one.
        dims: Residual dimensions that hold at least a tenth of its direction's square.
        needed: The smallest set found without which less than a quarter of it is left; empty: no set that was tried.
        like: Number of an earlier spike that this one repeats at another place. None: it repeats none.
        held_out: Whether its numbers are of texts that did not find it.
        texts: The numbers of these texts among those that were read.
        size: How large it is, and who reads it.
        writers: The neurons that were tried, the largest share first.
        components: What components write of it.
        erasers: What components write against it after its peak.
        effects: What its needed parts do, with their controls.
        marks: Components that mark its place.
        conditions: What makes another position such a place.
        constant: Why heads read it.
        purpose: What attention to it is for.
    """

    place: PlaceWords
    layers: tuple[int, int]
    peak: int
    highest: int
    dims: tuple[int, ...]
    needed: Parts
    like: int | None
    held_out: bool
    texts: tuple[int, ...]
    size: Size
    writers: tuple[Writer, ...] = ()
    components: tuple[Written, ...] = ()
    erasers: tuple[Erased, ...] = ()
    effects: tuple[Effect, ...] = ()
    marks: tuple[Mark, ...] = ()
    conditions: tuple[Conditioned, ...] = ()
    constant: tuple[Constancy, ...] = ()
    purpose: tuple[Purpose, ...] = ()

    def __post_init__(self) -> None:
        if self.effects and not any(row.is_control for row in self.effects):
            raise SinkscopeError(f"the effects of the spike at {self.key} have no control: give its rows")

    @property
    def key(self) -> SpikeKey:
        """The spike, as it is known in other models."""
        return SpikeKey(self.place.key, self.layers)

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all its tables; of the writers, the needed ones are first."""
        writers = sorted(self.writers, key=lambda row: row.role is not Role.NEEDED)
        chosen = (*writers, *self.components, *self.erasers)
        answers = (*self.conditions, *self.constant, *self.purpose)
        return (*answers, self.size, *chosen, *self.effects, *self.marks)

    @property
    def effect(self) -> Effect | None:
        """What its needed parts do at the place; None if it needs none."""
        return next((row for row in self.effects if row.key.done is Done.NEEDED and not row.key.everywhere), None)

    @property
    def hidden(self) -> Purpose | None:
        """What it costs to hide the place after its first writer; None: it was not asked."""
        return next((row for row in self.purpose if row.key is PurposeKey.HIDDEN), None)

    def condition(self, key: Condition) -> Conditioned:
        """Return what a position has of it under a condition."""
        return next(row for row in self.conditions if row.key == key)

    @property
    def heads(self) -> int:
        """The heads in its layers that attend to the place."""
        return int(self.size.heads.value)

    @property
    def ratio(self) -> float:
        """Its norm over the typical one, in the layer of the run where it is largest."""
        return self.size.ratio.value

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The values that a patch writes: those of the neurons that write the spike, by what their removal does."""
        return {row.key: row.neutral.value for row in self.writers if row.role in WRITES}

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The needed neurons; empty if components are needed."""
        return tuple(part for part in self.needed if isinstance(part, Neuron))
