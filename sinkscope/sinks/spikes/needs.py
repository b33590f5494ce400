"""Step 3, the needs: the smallest set that a spike needs, and what is left of what it does without all its writers.

1. Search the smallest set of neurons without which less than a quarter of the spike is left. If there is none, ask
   which neurons take over when the writers are gone, then try components.
2. Remove each of its neurons alone.
3. Remove all neurons that write the spike or against it, beside random sets of as many neurons of the same layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import torch

from sinkscope.hooks.edit import Ablate
from sinkscope.hooks.edit.base import under
from sinkscope.measure.margin import margin_of
from sinkscope.models.neurons import expert_and_neuron
from sinkscope.results.parts import Component, Neuron
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.records import Alone, Needed, NeuronShare, PartShare
from sinkscope.sinks.spikes.removal import (
    chance_of,
    count_readers,
    ordered,
    other_components,
    random_sets,
    removals_of,
)
from sinkscope.sinks.spikes.spike import Parts, Spike
from sinkscope.sinks.spikes.writers import components, of_layer, with_backups
from sinkscope.sinks.thresholds import COUNTS, LIKE, REMOVED

BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
PAIRED = 4  # components that are tried in pairs
PREFIXES = 16  # the first neurons of an order are tried as sets of 1, 2, ... 16


@torch.no_grad()
def with_needs(spike: Spike, seed: int = 0) -> Spike:
    """Add the smallest set that a spike needs, and what is left without its members alone and without all writers.

    Where no neurons are enough, components are replaced by their mean over ordinary positions, alone and in pairs.

    Args:
        spike: The spike, with its writers.
        seed: Seed of the random neurons.
    """
    texts, target = SpikeTexts.of(spike), spike.survey.target
    needed, left, backups = search(texts, spike.result.neurons)
    spike = with_backups(spike, backups)
    removed: Parts = spike.writers
    random: Sequence[Parts] = ()
    if not needed:
        left_of_parts = texts.left([(part,) for part in components(target, spike.result.peak)])
        needed = enough_components(texts, spike.result.writers, left_of_parts)
        removed = needed or removed
        random = other_components(left_of_parts, needed) if needed else ()
    if removed and not random:
        random = random_sets(ordered(target, spike.written, spike.writers), spike.writers, seed)
    if needed:
        share = texts.along([needed])[0]
        neurons = tuple(part for part in needed if isinstance(part, Neuron))
        names = tuple(map(str, needed))
        spike = spike.adding(needed=Needed(neurons, names, float(share.mean()), margin_of(share.numpy())))
    spike = spike.adding(alone=alone_of(spike, texts, left))
    return with_effects(spike, texts, removed, random)


def alone_of(spike: Spike, texts: SpikeTexts, left: Mapping[tuple[Neuron], float]) -> tuple[Alone, ...]:
    """Remove each neuron of the needed set alone, and every other neuron whose removal changes the spike.

    Args:
        spike: The spike, with what it needs.
        texts: The texts.
        left: What is left without each writer alone, strongest effect first.
    """
    alone = [one for one, share in left.items() if one[0] in spike.needed_neurons or abs(1 - share) >= COUNTS]
    shares, records = {neuron.address: neuron.share for neuron in spike.result.neurons}, list[Alone]()
    for (neuron,), one in zip(alone, removals_of(texts, alone, every_loss=False), strict=True):
        outcomes = one.left, one.heads[1], one.perplexity, shares[neuron]
        records.append(Alone(neuron.layer, neuron.expert, neuron.neuron, *outcomes))
    return tuple(records)


@torch.no_grad()
def same_needs(spike: Spike, other: Spike, number: int, seed: int = 0) -> Spike | None:
    """Remove the writers of another spike, if this is the same spike at another place; else return None.

    Both have one direction, and one set of neurons removes them.

    Args:
        spike: The spike.
        other: The other spike, with what it needs.
        number: Number of the other spike.
        seed: Seed of the random neurons.
    """
    own, known, needed = spike.result.layers, other.result.layers, other.result.needed
    if needed is None or not needed.neurons or own[0] > known[1] or known[0] > own[1]:
        return None
    if other.result.like is not None or float(spike.direction @ other.direction) < LIKE:
        return None
    texts = SpikeTexts.of(spike)
    if abs(texts.left([other.writers])[other.writers]) >= REMOVED:
        return None
    share = texts.along([needed.neurons])[0]
    needed = replace(needed, left=float(share.mean()), left_margin=margin_of(share.numpy()))
    spike = spike.adding(like=number, needed=needed if abs(needed.left) < REMOVED else None)
    random = random_sets(ordered(spike.survey.target, other.written, other.writers), other.writers, seed)
    return with_effects(spike, texts, other.writers, random)


# --- the search ---


def search(
    texts: SpikeTexts, writers: Sequence[NeuronShare]
) -> tuple[tuple[Neuron, ...], dict[tuple[Neuron], float], list[Neuron]]:
    """Search the neurons that write the spike and their backups for the smallest set that leaves less than a quarter.

    Neurons that write against the spike are members only if no set is enough without them.

    Args:
        texts: The texts.
        writers: The neurons that write the spike or against it.

    Returns:
        The set, empty if there is none; what is left without each neuron alone, strongest effect first; and the backups
        that were found.
    """
    shares = {one.address: one.share for one in writers}
    writing = [neuron for neuron, share in shares.items() if share > 0]
    backups, few, needed = list[Neuron](), texts.few(), tuple[Neuron, ...]()
    for _ in range(BACKUPS + 1):
        members = [*writing, *backups]
        needed = smallest_set(few, members, shares)
        fresh = [] if needed or not members else taking_over(texts, [*shares, *backups])
        if not fresh:
            break
        backups += fresh
    if not needed and len(writing) < len(shares):
        needed = smallest_set(few, [*shares, *backups], shares)
    return needed, texts.left([(one,) for one in (*shares, *backups)]), backups


def smallest_set(texts: SpikeTexts, members: Sequence[Neuron], shares: Mapping[Neuron, float]) -> tuple[Neuron, ...]:
    """Return the smallest set of neurons that leaves less than a quarter of the spike; it is empty if none does.

    Neurons are added, strongest effect first, until less than a quarter is left; then members that are not needed are
    dropped. The same is done with the largest share first. The smaller set wins, and a tie goes to the set that leaves
    least.

    Args:
        texts: The texts.
        members: The neurons.
        shares: What each writes; a backup writes nothing.
    """
    alone = [one for (one,) in texts.left([(one,) for one in members])]
    found: list[tuple[int, float, tuple[Neuron, ...]]] = []
    for order in (alone, sorted(members, key=lambda one: -shares.get(one, 0.0))):
        lengths = [*range(1, min(PREFIXES, len(order)) + 1), *range(2 * PREFIXES, len(order), PREFIXES), len(order)]
        sets = [tuple(order[:length]) for length in dict.fromkeys(lengths) if length]
        left = texts.left(sets)
        enough = next((one for one in sets if abs(left[one]) < REMOVED), None)
        if enough is not None:
            found.append(pruned(texts, enough, abs(left[enough])))
    return min(found, key=lambda one: one[:2])[2] if found else ()


def pruned(texts: SpikeTexts, members: tuple[Neuron, ...], least: float) -> tuple[int, float, tuple[Neuron, ...]]:
    """Drop members, one after the other, as long as less than a quarter is left; return their number and what is left.

    Args:
        texts: The texts.
        members: The neurons.
        least: What is left without them.
    """
    while len(members) > 1:
        fewer, left = next(iter(texts.left(list(combinations(members, len(members) - 1))).items()))
        if abs(left) >= REMOVED:
            break
        members, least = fewer, abs(left)
    return len(members), least, members


def taking_over(texts: SpikeTexts, members: Sequence[Neuron]) -> list[Neuron]:
    """Return at most two backups: neurons that write the spike only when its writers are gone."""
    spike, target, found = texts.spike, texts.spike.survey.target, dict[Neuron, float]()
    with under(Ablate(sites=tuple(members)), target):
        for layer in [layer for layer in target.with_neurons if layer <= spike.result.peak]:
            shares = of_layer(spike, layer)[0].mean(1)
            for number in shares.topk(min(4, len(shares))).indices.tolist():
                neuron = Neuron(layer, *expert_and_neuron(target, layer, number))
                if neuron not in members and float(shares[number]) >= COUNTS:
                    found[neuron] = float(shares[number])
    return sorted(found, key=lambda neuron: -found[neuron])[:2]


def enough_components(texts: SpikeTexts, writers: Sequence[PartShare], left: Mapping[tuple[Component], float]) -> Parts:
    """Return one component or a pair without which less than a quarter is left, largest writers first; or none.

    Args:
        texts: The texts.
        writers: Shares of components.
        left: What is left without each component, strongest effect first.
    """
    names, order = {str(part): part for (part,) in left}, [part for (part,) in left]
    writing = [names[one.part] for one in writers if abs(one.share) >= COUNTS]
    for part in [*writing, order[0]]:
        if abs(left[(part,)]) < REMOVED:
            return (part,)
    pairs = combinations(dict.fromkeys([*writing[:PAIRED], *order[:PAIRED]]), 2)
    best, share = next(iter(texts.left(list(pairs)).items()), ((), 1.0))
    return best if abs(share) < REMOVED else ()


# --- records ---


def with_effects(spike: Spike, texts: SpikeTexts, removed: Parts, random: Sequence[Parts]) -> Spike:
    """Add the heads that attend to the place, and what is left of the spike and of these heads without some parts.

    Args:
        spike: The spike, with what it needs.
        texts: Its texts.
        removed: The parts. Empty: nothing is known that writes it.
        random: Random sets of as many others.
    """
    heads, margin = count_readers(texts.attention)
    spike = spike.adding(heads=heads, heads_margin=margin)
    if not removed:
        return spike
    (without,) = removals_of(texts, [removed], every_loss=True)
    without = replace(without, random=chance_of(texts, random, without))
    return spike.adding(without_writers=without)
