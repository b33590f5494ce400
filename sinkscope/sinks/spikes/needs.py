"""Step 4, the needs: what is left of a spike, of the heads that attend to its place, and of the loss without its writers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.hooks.edit import Ablate
from sinkscope.measure.margin import margin_of
from sinkscope.results.parts import Component, Neuron
from sinkscope.sinks.removal.search import random_neurons
from sinkscope.sinks.spikes.edited import Effects
from sinkscope.sinks.spikes.spike import Needs, Parts, Removal, Share, Spike
from sinkscope.sinks.spikes.survey import READS, Survey
from sinkscope.sinks.spikes.texts import SpikeTexts, components, means_of
from sinkscope.sinks.spikes.writers import NAMED, of_layer

LEFT = 0.25  # share of a spike below which it counts as removed
RANDOM_SETS = 3  # random sets beside the needed one
BACKUPS = 2  # rounds in which it is asked who writes the spike when its writers are gone
WRITES = 0.1  # share of a component from which it is tried alone and in pairs


@torch.no_grad()
def needs_of(
    survey: Survey, spike: Spike, writers: Sequence[Share], neurons: Sequence[Share], seed: int = 0
) -> Needs:
    """Remove the writers of a spike: each alone, then together in the order of what that did, beside random ones.

    Args:
        survey: The survey.
        spike: The spike.
        writers: Shares of components.
        neurons: Shares of neurons.
        seed: Seed of the random neurons.
    """
    texts = SpikeTexts.of(survey, spike)
    members = [one.part for one in neurons if isinstance(one.part, Neuron)]
    needed, alone, tried = (), [], ()
    backups: tuple[Neuron, ...] = ()
    for _ in range(BACKUPS + 1):
        if not members:
            break
        alone = _ordered(texts, members)
        needed, tried = smallest_set(texts, alone)
        if needed:
            break
        taking_over = _taking_over(survey, spike, members)
        if not taking_over:
            break
        backups += taking_over
        members += taking_over
    if not needed:
        return _needs_of_components(texts, writers, tried, alone, backups)
    random = [random_neurons(survey.target, needed, seed, number, tuple(members)) for number in range(RANDOM_SETS)]
    singles = [(neuron,) for neuron in alone]
    removals = measured(texts, [needed, *random, *singles])
    intact = _intact(texts)
    return Needs(*intact, len(texts.rows), removals[0], tuple(removals[1:4]), tuple(removals[4:]), None, backups)


def _ordered(texts: SpikeTexts, members: Sequence[Neuron]) -> list[Neuron]:
    """Neurons in the order of what is left of the spike without each alone."""
    left = texts.along([(member,) for member in members]).mean(1)
    return [members[number] for number in left.argsort(stable=True).tolist()]


def smallest_set(texts: SpikeTexts, order: Sequence[Neuron]) -> tuple[Parts, Parts]:
    """The smallest set of neurons that leaves less than a quarter of the spike, and the set that leaves least.

    A neuron joins if without it and those before less is left; then members are left out that are not needed.

    Args:
        texts: The texts.
        order: The neurons, those without which least is left first.
    """
    best, least = (order[0],), float(texts.along([(order[0],)]).mean())
    for neuron in order[1:]:
        if least < LEFT:
            break
        left = float(texts.along([(*best, neuron)]).mean())
        if left < least:
            best, least = (*best, neuron), left
    if least >= LEFT:
        return (), best
    while len(best) > 1:
        fewer = [best[:number] + best[number + 1 :] for number in range(len(best))]
        left = texts.along(list(fewer)).mean(1)
        if float(left.min()) >= LEFT:
            break
        best = fewer[int(left.argmin())]
    return best, best


def _taking_over(survey: Survey, spike: Spike, members: Sequence[Neuron]) -> tuple[Neuron, ...]:
    """Who writes the spike when its writers are gone: a backup fires only then."""
    found: list[Share] = []
    with Ablate(sites=tuple(members)).on(survey.target):
        for layer in range(spike.peak + 1):
            if survey.target.has_neurons(layer):
                found += of_layer(survey, spike, layer, entering=None)
    fresh = [one for one in sorted(found, key=lambda one: -one.share) if one.part not in members]
    return tuple(one.part for one in fresh[:2] if isinstance(one.part, Neuron) and one.share >= NAMED)


def _needs_of_components(
    texts: SpikeTexts, writers: Sequence[Share], tried: Parts, alone: Sequence[Neuron], backups: tuple[Neuron, ...]
) -> Needs:
    """Without neurons that are enough: components alone, then pairs of those that write, replaced by their mean."""
    survey, spike = texts.survey, texts.spike
    parts = components(survey.target, spike.peak)
    means = means_of(survey, spike, parts)
    left = texts.along([(part,) for part in parts], means).mean(1)
    needed: Parts = ()
    if float(left.min()) < LEFT:
        writing = {one.part for one in writers if one.share >= WRITES}
        enough = [part for part, rest in zip(parts, left.tolist(), strict=True) if rest < LEFT]
        needed = (next((part for part in enough if part in writing), parts[int(left.argmin())]),)
    else:
        some = [one.part for one in writers if abs(one.share) >= WRITES]
        pairs = list(combinations(some[:4], 2))
        if pairs:
            of_pairs = texts.along(list(pairs), means).mean(1)
            if float(of_pairs.min()) < LEFT:
                needed = pairs[int(of_pairs.argmin())]
    singles: list[Parts] = [(neuron,) for neuron in alone]
    sets: list[Parts] = [*singles]
    if needed:
        others = [part for part in parts if part not in needed][:: max(1, (len(parts) - 1) // 3)][:3]
        sets = [needed, *((other,) for other in others), *singles]
    elif tried:
        sets = [tried, *singles]
    removals = measured(texts, sets, means) if sets else []
    intact, count = _intact(texts), len(texts.rows)
    if needed:
        rest = len(removals) - len(singles)
        return Needs(*intact, count, removals[0], tuple(removals[1:rest]), tuple(removals[rest:]), None, backups)
    if tried:
        return Needs(*intact, count, None, (), tuple(removals[1:]), removals[0], backups)
    return Needs(*intact, count, None, (), tuple(removals), None, backups)


def measured(texts: SpikeTexts, sets: Sequence[Parts], means: dict | None = None) -> list[Removal]:
    """All three outcomes of removing each set."""
    left, effects = texts.effects(list(sets), means)
    heads, attention = _heads(texts, effects), _attention(texts, effects)
    risen = effects.loss[1:] - effects.loss[:1]
    removals: list[Removal] = []
    for number, parts in enumerate(sets):
        rise, perplexity, spread = risen[number], None, None
        if bool(rise.isfinite().all()):
            perplexity = float(rise.mean().exp())
            error = margin_of(rise.numpy())
            spread = None if error is None else perplexity * error
        removals.append(
            Removal(
                parts=tuple(parts),
                left=float(left[number].mean()),
                heads=int(heads[number + 1].mean().round()) if False else _count(texts, effects, number + 1),
                attention=float(attention[number]),
                perplexity=perplexity,
                left_margin=margin_of(left[number].numpy()),
                heads_margin=margin_of(heads[number + 1].numpy()),
                perplexity_margin=spread,
            )
        )
    return removals


def _reading(texts: SpikeTexts, effects: Effects) -> Float[Tensor, "state text layer head"]:
    """Attention to the place in the layers that read the spike."""
    layers = [layer for layer in texts.spike.reading_layers if layer < texts.survey.target.n_layers]
    return effects.attention[:, :, layers]


def _count(texts: SpikeTexts, effects: Effects, state: int) -> int:
    """Heads whose mean attention over texts is above 0.3."""
    return int((_reading(texts, effects)[state].mean(0) > READS).sum())


def _heads(texts: SpikeTexts, effects: Effects) -> Float[Tensor, "state text"]:
    """Heads of each text."""
    return (_reading(texts, effects) > READS).flatten(2).sum(2).float()


def _attention(texts: SpikeTexts, effects: Effects) -> Float[Tensor, " edit"]:
    """What is left of the attention of the heads that read the spike in the intact model."""
    means = _reading(texts, effects).mean(1)
    readers = means[0] > READS
    if not bool(readers.any()):
        return torch.ones(len(means) - 1)
    return means[1:, readers].mean(1) / means[0, readers].mean()


def _intact(texts: SpikeTexts) -> tuple[int, float | None]:
    """Heads that attend to the place in the intact texts, and their margin over texts."""
    received = texts.survey.received(texts.spike.mask)[:, :, texts.rows]
    layers = [layer for layer in texts.spike.reading_layers if layer < texts.survey.target.n_layers]
    chosen = received[layers]
    heads = (chosen > READS).flatten(0, 1).sum(0).float()
    return int((chosen.mean(-1) > READS).sum()), margin_of(heads.numpy())
