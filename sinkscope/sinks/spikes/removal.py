"""What is left without some parts of a model: of a spike, of the heads that attend to its place, and of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure.margin import margin_of
from sinkscope.sinks.spikes.edited import Written
from sinkscope.sinks.spikes.records import Chance
from sinkscope.sinks.spikes.spike import Parts
from sinkscope.sinks.spikes.texts import SpikeTexts
from sinkscope.sinks.thresholds import READS, SMALLEST


@dataclass(frozen=True)
class Removal:
    """What is left without some parts. Neurons are zeroed; others write at the place their mean over ordinary ones.

    Attributes:
        parts: The parts.
        left: Share of the spike at its peak that is left.
        heads: Heads in the spike's layers that attend to the place.
        attention: Mean attention to the place from the heads that read it in the intact model, as a share of theirs.
        perplexity: Over that of the intact model; None if the model is read without its unembedding.
        left_margin: Two standard errors of `left` over texts; None: too few, or all are the same.
        heads_margin: The same of `heads`.
        perplexity_margin: The same of `perplexity`.
    """

    parts: Parts
    left: float
    heads: int = 0
    attention: float = 1.0
    perplexity: float | None = None
    left_margin: float | None = None
    heads_margin: float | None = None
    perplexity_margin: float | None = None


def removals_of(
    texts: SpikeTexts, sets: Sequence[Parts], means: Written | None = None, *, every_loss: bool | None
) -> list[Removal]:
    """Return all outcomes of removing each set.

    Of a spike elsewhere than at the first token, and without readers, only what is left is measured.

    Args:
        texts: The texts.
        sets: The sets.
        means: What removed components and heads write instead.
        every_loss: Whether the loss of every token is read, however large the vocabulary is. None: no loss is read.
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
        after, perplexity, spread = effects.attention[number, texts.reading_layers], None, None
        heads, heads_margin = count_readers(after)
        rise = (effects.loss[number] - texts.loss).nanmean(1)
        if bool(rise.isfinite().all()):
            perplexity, error = float(rise.mean().exp()), margin_of(rise.numpy())
            spread = None if error is None else perplexity * error
        removal = Removal(
            parts=sets[number],
            left=float(left.mean()),
            heads=heads,
            attention=float(after.mean(-1)[readers].sum() / before[readers].sum()) if bool(readers.any()) else 1.0,
            perplexity=perplexity,
            left_margin=margin_of(left.numpy()),
            heads_margin=heads_margin,
            perplexity_margin=spread,
        )
        removals.append(removal)
    return removals


def chance_of(
    texts: SpikeTexts, random: Sequence[Parts], removal: Removal, means: Written | None = None
) -> Chance | None:
    """Read each text under a random set of its own, and return of each outcome the one nearest to that of the set.

    Args:
        texts: The texts. A random set more than there are texts begins with the first text again.
        random: The random sets. None are measured if there are none.
        removal: What is left without the set that is compared.
        means: What removed components and heads write instead.
    """
    if not random:
        return None
    count = max(len(random), len(texts.rows))
    texts = texts.rows_of(torch.arange(count) % len(texts.rows))
    sets = [random[number % len(random)] for number in range(count)]
    before = texts.attention
    readers = before.mean(-1) > READS
    if not bool(readers.any()) and not texts.spike.place.is_first:
        left = texts.along(sets, means, paired=True)[0]
        return Chance(nearest(left.tolist(), removal.left), 0, None, sets=len(random))
    effects = texts.effects(sets, means, every_loss=None if removal.perplexity is None else False, paired=True)
    left, after = texts.left(effects.along, texts.rows)[0], effects.attention[0, texts.reading_layers]
    of_text = (after > READS).flatten(0, 1).sum(0) - (before > READS).flatten(0, 1).sum(0)
    intact = int(readers.sum())
    change = nearest(of_text.tolist(), removal.heads - intact)
    shares, perplexity = after[readers].sum(0) / before[readers].sum(0).clamp(min=SMALLEST), None
    rise = (effects.loss[0] - texts.loss).nanmean(1)
    if bool(rise.isfinite().all()) and removal.perplexity is not None:
        perplexity = nearest(rise.exp().tolist(), removal.perplexity)
    attention = nearest(shares.tolist(), removal.attention) if bool(readers.any()) else 1.0
    left = nearest(left.tolist(), removal.left)
    return Chance(left, max(0, intact + int(change)), perplexity, attention, len(random))


def nearest(values: Sequence[float], to: float) -> float:
    """Return the one of some values that is nearest to another."""
    return min(values, key=lambda value: abs(value - to))


def count_readers(received: Float[Tensor, "layer head text"]) -> tuple[int, float | None]:
    """Return how many heads give more than 0.3 of their attention, mean over texts, and the margin over texts."""
    by_text = (received > READS).flatten(0, 1).sum(0).float()
    return int((received.mean(-1) > READS).sum()), margin_of(by_text.numpy())
