"""What is left without some parts of a model, beside what is left without random ones.

A draw of random neurons and heads goes by an order that is measured (what a neuron writes, what is left without a
head), so that it is the same however a model numbers them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from sinkscope.measure.margin import margin_of
from sinkscope.models.draws import draws, some_of
from sinkscope.models.neurons import columns, flat_number, view_layer
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.edited import SpikeTexts
from sinkscope.sinks.spikes.records import Chance, Removal
from sinkscope.sinks.spikes.spike import Parts
from sinkscope.sinks.spikes.writers import Sizes
from sinkscope.sinks.thresholds import READS, SMALLEST
from sinkscope.sinks.tokens import TokenRows

RANDOM_SETS = 12  # random sets beside the set that is removed: one for each text of a survey
TRIES = 4  # draws for each set; where there are few other neurons, some are equal

Ordered = Mapping[tuple[int, int | None], Sequence[int]]
"""Numbers of the neurons of each MLP or expert, from which random neurons are drawn; the strongest writers first."""


def removals_of(texts: SpikeTexts, sets: Sequence[Parts], *, every_loss: bool | None) -> list[Removal]:
    """Measure what is left without each set.

    Args:
        texts: The texts.
        sets: The sets.
        every_loss: Whether the loss of every token is read, however large the vocabulary is. None: no loss is read.
    """
    removals: list[Removal] = []
    if not sets:
        return removals
    before, (intact, intact_margin) = texts.attention.mean(-1), count_readers(texts.attention)
    left, attention, rises = texts.effects(sets, every_loss=every_loss)
    for number, (parts, rise) in enumerate(zip(sets, rises, strict=True)):
        heads, margin, kept, perplexity, spread = 0, None, 1.0, None, None
        if attention is not None:
            heads, margin = count_readers(attention[number])
        if attention is not None and intact:
            kept = float(attention[number].mean(-1)[texts.readers].sum() / before[texts.readers].sum())
        if bool(rise.isfinite().all()):
            perplexity, error = float(rise.mean().exp()), margin_of(rise.numpy())
            spread = None if error is None else perplexity * error
        removal = Removal(
            parts=tuple(map(str, parts)),
            left=float(left[number].mean()),
            left_margin=margin_of(left[number].numpy()),
            heads=(intact, heads),
            heads_margin=(intact_margin, margin),
            attention=kept,
            perplexity=perplexity,
            perplexity_margin=spread,
            random=None,
            texts=len(texts.rows),
        )
        removals.append(removal)
    return removals


def chance_of(texts: SpikeTexts, random: Sequence[Parts], removal: Removal) -> Chance | None:
    """Read each text under a random set of its own, and return the outcome nearest to that of the set, for each kind.

    Args:
        texts: The texts. If there are more random sets than texts, texts are read again from the first on.
        random: The random sets. Without any, nothing is measured.
        removal: What is left without the set that is compared.
    """
    if not random:
        return None
    count = max(len(random), len(texts.rows))
    texts = replace(texts, rows=texts.rows[torch.arange(count) % len(texts.rows)])
    sets = [random[number % len(random)] for number in range(count)]
    every_loss = None if removal.perplexity is None else False
    left, after, rise = texts.effects(sets, every_loss=every_loss, paired=True)
    chance = Chance(_nearest(left[0], removal.left), 0, None, sets=len(random))
    if after is None:
        return chance
    before, readers, intact = texts.attention, texts.readers, int(texts.readers.sum())
    change = (after[0] > READS).sum((0, 1)) - (before > READS).sum((0, 1))
    heads, attention, perplexity = intact + int(_nearest(change, removal.heads[1] - intact)), 1.0, None
    if intact:
        shares = after[0][readers].sum(0) / before[readers].sum(0).clamp(min=SMALLEST)
        attention = _nearest(shares, removal.attention)
    if bool(rise.isfinite().all()) and removal.perplexity is not None:
        perplexity = _nearest(rise[0].exp(), removal.perplexity)
    return replace(chance, heads=max(0, heads), perplexity=perplexity, attention=attention)


def _nearest(values: Shaped[Tensor, " text"], to: float | int) -> float | int:
    """The value that is nearest to another."""
    return min(values.tolist(), key=lambda value: abs(value - to))


def count_readers(received: Float[Tensor, "layer head text"]) -> tuple[int, float | None]:
    """Return how many heads give more than 0.3 of their attention, mean over texts, and the margin over texts."""
    by_text = (received > READS).flatten(0, 1).sum(0).float()
    return int((received.mean(-1) > READS).sum()), margin_of(by_text.numpy())


# --- random parts ---


@torch.no_grad()
def ordered_in(target: Target, ids: TokenRows, neurons: Sequence[Neuron]) -> Ordered:
    """Order neurons by how much they write in the first text, mean over its tokens (`ordered`)."""
    written, text = dict[int, Tensor](), ids[:1]
    for layer in sorted({neuron.layer for neuron in neurons}):
        post = view_layer(target, layer, text, torch.ones_like(text, dtype=torch.bool)).post
        size, every = post.abs().mean(0), torch.arange(post.shape[1], device=post.device)
        for some in every.split(1024):
            size[some] *= columns(target, layer, some).norm(dim=1)
        written[layer] = size.cpu()
    return ordered(target, written, neurons)


def ordered(target: Target, written: Sizes, neurons: Iterable[Neuron]) -> Ordered:
    """Order the neurons of the same MLPs and experts by what they write; silent neurons are left out.

    Args:
        target: The model.
        written: What each neuron of a layer writes.
        neurons: The neurons.
    """
    orders: dict[tuple[int, int | None], Sequence[int]] = {}
    for layer, expert in dict.fromkeys((neuron.layer, neuron.expert) for neuron in neurons):
        first = flat_number(target, layer, expert, 0)
        size = written[layer].abs()[first : first + target.width(layer, expert)]
        order = size.argsort(descending=True, stable=True)
        orders[layer, expert] = order[size[order] > 0].tolist() or order.tolist()
    return orders


def random_neurons(
    orders: Ordered, neurons: Sequence[Neuron], seed: int, number: int = 0, excluded: Sequence[Neuron] = ()
) -> tuple[Neuron, ...]:
    """Draw as many other neurons of the same MLPs or experts; none of these or `excluded` if there are enough.

    Args:
        orders: From which is drawn.
        neurons: The neurons that are compared with the random ones.
        seed: Seed of the measurement.
        number: Number of the draw.
        excluded: Other neurons that are not drawn.
    """
    generator, drawn = draws(seed, f"random neurons, draw {number}"), list[Neuron]()
    for one in neurons:
        beside = orders[one.layer, one.expert]
        alike = [
            other for other in (*excluded, *neurons, *drawn) if (other.layer, other.expert) == (one.layer, one.expert)
        ]
        barred = {other.neuron for other in alike}
        others = [other for other in beside if other not in barred] or beside
        drawn.append(Neuron(one.layer, one.expert, others[int(torch.randint(len(others), (1,), generator=generator))]))
    return tuple(drawn)


def random_sets(
    orders: Ordered, neurons: Sequence[Neuron], seed: int, excluded: Sequence[Neuron] = ()
) -> list[tuple[Neuron, ...]]:
    """Draw different random sets; where there are few, nearly all that there are."""
    found: dict[frozenset[Neuron], tuple[Neuron, ...]] = {}
    for number in range(TRIES * RANDOM_SETS):
        drawn = random_neurons(orders, neurons, seed, number, excluded)
        if not {*drawn} & {*neurons}:  # else there are too few others
            found.setdefault(frozenset(drawn), drawn)
        if len(found) == RANDOM_SETS:
            break
    return list(found.values())


def random_heads(heads: Sequence[Head], among: Sequence[Head], seed: int) -> list[Parts]:
    """Draw a dozen sets of as many other heads; none if there are too few.

    Args:
        heads: The heads that are compared with the random ones.
        among: Heads from which is drawn, in an order that was measured.
        seed: Seed of the measurement.
    """
    others, generator = [head for head in among if head not in heads], draws(seed, "heads beside those that mark")
    if len(others) < len(heads):
        return []
    return [tuple(some_of(others, len(heads), generator)) for _ in range(RANDOM_SETS)]


def other_components(order: Iterable[tuple[Component]], needed: Parts) -> list[Parts]:
    """Return other components, each alone, the strongest first: of the same kinds, if there are such.

    The embedding is left out, because everything is computed from it.

    Args:
        order: Components, strongest effect first.
        needed: The components that are needed.
    """
    others = [part for (part,) in order if part not in needed and part.layer is not None]
    kinds = {part.kind for part in needed if isinstance(part, Component)}
    alike = [part for part in others if part.kind in kinds] or others
    return [(part,) for part in alike[:RANDOM_SETS]]
