"""Step 3, the needs: the smallest set that a spike needs, and what the removal of each candidate does.

1. Search the smallest set of candidates without which less than a quarter of the spike is left. If there is none, ask
   which neurons take over when the candidates are gone, then try components.
2. Remove each candidate alone: what lowers the spike is a writer, what raises it or lowers another spike more is not.

Neurons are zeroed at the place alone, equal neurons as one.

Controls of what the needed neurons do are sets of other neurons that write as much:

1. The busiest other neurons of the same layers: the largest mean written norm first, until they write as much as the
   neurons that are compared, in norm. So a neuron that is split into many does not enlarge the control.
2. Random sets of other neurons of these layers that write as much.
3. More than two thirds of a layer are the layer, and no control: then the busiest others in equal number stand instead,
   with the share that they write.

A draw goes by an order that is measured, so that it is the same however a model numbers its parts. Norms are rounded
for it, because their last digits differ by machine.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations
from math import inf

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.hooks.edit.base import under
from sinkscope.models.arithmetic import product
from sinkscope.models.draws import draws
from sinkscope.models.neurons import LayerView, columns, neuron_at, number_of, view_layer
from sinkscope.models.target import Target
from sinkscope.results.notation import Component, Neuron, count_of, percent
from sinkscope.sinks.spikes.edited import left_of
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.survey import Survey, rows_at_once
from sinkscope.sinks.spikes.tables import Done, Role, writes_enough
from sinkscope.sinks.spikes.writers import (
    Unit,
    components,
    components_of,
    of_layer,
    shares_on,
    writers_of,
    writing_of,
)
from sinkscope.sinks.thresholds import COUNTS, LIKE, NAMED, REMOVED

BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
PAIRED = 4  # components that are tried in pairs
PREFIXES = 16  # the first units of an order are tried as sets of 1, 2, ... 16
FEW = 4  # texts in which a set is searched
RANDOM_SETS = 12  # random sets of heads; other components
EQUAL_SETS = 8  # random sets of neurons that write as much, each read in a text of its own
MOST = 2 / 3  # share of a layer's neurons that may be a control
Sets = dict[tuple[Neuron, ...], float]
"""Sets of neurons, each with what it writes, of what the needed ones write."""
DIGITS = 1e-3  # relative differences of norms below this decide no order


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
    smallest = tuple[Unit, ...]()
    least = inf, inf
    for order in ([*left_of(spike, members)], sorted(members, key=shares.__getitem__, reverse=True)):
        sets = dict[Unit, tuple[Unit, ...]]()
        for length in (*range(1, PREFIXES + 1), *range(2 * PREFIXES, len(order), PREFIXES), len(order)):
            some = tuple(order[:length])
            sets[tuple(chain(*some))] = some
        units = tuple[Unit, ...]()
        share = 1.0
        left = left_of(spike, [*sets])
        for neurons, some in reversed(sets.items()):
            if abs(left[neurons][0]) < REMOVED:
                units = some
                share = abs(left[neurons][0])
        while len(units) > 1:  # drop the unit that adds least
            fewer = dict[Unit, tuple[Unit, ...]]()
            for some in combinations(units, len(units) - 1):
                fewer[tuple(chain(*some))] = some
            neurons, (left,) = next(iter(left_of(spike, [*fewer]).items()))
            if abs(left) >= REMOVED:
                break
            units = fewer[neurons]
            share = abs(left)
        if units and (len(units), share) < least:
            smallest = units
            least = len(units), share
    return smallest


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


# --- controls ---


@torch.no_grad()
def equal_sets(survey: Survey, units: Sequence[Unit], excluded: Iterable[Neuron], seed: int) -> dict[Done, Sets]:
    """Choose other neurons that write as much, or as near to it as their layers come, in each MLP or expert apart.

    Args:
        survey: The survey, whose texts tell what neurons write.
        units: The neurons that are compared.
        excluded: Neurons that are no controls: all candidates.
        seed: Seed of the random sets.

    Returns:
        Those that write most, in norm, and random sets, each with its mean written norm over that of the neurons that
        are compared. Where more than two thirds of a layer's neurons would be needed for that: those that write most,
        as many as are compared. None if no other neuron writes anything.
    """
    groups: dict[tuple[int, int | None], list[Unit]] = {}
    for unit in units:
        groups.setdefault((unit[0].layer, unit[0].expert), []).append(unit)
    drawn: dict[int, list[Neuron]] = defaultdict(list)
    sizes: dict[int, float] = defaultdict(float)
    as_many: list[Neuron] = []
    size = 0.0
    whole = 0.0
    enough = True
    for (layer, expert), own in groups.items():
        norms, total = written_norms(survey, layer, own)
        first = number_of(survey.target, Neuron(layer, expert, 0))
        width = survey.target.width(layer, expert)
        whole = whole + total
        most = int(MOST * width)
        free = norms[first : first + width] > 0
        for neuron in excluded:
            if (neuron.layer, neuron.expert) == (layer, expert):
                free[neuron.neuron] = False
        pool = by_norm(first + free.nonzero().flatten(), norms)
        for draw in range(1 + EQUAL_SETS if len(pool) else 0):
            order = pool
            if draw:
                generator = draws(seed, f"neurons of equal norm, layer {layer}, draw {draw}")
                order = pool[torch.randperm(len(pool), generator=generator)]
            count = 1 + int((norms[order].cumsum(0) - total).abs().argmin())  # as near to it as these come
            enough &= count <= most
            members = order[: min(count, most)]
            sizes[draw] += float(norms[members].sum())
            for number in members.tolist():
                drawn[draw].append(Neuron(layer, expert, number - first))
        for number in pool[: sum(map(len, own))].tolist():
            as_many.append(Neuron(layer, expert, number - first))
            size += float(norms[number])
    if not whole or not as_many:
        return {}
    if not enough:
        return {Done.AS_MANY: {tuple(as_many): size / whole}}
    known: set[frozenset[Neuron]] = set()
    equal: dict[Done, Sets] = {}
    for draw, members in drawn.items():
        if frozenset(members) not in known:  # equal sets count once
            known.add(frozenset(members))
            done = Done.RANDOM if draw else Done.BUSIEST
            equal.setdefault(done, {})[tuple(members)] = sizes[draw] / whole
    return equal


def by_norm(numbers: Int[Tensor, " some"], norms: Float[Tensor, " neuron"]) -> Int[Tensor, " some"]:
    """Order neurons by what they write, largest norm first; those whose rounded norms are equal, by their numbers.

    Args:
        numbers: Numbers of neurons that write something, in ascending order.
        norms: What each neuron writes.
    """
    steps = (norms[numbers].double().log() / DIGITS).round()
    return numbers[steps.argsort(descending=True, stable=True)]


@torch.no_grad()
def written_norms(survey: Survey, layer: int, units: Sequence[Unit]) -> tuple[Float[Tensor, " neuron"], float]:
    """Return the norm of what each neuron of a layer writes, mean over all tokens, and that of units, each as a vector.

    Args:
        survey: Its texts are read, as many as memory allows.
        layer: The layer.
        units: Units of the layer; their norms are summed.
    """
    target = survey.target
    texts = survey.ids[: rows_at_once(survey.ids.shape[1], target.d_mlp * max(1, target.n_experts(layer)))]
    where = torch.ones_like(texts, dtype=torch.bool)
    rows = slice(0, len(texts))
    view = view_layer(target, layer, texts, where, survey.start(layer, rows))
    gain, scale = writing_of(target, view, survey.mlp[layer][rows][where])
    total = 0.0
    for unit in units:
        numbers = list[int]()
        for neuron in unit:
            numbers.append(number_of(target, neuron))
        written = columns(target, layer, torch.tensor(numbers)).cpu() * gain
        vectors = product(view.post.cpu()[:, numbers] * scale, written)
        total += float(vectors.norm(dim=1).mean())
    return norms_of(target, view, gain, scale), total


def norms_of(target: Target, view: LayerView, gain: Tensor, scale: Tensor) -> Float[Tensor, " neuron"]:
    """Return the norm of what each neuron of a layer writes, mean over its positions.

    Args:
        target: The model.
        view: The layer.
        gain: Factor of each dimension.
        scale: Factor of each position.
    """
    norms = (view.post.abs().cpu() * scale).mean(0)
    every = torch.arange(view.post.shape[1])
    for some in every.split(1024):
        norms[some] *= (columns(target, view.layer, some).cpu() * gain).norm(dim=1)
    return norms


@dataclass(frozen=True)
class OtherNeurons:
    """Other neurons of the same layers, with which some neurons are compared.

    Attributes:
        neurons: The neurons: those that write most, as many as write as much together.
        norm: The norm of what they write, over that of the neurons that are compared.
        as_many: Whether no others write as much, and these are only as many.
    """

    neurons: tuple[Neuron, ...]
    norm: float
    as_many: bool

    @property
    def is_fair(self) -> bool:
        """Whether they write enough to be compared with."""
        return writes_enough(self.norm, as_many=self.as_many)

    @property
    def words(self) -> str:
        """What they are: "580 other neurons of these layers, which write as much"."""
        verb = "writes" if len(self.neurons) == 1 else "write"
        much = f"which {verb} as much"
        if self.as_many:
            much = f"the busiest, which {verb} {percent(self.norm)} as much"
        return f"{count_of(len(self.neurons), 'other neuron')} of these layers, {much}"


def other_neurons(
    survey: Survey, neurons: Sequence[Neuron], excluded: Iterable[Neuron], seed: int
) -> OtherNeurons | None:
    """Choose the control of some neurons, as `equal_sets` does: the busiest others. None: no other writes anything.

    Args:
        survey: The survey, whose texts tell what neurons write.
        neurons: The neurons that are compared.
        excluded: Neurons that are no controls, beside these.
        seed: Seed of the random sets.
    """
    sets = equal_sets(survey, [(neuron,) for neuron in neurons], {*neurons, *excluded}, seed)
    for done in (Done.BUSIEST, Done.AS_MANY):
        for members, norm in sets.get(done, {}).items():
            return OtherNeurons(members, norm, done is Done.AS_MANY)
    return None


def other_components(order: Sequence[Component], needed: Parts) -> list[Parts]:
    """Return other components, each alone, the strongest first: of the same kinds, if there are such.

    The embedding is left out, because everything is computed from it.

    Args:
        order: Components, strongest effect first.
        needed: The components that are needed.
    """
    others = [part for part in order if part not in needed and part.layer is not None]
    kinds = {part.kind for part in needed if isinstance(part, Component)}
    alike = [part for part in others if part.kind in kinds] or others
    return [(part,) for part in alike[:RANDOM_SETS]]
