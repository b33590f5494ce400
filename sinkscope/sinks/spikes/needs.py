"""Step 4, the needs: what is left of a spike, of the heads that attend there, and of the loss without its writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import torch

from sinkscope.hooks.edit import Ablate
from sinkscope.results.claims import Claim, Claims, Contrast, Outcome, SearchSpace
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.components import components
from sinkscope.sinks.spikes.controls import INTACT, RANDOM_SETS, chance_of, random_components, random_neurons
from sinkscope.sinks.spikes.edited import Written
from sinkscope.sinks.spikes.records import Alone, Needed, NeuronShare, PartShare, part_name
from sinkscope.sinks.spikes.removal import Removal, count_readers, removals_of
from sinkscope.sinks.spikes.spike import Measured, Part, Parts
from sinkscope.sinks.spikes.texts import SpikeTexts, means_of
from sinkscope.sinks.spikes.writers import neutral_values, of_layer
from sinkscope.sinks.thresholds import COUNTS, LIKE, REMOVED

BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
PAIRED = 4  # components that are tried in pairs


@torch.no_grad()
def needs_of(one: Measured, seed: int = 0) -> Measured:
    """Remove the writers of a spike: each alone, then together in the order of what that did, beside random ones.

    Where no neurons are enough, components are replaced by their mean over ordinary positions, alone and in pairs.

    Args:
        one: The spike, with its writers.
        seed: Seed of the random neurons.
    """
    texts, target = SpikeTexts.of(one.survey, one.spike), one.survey.target
    writing = [neuron.address for neuron in one.result.neurons]
    neurons, left = search(texts, writing)
    needed, random, means = neurons, list[Parts](), dict[Part, torch.Tensor]()
    if neurons:
        random += [random_neurons(target, neurons, seed, number, list(left)) for number in range(RANDOM_SETS)]
    else:
        parts = components(target, one.spike.peak)
        means = means_of(one.survey, one.spike, parts)
        needed = enough_components(texts, one.result.writers, means)
        if needed:
            random = random_components(parts, needed)
    alone: list[Neuron] = []
    for neuron, share in left.items():
        if (neuron,) != needed and (neuron in needed or abs(1 - share) >= COUNTS):
            alone.append(neuron)
    removals = removals_of(texts, [needed] if needed else [], means, every_loss=True)
    beside = removals_of(texts, [*random, *((neuron,) for neuron in alone)], means, every_loss=False)
    singles = list(zip(alone, beside[len(random) :], strict=True))
    if len(neurons) == 1:
        singles.insert(0, (neurons[0], removals[0]))
    shares = {neuron.address: neuron.share for neuron in one.result.neurons}
    records: list[Alone] = []
    for neuron, removal in singles:
        outcomes = removal.left, removal.heads, removal.perplexity, shares.get(neuron, 0.0)
        records.append(Alone(neuron.layer, neuron.expert, neuron.neuron, *outcomes))
    one = one.adding(alone=tuple(records), backups=tuple(neuron for neuron in left if neuron not in writing))
    return with_needs(one, texts, next(iter(removals), None), beside[: len(random)])


@torch.no_grad()
def same_needs(one: Measured, other: Measured, number: int, seed: int = 0) -> Measured | None:
    """Remove what another spike needs, if this is the same at another place: of one direction, removed by one set.

    Args:
        one: The spike.
        other: The other one, with what it needs.
        number: Number of the other one.
        seed: Seed of the random neurons.
    """
    spike, known, neurons = one.spike, other.spike, other.needed_neurons
    if not neurons or spike.first > known.last or known.first > spike.last:
        return None
    if other.result.like is not None or float(spike.direction @ known.direction) < LIKE:
        return None
    texts = SpikeTexts.of(one.survey, spike)
    if left_without(texts, [neurons])[0] >= REMOVED:
        return None
    random = random_neurons(one.survey.target, neurons, seed)
    removals = removals_of(texts, [neurons], every_loss=True)
    return with_needs(one.adding(like=number), texts, removals[0], removals_of(texts, [random], every_loss=False))


# --- the search ---


def left_without(texts: SpikeTexts, sets: Sequence[Parts], means: Written | None = None) -> list[float]:
    """Return how far what is left of the spike without each set is from nothing."""
    return texts.along(sets, means).mean(1).abs().tolist()


def search(texts: SpikeTexts, writing: Sequence[Neuron]) -> tuple[tuple[Neuron, ...], dict[Neuron, float]]:
    """Find the smallest set that leaves less than a quarter, of the neurons that write the spike and their backups.

    Args:
        texts: The texts.
        writing: The neurons that write it.

    Returns:
        The set, empty if there is none; and what is left without each neuron alone, those of the least first.
    """
    members, needed, left = list(writing), tuple[Neuron, ...](), dict[Neuron, float]()
    for _ in range(BACKUPS + 1):
        if not members:
            break
        alone = dict(zip(members, texts.along([(member,) for member in members]).mean(1).tolist(), strict=True))
        left = dict(sorted(alone.items(), key=lambda item: abs(item[1])))
        needed = smallest_set(texts, tuple(left))
        fresh = [] if needed else taking_over(texts, members)
        if not fresh:
            break
        members += fresh
    return needed, left


def smallest_set(texts: SpikeTexts, order: tuple[Neuron, ...]) -> tuple[Neuron, ...]:
    """Return the smallest set of neurons that leaves less than a quarter of the spike; it is empty if none does.

    A neuron joins if without it and those before less is left. Where that is not enough, because some write only when
    several others are gone, all are tried. Then members are left out that are not needed.

    Args:
        texts: The texts.
        order: The neurons, those without which least is left first.
    """
    best, least = order[:1], left_without(texts, [order[:1]])[0]
    for neuron in order[1:]:
        if least < REMOVED:
            break
        left = left_without(texts, [(*best, neuron)])[0]
        if left < least:
            best, least = (*best, neuron), left
    if least >= REMOVED:
        best, least = order, left_without(texts, [order])[0]
    while least < REMOVED and len(best) > 1:
        fewer = list(combinations(best, len(best) - 1))
        left = left_without(texts, fewer)
        if min(left) >= REMOVED:
            return best
        best = fewer[left.index(min(left))]
    return best if least < REMOVED else ()


def taking_over(texts: SpikeTexts, members: Sequence[Neuron]) -> list[Neuron]:
    """Return who writes the spike when its writers are gone, at most two: a backup fires only then."""
    target, spike, found = texts.survey.target, texts.spike, list[NeuronShare]()
    with Ablate(sites=tuple(members)).on(target):
        for layer in filter(target.has_neurons, range(spike.peak + 1)):
            found += of_layer(texts.survey, spike, layer)
    found.sort(key=lambda one: -one.share)
    return [one.address for one in found if one.address not in members and one.share >= COUNTS][:2]


def enough_components(texts: SpikeTexts, writers: Sequence[PartShare], means: Written) -> Parts:
    """Return a component, or else a pair, without which less than a quarter is left; those that write come first.

    Args:
        texts: The texts.
        writers: Shares of components.
        means: What each component writes instead.
    """
    left = dict(zip(means, left_without(texts, [(part,) for part in means], means), strict=True))
    names = {part_name(part): part for part in means}
    writing = [names[one.part] for one in writers if abs(one.share) >= COUNTS]
    order = sorted(left, key=lambda part: left[part])
    for part in [*writing, order[0]]:
        if left[part] < REMOVED:
            return (part,)
    pairs = list(combinations(dict.fromkeys([*writing[:PAIRED], *order[:PAIRED]]), 2))
    if not pairs:
        return ()
    of_pairs = left_without(texts, pairs, means)
    return pairs[of_pairs.index(min(of_pairs))] if min(of_pairs) < REMOVED else ()


# --- records ---


def with_needs(one: Measured, texts: SpikeTexts, removal: Removal | None, random: Sequence[Removal]) -> Measured:
    """Add what a spike needs, and the heads that attend to its place.

    Args:
        one: The spike.
        texts: Texts in which removals were tried.
        removal: What is left without the needed set. None: no set that was tried is enough.
        random: What is left without random sets.
    """
    heads, margin = count_readers(texts.attention)
    one = one.adding(heads=heads)
    if removal is None:
        return one
    neurons = tuple(part for part in removal.parts if isinstance(part, Neuron))
    neutral = neutral_values(one.survey, one.spike.ordinary, neurons)
    needed = Needed(
        neurons=neurons,
        neutral=tuple(neutral[neuron] for neuron in neurons),
        parts=tuple(map(part_name, removal.parts)),
        left=removal.left,
        left_margin=removal.left_margin,
        heads=(heads, removal.heads),
        heads_margin=(margin, removal.heads_margin),
        attention=removal.attention,
        perplexity=removal.perplexity,
        perplexity_margin=removal.perplexity_margin,
        random=chance_of(random, removal),
        texts=len(texts.rows),
    )
    one = one.adding(needed=needed)
    return replace(one, claims=claims_of(one, removal, random))


def claims_of(one: Measured, removal: Removal, random: Sequence[Removal]) -> Claims:
    """The typed claims about what a spike needs: what is left of it, and of the attention of the heads that read it."""
    spike, result = one.spike, one.result
    if not random:
        return ()
    of_spike = Outcome("spike", tuple(range(spike.first, spike.last + 1)))
    sides = [("makes", of_spike, removal.left, min(each.left for each in random), removal.left_margin)]
    if result.heads:
        of_heads = Outcome("attention", tuple(spike.reading_layers))
        sides.append(("carries", of_heads, removal.attention, min(each.attention for each in random), None))
    name = "" if len(one.needed_neurons) == len(one.needed) else "other components, each alone"
    claims: list[Claim] = []
    for role, outcome, left, chance, margin in sides:
        claim = Claim(
            role=role,
            subject=removal.parts,
            outcome=outcome,
            place=spike.place.words,
            value=left,
            contrasts=(INTACT, Contrast("random", chance, len(random), name)),
            draws=result.needed.texts if result.needed else 0,
            search=SearchSpace("neurons alone", len(result.alone)),
            margin=margin,
        )
        claims.append(claim)
    return tuple(claims)
