"""Step 3, the needs: the smallest set that a spike needs, and what the removal of each candidate does.

1. Search the smallest set of candidates without which less than a quarter of the spike is left. If there is none, ask
   which neurons take over when the candidates are gone, then try components.
2. Remove each candidate alone: what lowers the spike is a writer, what raises it or lowers another spike more is not.

Neurons are zeroed at the place alone, equal neurons as one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from math import inf

import torch

from sinkscope.hooks.edit import Ablate
from sinkscope.hooks.edit.base import under
from sinkscope.models.arithmetic import product
from sinkscope.models.neurons import neuron_at
from sinkscope.results.notation import Component, Neuron
from sinkscope.sinks.spikes.edited import left_of
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.tables import Role
from sinkscope.sinks.spikes.writers import (
    Unit,
    components,
    components_of,
    of_layer,
    shares_on,
    writers_of,
)
from sinkscope.sinks.thresholds import COUNTS, LIKE, NAMED, REMOVED

BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
PAIRED = 4  # components that are tried in pairs
PREFIXES = 16  # the first units of an order are tried as sets of 1, 2, ... 16
FEW = 4  # texts in which a set is searched


@dataclass(frozen=True, eq=False)
class Needs:
    """What a spike needs.

    Attributes:
        shares: What each candidate writes of the spike; of backups 0.
        neutral: The median of each at ordinary positions.
        needed: The smallest set found that leaves less than a quarter of the spike; empty if there is none.
        units: The needed neurons, equal ones together.
        backups: Neurons that write only when others are gone.
        alone: What is left of the spike, and of the other spikes, without each unit; strongest effect first.
        order: Components, strongest effect first, if no neurons are enough.
    """

    shares: Mapping[Unit, float]
    neutral: Mapping[Neuron, float]
    needed: Parts
    units: tuple[Unit, ...] = ()
    backups: tuple[Neuron, ...] = ()
    alone: Mapping[Unit, Sequence[float]] = field(default_factory=dict)
    order: tuple[Component, ...] = ()

    def role(self, unit: Unit) -> Role:
        """Return what the removal of a unit does."""
        left, *others = self.alone[unit]
        if unit[0] in self.needed:
            return Role.NEEDED
        if unit[0] in self.backups:
            return Role.BACKUP
        if 1 - min(others, default=1) >= max(COUNTS, 1 - left):
            return Role.OTHER_SPIKE
        if abs(1 - left) < NAMED:
            return Role.NOTHING
        return Role.LOWERS if left < 1 else Role.RAISES


@torch.no_grad()
def needs_of(spike: Spike, others: Sequence[Spike]) -> Needs:
    """Search the smallest set that a spike needs, and remove each candidate alone.

    The search goes on with backups while no set is enough. Neurons that write against the spike are members only if no
    set is enough without them. Where no neurons are enough, components are replaced by their mean over ordinary
    positions, alone and in pairs.

    Args:
        spike: The spike.
        others: Other spikes of the same survey, of which is measured what is left.
    """
    shares, neutral = writers_of(spike)
    members = list[Unit]()
    for unit, share in shares.items():
        if share > 0:
            members.append(unit)
    most = spike.place.mask[spike.texts].sum(1).argsort(descending=True, stable=True)
    few = spike.within(spike.texts[most[:FEW]])  # the first texts that have the place most often
    units = tuple[Unit, ...]()
    backups = list[Neuron]()
    for _ in range(BACKUPS + 1):
        units = smallest_set(few, members, shares)
        fresh = [] if units or not members else taking_over(spike, [*chain(*shares)])
        if not fresh:
            break
        backups += fresh
        for neuron in fresh:
            members.append((neuron,))
            shares[(neuron,)] = 0.0
    if not units and len(members) < len(shares):
        units = smallest_set(few, [*shares], shares)
    for neuron, (_, median) in shares_on(spike, backups).items():
        neutral[neuron] = median
    alone = left_of(spike, [*shares], others)
    needs = Needs(shares, neutral, tuple(chain(*units)), units, tuple(backups), alone)
    return needs if units else replace(needs, **components_needed(spike))


@torch.no_grad()
def like_needs(spike: Spike, other: Spike, needs: Needs) -> Needs | None:
    """Return what another spike needs, if this is the same spike at another place; else None.

    Both have one direction, and one set of neurons removes them.

    Args:
        spike: The spike.
        other: The other spike.
        needs: What the other spike needs.
    """
    own = spike.layers
    known = other.layers
    likeness = float(product(spike.direction, other.direction))
    if not needs.units or own[0] > known[1] or known[0] > own[1] or likeness < LIKE:
        return None
    (left,) = left_of(spike, [needs.needed])[needs.needed]
    return replace(needs, alone=left_of(spike, [*needs.shares])) if abs(left) < REMOVED else None


# --- the search ---


def smallest_set(spike: Spike, members: Sequence[Unit], shares: Mapping[Unit, float]) -> tuple[Unit, ...]:
    """Return the smallest set of units that leaves less than a quarter of the spike; it is empty if none does.

    Units are added, strongest effect first, until less than a quarter is left; then members that are not needed are
    dropped. The same is done with the largest share first. The smaller set wins, and a tie goes to the set that leaves
    least.

    Args:
        spike: The spike.
        members: The units.
        shares: What each writes; a backup writes nothing.
    """
    if not members:
        return ()
    by_effect = [*left_of(spike, members)]
    by_share = sorted(members, key=shares.__getitem__, reverse=True)
    smallest = tuple[Unit, ...]()
    least = inf, inf
    for order in (by_effect, by_share):
        units, share = first_units(spike, order)
        units, share = without_dispensable(spike, units, share)
        if units and (len(units), share) < least:
            smallest = units
            least = len(units), share
    return smallest


def first_units(spike: Spike, order: Sequence[Unit]) -> tuple[tuple[Unit, ...], float]:
    """Return the fewest first units of an order that leave less than a quarter, and what is left; none if none do."""
    sets = dict[Unit, tuple[Unit, ...]]()
    for length in (*range(1, PREFIXES + 1), *range(2 * PREFIXES, len(order), PREFIXES), len(order)):
        units = tuple(order[:length])
        sets[tuple(chain(*units))] = units
    left = left_of(spike, [*sets])
    for neurons, units in sets.items():
        share = abs(left[neurons][0])
        if share < REMOVED:
            return units, share
    return (), 1.0


def without_dispensable(spike: Spike, units: tuple[Unit, ...], share: float) -> tuple[tuple[Unit, ...], float]:
    """Drop the unit that adds least, again and again, while less than a quarter is left; return what is left, too."""
    while len(units) > 1:
        fewer_units = dict[Unit, tuple[Unit, ...]]()
        for subset in combinations(units, len(units) - 1):
            fewer_units[tuple(chain(*subset))] = subset
        neurons, (left,) = next(iter(left_of(spike, [*fewer_units]).items()))
        if abs(left) >= REMOVED:
            break
        units = fewer_units[neurons]
        share = abs(left)
    return units, share


def taking_over(spike: Spike, members: Sequence[Neuron]) -> list[Neuron]:
    """Return at most two backups: neurons that write the spike only when its writers are gone."""
    target = spike.survey.target
    backups = dict[Neuron, float]()
    with under(Ablate(sites=tuple(members)), target):
        for layer in [layer for layer in target.with_neurons if layer <= spike.peak]:
            shares = of_layer(spike, layer).shares.mean(1)
            for number in shares.topk(min(4, len(shares))).indices.tolist():
                neuron = neuron_at(target, layer, number)
                if neuron not in members and float(shares[number]) >= COUNTS:
                    backups[neuron] = float(shares[number])
    return sorted(backups, key=lambda neuron: -backups[neuron])[:2]


def components_needed(spike: Spike) -> dict[str, Parts]:
    """Return one component or a pair without which less than a quarter is left, largest writers first, or none; and
    all components, strongest effect first.
    """
    left = left_of(spike, [(part,) for part in components(spike.survey.target, spike.peak)])
    order = [*left]
    needed = Parts()
    writing, _ = components_of(spike)
    writers = [(row.key,) for row in writing if abs(row.share.value) >= COUNTS]
    for alone in [*writers, order[0]]:
        if not needed and abs(left[alone][0]) < REMOVED:
            needed = alone
    if not needed:
        pairs = combinations(dict.fromkeys([*writers[:PAIRED], *order[:PAIRED]]), 2)
        for pair, (share,) in left_of(spike, [(*one, *other) for one, other in pairs]).items():
            if not needed and abs(share) < REMOVED:
                needed = pair
    return {"needed": needed, "order": tuple(chain(*order))}
