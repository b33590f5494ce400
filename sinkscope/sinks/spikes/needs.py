"""Step 4, the needs: what is left of a spike, of the heads that attend there, and of the loss without its writers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Neuron
from sinkscope.sinks.spikes.components import components
from sinkscope.sinks.spikes.controls import random_neurons
from sinkscope.sinks.spikes.spike import Needs, Part, Parts, Removal, Share, Spike
from sinkscope.sinks.spikes.survey import READS, Survey
from sinkscope.sinks.spikes.texts import SpikeTexts, means_of
from sinkscope.sinks.spikes.writers import of_layer

LEFT = 0.25  # share of a spike below which it counts as removed
RANDOM_SETS = 3  # random sets beside the needed one
BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
TAKES_OVER = 0.1  # share of the intact spike that a backup writes then
WRITES = 0.1  # share of a component from which it is tried in pairs
PAIRED = 4  # components that are tried in pairs
CHANGES = 0.1  # share by which a neuron alone changes the spike, from which all its outcomes are measured
LIKE = 0.9  # cosine from which two spikes have the same direction


@dataclass(frozen=True)
class Found:
    """The result of the search for a set of neurons.

    Attributes:
        needed: The smallest set found that leaves less than a quarter; empty if none does.
        order: All that were tried alone, those without which least is left first.
        left: What is left without each of them.
        backups: Those that write the spike only when others are gone.
    """

    needed: tuple[Neuron, ...] = ()
    order: tuple[Neuron, ...] = ()
    left: tuple[float, ...] = ()
    backups: tuple[Neuron, ...] = ()


@torch.no_grad()
def needs_of(survey: Survey, spike: Spike, writers: Sequence[Share], neurons: Sequence[Share], seed: int = 0) -> Needs:
    """Remove the writers of a spike: each alone, then together in the order of what that did, beside random ones.

    Where no neurons are enough, components are replaced by their mean over ordinary positions, alone and in pairs. Of a
    spike that no head reads and that is not at the first token, only what is left of it is measured.

    Args:
        survey: The survey.
        spike: The spike.
        writers: Shares of components.
        neurons: Shares of neurons.
        seed: Seed of the random neurons.
    """
    texts = SpikeTexts.of(survey, spike)
    found = search(texts, [one.part for one in neurons if isinstance(one.part, Neuron)])
    needed: Parts = found.needed
    random, means = list[Parts](), dict[Part, Tensor]()
    if found.needed:
        for number in range(RANDOM_SETS):
            random.append(random_neurons(survey.target, found.needed, seed, number, found.order))
    else:
        parts = components(survey.target, spike.peak)
        means = means_of(survey, spike, parts)
        needed = enough_components(texts, writers, means)
        if needed:
            others = [part for part in parts if part not in needed]
            random += [(part,) for part in others[:: max(1, len(others) // RANDOM_SETS)][:RANDOM_SETS]]
    alone: list[Parts] = []
    for neuron, left in zip(found.order, found.left, strict=True):
        if (neuron,) != needed and (neuron in needed or abs(1 - left) >= CHANGES):
            alone.append((neuron,))
    removals = measured(texts, [needed] if needed else [], means, every_loss=True)
    beside = measured(texts, [*random, *alone], means, every_loss=False)
    random_left, singles = beside[: len(random)], beside[len(random) :]
    if len(needed) == 1 and isinstance(needed[0], Neuron):
        singles.insert(0, removals[0])
    heads, margin = count_readers(texts.attention)
    return Needs(
        heads=heads,
        heads_margin=margin,
        texts=len(texts.rows),
        needed=next(iter(removals), None),
        random=tuple(random_left),
        alone=tuple(singles),
        backups=found.backups,
    )


@torch.no_grad()
def same_needs(survey: Survey, spike: Spike, other: Spike, needs: Needs, seed: int = 0) -> Needs | None:
    """Return what a spike needs, if it is another one at another place: of the same direction, removed by the same set.

    Args:
        survey: The survey.
        spike: The spike.
        other: The other one.
        needs: What that needs.
        seed: Seed of the random neurons.
    """
    if needs.needed is None or spike.first > other.last or other.first > spike.last:
        return None
    parts = needs.needed.parts
    neurons = tuple(part for part in parts if isinstance(part, Neuron))
    if len(neurons) < len(parts) or float(spike.direction @ other.direction) < LIKE:
        return None
    texts = SpikeTexts.of(survey, spike)
    if abs(float(texts.along([parts]).mean())) >= LEFT:
        return None
    random = random_neurons(survey.target, neurons, seed)
    (removal,), beside = measured(texts, [parts], {}, every_loss=True), measured(texts, [random], {}, every_loss=False)
    heads, margin = count_readers(texts.attention)
    return Needs(heads, margin, len(texts.rows), removal, tuple(beside))


# --- the search ---


def search(texts: SpikeTexts, neurons: Sequence[Neuron]) -> Found:
    """The smallest set of neurons that leaves less than a quarter, of those that write the spike and their backups."""
    members, backups = list(neurons), list[Neuron]()
    found = Found()
    for _ in range(BACKUPS + 1):
        if not members:
            return found
        left = texts.along([(member,) for member in members]).mean(1)
        by_left = left.abs().argsort(stable=True).tolist()
        order = tuple(members[number] for number in by_left)
        needed = smallest_set(texts, order)
        found = Found(needed, order, tuple(left[by_left].tolist()), tuple(backups))
        fresh = () if needed else taking_over(texts, members)
        if not fresh:
            return found
        backups += fresh
        members += fresh
    return found


def smallest_set(texts: SpikeTexts, order: Sequence[Neuron]) -> tuple[Neuron, ...]:
    """Return the smallest set of neurons that leaves less than a quarter of the spike; it is empty if none does.

    A neuron joins if without it and those before less is left; then members are left out that are not needed.

    Args:
        texts: The texts.
        order: The neurons, those without which least is left first.
    """
    best, least = (order[0],), abs(float(texts.along([(order[0],)]).mean()))
    for neuron in order[1:]:
        if least < LEFT:
            break
        left = abs(float(texts.along([(*best, neuron)]).mean()))
        if left < least:
            best, least = (*best, neuron), left
    if least >= LEFT:
        return ()
    while len(best) > 1:
        fewer = [best[:number] + best[number + 1 :] for number in range(len(best))]
        left = texts.along(list(fewer)).mean(1).abs()
        if float(left.min()) >= LEFT:
            break
        best = fewer[int(left.argmin())]
    return best


def taking_over(texts: SpikeTexts, members: Sequence[Neuron]) -> list[Neuron]:
    """Return who writes the spike when its writers are gone, at most two: a backup fires only then."""
    found: list[Share] = []
    target, spike = texts.survey.target, texts.spike
    with Ablate(sites=tuple(members)).on(target):
        for layer in filter(target.has_neurons, range(spike.peak + 1)):
            found += of_layer(texts.survey, spike, layer)
    found.sort(key=lambda one: -one.share)
    fresh: list[Neuron] = []
    for one in found:
        if isinstance(one.part, Neuron) and one.part not in members and one.share >= TAKES_OVER:
            fresh.append(one.part)
    return fresh[:2]


def enough_components(texts: SpikeTexts, writers: Sequence[Share], means: dict[Part, Tensor]) -> Parts:
    """Return a component, or else a pair, without which less than a quarter is left; those that write come first.

    Args:
        texts: The texts.
        writers: Shares of components.
        means: What each component writes instead.
    """
    parts, writing = list(means), [one.part for one in writers if abs(one.share) >= WRITES]
    left = dict(zip(parts, texts.along([(part,) for part in parts], means).mean(1).abs().tolist(), strict=True))
    for part in [*writing, min(parts, key=lambda part: left[part])]:
        if left[part] < LEFT:
            return (part,)
    least = sorted(parts, key=lambda part: left[part])[:PAIRED]
    pairs = list(combinations(dict.fromkeys([*writing[:PAIRED], *least]), 2))
    if not pairs:
        return ()
    of_pairs = texts.along(list(pairs), means).mean(1).abs()
    return pairs[int(of_pairs.argmin())] if float(of_pairs.min()) < LEFT else ()


# --- the outcomes ---


def measured(texts: SpikeTexts, sets: Sequence[Parts], means: dict[Part, Tensor], *, every_loss: bool) -> list[Removal]:
    """Return all outcomes of removing each set.

    Of a spike elsewhere than at the first token, and without readers, only what is left is measured.
    """
    if not sets:
        return []
    before = texts.attention.mean(-1)
    readers = before > READS
    if not bool(readers.any()) and not texts.spike.place.is_first:
        return [
            Removal(parts, float(left.mean()), left_margin=margin_of(left.numpy()))
            for parts, left in zip(sets, texts.along(sets, means), strict=True)
        ]
    effects = texts.effects(sets, means, every_loss=every_loss)
    removals: list[Removal] = []
    for number, left in enumerate(texts.left(effects.along, texts.rows)):
        attention = effects.attention[number, texts.reading_layers]
        heads, heads_margin = count_readers(attention)
        rise, perplexity, spread = (effects.loss[number] - texts.loss).nanmean(1), None, None
        if bool(rise.isfinite().all()):
            perplexity, error = float(rise.mean().exp()), margin_of(rise.numpy())
            spread = None if error is None else perplexity * error
        removal = Removal(
            parts=sets[number],
            left=float(left.mean()),
            heads=heads,
            attention=float(attention.mean(-1)[readers].sum() / before[readers].sum()) if bool(readers.any()) else 1.0,
            perplexity=perplexity,
            left_margin=margin_of(left.numpy()),
            heads_margin=heads_margin,
            perplexity_margin=spread,
        )
        removals.append(removal)
    return removals


def count_readers(received: Float[Tensor, "layer head text"]) -> tuple[int, float | None]:
    """Return how many heads give more than 0.3 of their attention, mean over texts, and the margin over texts."""
    by_text = (received > READS).flatten(0, 1).sum(0).float()
    return int((received.mean(-1) > READS).sum()), margin_of(by_text.numpy())
