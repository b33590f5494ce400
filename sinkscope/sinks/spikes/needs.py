"""Step 3, the needs: the smallest set that a spike needs, and what the removal of each candidate does.

1. Search the smallest set of candidates without which less than a quarter of the spike is left. If there is none, ask
   which neurons take over when the candidates are gone, then try components.
2. Remove each candidate alone: what lowers the spike is a writer, what raises it or lowers another spike more is not.

Neurons are zeroed at the place alone, equal neurons as one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, combinations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.hooks.edit.base import under
from sinkscope.hooks.edit.sink_patch import SinkPatch
from sinkscope.results.notation import Component, Neuron
from sinkscope.results.row import Row, of_table
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.places import Place
from sinkscope.sinks.spikes.records import WRITES
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.writers import Unit, Writers, components, components_of, neuron_at, of_layer, with_backups
from sinkscope.sinks.thresholds import COUNTS, LIKE, NAMED, READS, REMOVED

BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
PAIRED = 4  # components that are tried in pairs
PREFIXES = 16  # the first units of an order are tried as sets of 1, 2, ... 16
FEW = 4  # texts in which a set is searched


@dataclass(frozen=True, eq=False)
class Needs:
    """What a spike needs.

    Attributes:
        writers: The candidates, with backups.
        needed: The smallest set found that leaves less than a quarter of the spike; empty if there is none.
        backups: Neurons that write only when others are gone.
        alone: What is left of the spike, and of the other spikes, without each unit.
        order: Components, strongest effect first, if no neurons are enough.
    """

    writers: Writers
    needed: Parts
    backups: tuple[Neuron, ...] = ()
    alone: Mapping[Unit, Float[Tensor, " spike"]] = field(default_factory=dict)
    order: tuple[Component, ...] = ()

    @property
    def units(self) -> tuple[Unit, ...]:
        """The needed neurons, equal ones together."""
        return tuple(unit for unit in self.writers.units if unit[0] in self.needed)

    def role(self, unit: Unit) -> str:
        """Return what the removal of a unit does."""
        left, *others = self.alone[unit].tolist()
        if unit[0] in self.needed:
            return "needed"
        if unit[0] in self.backups:
            return "backup"
        if any(1 - other >= max(COUNTS, 1 - left) for other in others):
            return "another spike"
        if abs(1 - left) < NAMED:
            return "nothing"
        return "lowers" if left < 1 else "raises"


@torch.no_grad()
def needs_of(spike: Spike, writers: Writers, others: Sequence[Spike]) -> Needs:
    """Search the smallest set that a spike needs, and remove each candidate alone.

    Where no neurons are enough, components are replaced by their mean over ordinary positions, alone and in pairs.

    Args:
        spike: The spike.
        writers: Its candidates.
        others: Other spikes of the same survey, of which is measured what is left.
    """
    texts = SpikeTexts.of(spike)
    needed, backups = search(texts, writers)
    writers = with_backups(spike, writers, backups)
    needs = Needs(writers, needed, backups, without_each(SpikeTexts.of(spike, others), writers.units))
    if not needed:
        left = texts.left([(part,) for part in components(spike.survey.target, spike.peak)])
        order = tuple(part for (part,) in left if isinstance(part, Component))
        parts = enough_components(texts, of_table(components_of(spike), "components").values(), order, left)
        needs = replace(needs, needed=parts, order=order)
    return needs


def without_each(texts: SpikeTexts, units: Sequence[Unit]) -> dict[Unit, Float[Tensor, " spike"]]:
    """Return what is left of the spike and of the others at the place without each unit; strongest effect first."""
    if not units:
        return {}
    left = texts.at_place(units).nanmean(-1).nan_to_num(1.0)
    order = left[:, 0].abs().argsort(stable=True).tolist()
    return {units[number]: left[number] for number in order}


@torch.no_grad()
def like_needs(spike: Spike, other: Spike, needs: Needs) -> Needs | None:
    """Return what another spike needs, if this is the same spike at another place; else None.

    Both have one direction, and one set of neurons removes them.

    Args:
        spike: The spike.
        other: The other spike.
        needs: What the other spike needs.
    """
    own, known = spike.layers, other.layers
    if not needs.units or own[0] > known[1] or known[0] > own[1] or float(spike.direction @ other.direction) < LIKE:
        return None
    texts = SpikeTexts.of(spike)
    if abs(texts.left([needs.needed])[needs.needed]) >= REMOVED:
        return None
    return replace(needs, alone=without_each(texts, needs.writers.units))


# --- the search ---


def search(texts: SpikeTexts, writers: Writers) -> tuple[tuple[Neuron, ...], tuple[Neuron, ...]]:
    """Search the candidates and their backups for the smallest set that leaves less than a quarter.

    Neurons that write against the spike are members only if no set is enough without them.

    Args:
        texts: The texts.
        writers: The candidates.

    Returns:
        The set, empty if there is none; and the backups that were found.
    """
    shares = {unit: writers.share(unit) for unit in writers.units}
    writing = [unit for unit, share in shares.items() if share > 0]
    most = texts.spike.place.mask[texts.rows].sum(1).argsort(descending=True, stable=True)
    few = replace(texts, rows=texts.rows[most[:FEW].sort().values])  # the first texts that have the place most often
    backups, needed = list[Unit](), tuple[Unit, ...]()
    for _ in range(BACKUPS + 1):
        members = [*writing, *backups]
        needed = smallest_set(few, members, shares)
        fresh = [] if needed or not members else taking_over(texts, neurons_of([*shares, *backups]))
        if not fresh:
            break
        backups += [(neuron,) for neuron in fresh]
    if not needed and len(writing) < len(shares):
        needed = smallest_set(few, [*shares, *backups], shares)
    return neurons_of(needed), neurons_of(backups)


def neurons_of(units: Sequence[Unit]) -> tuple[Neuron, ...]:
    """Return the neurons of some units."""
    return tuple(chain.from_iterable(units))


def smallest_set(texts: SpikeTexts, members: Sequence[Unit], shares: Mapping[Unit, float]) -> tuple[Unit, ...]:
    """Return the smallest set of units that leaves less than a quarter of the spike; it is empty if none does.

    Units are added, strongest effect first, until less than a quarter is left; then members that are not needed are
    dropped. The same is done with the largest share first. The smaller set wins, and a tie goes to the set that leaves
    least.

    Args:
        texts: The texts.
        members: The units.
        shares: What each writes; a backup writes nothing.
    """
    effects = texts.left(members)
    alone = sorted(members, key=lambda unit: abs(effects[unit]))
    smallest: list[tuple[tuple[Unit, ...], float]] = []
    for order in (alone, sorted(members, key=lambda unit: -shares.get(unit, 0.0))):
        lengths = [*range(1, min(PREFIXES, len(order)) + 1), *range(2 * PREFIXES, len(order), PREFIXES), len(order)]
        sets = {neurons_of(order[:length]): tuple(order[:length]) for length in dict.fromkeys(lengths) if length}
        left = texts.left(list(sets))
        enough = next((neurons for neurons in sets if abs(left[neurons]) < REMOVED), None)
        if enough is not None:
            smallest.append(pruned(texts, sets[enough], abs(left[enough])))
    return min(smallest, key=lambda found: (len(found[0]), found[1]), default=((), 0.0))[0]


def pruned(texts: SpikeTexts, units: tuple[Unit, ...], left: float) -> tuple[tuple[Unit, ...], float]:
    """Drop the unit that adds least, again and again, as long as less than a quarter of the spike is left.

    Args:
        texts: The texts.
        units: The units.
        left: Absolute value of what is left without them.
    """
    while len(units) > 1:
        sets = {neurons_of(fewer): fewer for fewer in combinations(units, len(units) - 1)}
        best, share = next(iter(texts.left(list(sets)).items()))
        if abs(share) >= REMOVED:
            break
        units, left = next(fewer for neurons, fewer in sets.items() if neurons == best), abs(share)
    return units, left


def taking_over(texts: SpikeTexts, members: Sequence[Neuron]) -> list[Neuron]:
    """Return at most two backups: neurons that write the spike only when its writers are gone."""
    spike, target, backups = texts.spike, texts.spike.survey.target, dict[Neuron, float]()
    with under(Ablate(sites=tuple(members)), target):
        for layer in [layer for layer in target.with_neurons if layer <= spike.peak]:
            shares = of_layer(spike, layer).shares.mean(1)
            for number in shares.topk(min(4, len(shares))).indices.tolist():
                neuron = neuron_at(target, layer, number)
                if neuron not in members and float(shares[number]) >= COUNTS:
                    backups[neuron] = float(shares[number])
    return sorted(backups, key=lambda neuron: -backups[neuron])[:2]


def enough_components(
    texts: SpikeTexts, writers: Iterable[Row], order: Sequence[Component], left: Mapping[Parts, float]
) -> Parts:
    """Return one component or a pair without which less than a quarter is left, largest writers first; or none.

    Args:
        texts: The texts.
        writers: Shares of components.
        order: Components, strongest effect first.
        left: What is left without each.
    """
    names = {str(part): part for part in order}
    writing = [names[row.name] for row in writers if abs(row.get("share")) >= COUNTS]
    for part in [*writing, order[0]]:
        if abs(left[(part,)]) < REMOVED:
            return (part,)
    pairs = combinations(dict.fromkeys([*writing[:PAIRED], *order[:PAIRED]]), 2)
    best, share = next(iter(texts.left(list(pairs)).items()), ((), 1.0))
    return best if abs(share) < REMOVED else ()


# --- what is known of a spike ---


@dataclass(frozen=True, eq=False)
class SpikeCircuit:
    """A spike with what writes it and what it needs.

    Attributes:
        spike: The spike, in the texts that found it.
        reported: The same spike in the other texts; in the same texts, if those do not have its place.
        needs: What it needs.
        like: Number of an earlier spike that it repeats at another place. None: it repeats none.
    """

    spike: Spike
    reported: Spike
    needs: Needs
    like: int | None = None

    @property
    def place(self) -> Place:
        """Its place in the texts that found it."""
        return self.spike.place

    @property
    def needed_neurons(self) -> tuple[Neuron, ...]:
        """The neurons of the smallest set found."""
        return tuple(part for part in self.needs.needed if isinstance(part, Neuron))

    @property
    def calibrated(self) -> dict[Neuron, float]:
        """The neurons that write it, by what their removal does, with the median of each on ordinary text."""
        values: dict[Neuron, float] = {}
        for unit in self.needs.writers.units:
            if self.needs.role(unit) in WRITES:
                values |= {neuron: self.needs.writers.neurons[neuron].get("neutral") for neuron in unit}
        return values

    @property
    def writers(self) -> tuple[Neuron, ...]:
        """The neurons that write it, by what their removal does."""
        return tuple(self.calibrated)

    @property
    def patch(self) -> SinkPatch:
        """The patch of all its writers, which holds the median that each has on ordinary text."""
        return SinkPatch(sites=self.writers, calibrated=self.calibrated)

    @property
    def first_writer(self) -> int:
        """The layer of the first neuron or component that it needs; if it needs none, the first layer of its run."""
        return min((part.layer or 0 for part in self.needs.needed), default=self.spike.layers[0])

    def asked_in(self, report: Survey) -> bool:
        """Return whether it is asked what makes the place: a first token's, in texts that did not find it."""
        return self.place.is_first and self.like is None and self.reported.survey is report

    @cached_property
    def texts(self) -> SpikeTexts:
        """The texts of the report that have its place."""
        return SpikeTexts.of(self.reported)

    @property
    def heads(self) -> int:
        """Heads that attend to the place in the layers that read it, as `count_readers` counts them."""
        return int((self.texts.attention.double().mean(-1) > READS).sum())
