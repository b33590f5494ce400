"""Controls of an effect: neurons that write as much as the needed ones, components, and heads.

1. The busiest other neurons of the same layers: the largest mean written norm first, until they write as much as the
   neurons that are compared, in norm. So a neuron that is split into many does not enlarge the control.
2. Random sets of other neurons of these layers that write as much.

A draw goes by an order that is measured, so that it is the same however a model numbers its parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.measure.setup import rows_at_once
from sinkscope.models.draws import draws, some_of
from sinkscope.models.neurons import columns, expert_and_neuron, flat_number, view_layer
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.spike import Parts
from sinkscope.sinks.spikes.survey import Survey
from sinkscope.sinks.spikes.writers import Unit, writing_of
from sinkscope.sinks.tokens import TokenRows

RANDOM_SETS = 12  # random sets of heads, other components
EQUAL_SETS = 8  # random sets of neurons that write as much, each read in a text of its own

Ordered = Mapping[tuple[int, int | None], Sequence[int]]
"""Numbers of the neurons of each MLP or expert, from which random neurons are drawn; the strongest writers first."""


@dataclass(frozen=True)
class EqualSets:
    """Other neurons that write as much as some neurons, or as near to it as their layers come.

    Attributes:
        busiest: Those that write most, in norm.
        random: Random sets.
        norms: Mean written norm of the busiest, and of each random set, over that of the neurons that are compared.
    """

    busiest: tuple[Neuron, ...]
    random: tuple[tuple[Neuron, ...], ...]
    norms: tuple[float, ...]


@torch.no_grad()
def equal_sets(survey: Survey, units: Sequence[Unit], excluded: Iterable[Neuron], seed: int) -> EqualSets | None:
    """Choose other neurons that write as much, in each MLP or expert apart.

    Args:
        survey: The survey, whose texts tell what neurons write.
        units: The neurons that are compared.
        excluded: Neurons that are no controls: all candidates.
        seed: Seed of the random sets.

    Returns:
        None if there are no other neurons that write anything.
    """
    target, barred = survey.target, {*excluded}
    groups: dict[tuple[int, int | None], list[Unit]] = {}
    for unit in units:
        groups.setdefault((unit[0].layer, unit[0].expert), []).append(unit)
    sets, sizes, whole = [list[Neuron]() for _ in range(1 + EQUAL_SETS)], [0.0] * (1 + EQUAL_SETS), 0.0
    for (layer, expert), own in groups.items():
        norms, of_units = written_norms(survey, layer, own)
        total = sum(of_units)
        whole += total
        first = flat_number(target, layer, expert, 0)
        numbers = torch.arange(first, first + target.width(layer, expert))
        free = torch.tensor(
            [Neuron(layer, *expert_and_neuron(target, layer, n)) not in barred for n in numbers.tolist()]
        )
        pool = numbers[free & (norms[numbers] > 0)]
        pool = pool[norms[pool].argsort(descending=True, stable=True)]
        for draw in range(1 + EQUAL_SETS):
            order = pool
            if draw:
                order = pool[
                    torch.randperm(
                        len(pool), generator=draws(seed, f"neurons of equal norm, layer {layer}, draw {draw}")
                    )
                ]
            chosen = nearest(norms[order], total)
            sizes[draw] += float(norms[order[:chosen]].sum())
            sets[draw] += [Neuron(layer, *expert_and_neuron(target, layer, n)) for n in order[:chosen].tolist()]
    if not sets[0] or not whole:
        return None
    known, distinct = {frozenset(sets[0])}, list[int]()
    for number in range(1, len(sets)):
        if frozenset(sets[number]) not in known:
            known.add(frozenset(sets[number]))
            distinct.append(number)
    return EqualSets(
        tuple(sets[0]),
        tuple(tuple(sets[number]) for number in distinct),
        tuple(sizes[n] / whole for n in (0, *distinct)),
    )


def nearest(norms: Float[Tensor, " neuron"], total: float) -> int:
    """Return how many of the first norms come nearest to a total; at least one if there is any."""
    if not len(norms):
        return 0
    return 1 + int((norms.cumsum(0) - total).abs().argmin())


@torch.no_grad()
def written_norms(survey: Survey, layer: int, units: Sequence[Unit]) -> tuple[Float[Tensor, " neuron"], list[float]]:
    """Return the norm of what each neuron of a layer writes, mean over all tokens, and that of each unit as one vector.

    Args:
        survey: Its texts are read, as many as memory allows.
        layer: The layer.
        units: Units of the layer.
    """
    target = survey.target
    texts = survey.ids[: rows_at_once(survey.ids.shape[1], target.d_mlp * max(1, target.n_experts(layer)))]
    where, rows = torch.ones_like(texts, dtype=torch.bool), slice(0, len(texts))
    view = view_layer(target, layer, texts, where, survey.start(layer, rows))
    gain, scale = writing_of(target, view, survey.mlp[layer][rows][where])
    sizes, of_units, every = view.post.abs().cpu() * scale, list[float](), torch.arange(view.post.shape[1])
    norms = sizes.mean(0)
    for some in every.split(1024):
        norms[some] *= (columns(target, layer, some).cpu() * gain).norm(dim=1)
    for unit in units:
        numbers = torch.tensor([flat_number(target, layer, neuron.expert, neuron.neuron) for neuron in unit])
        vectors = (view.post.cpu()[:, numbers] * scale) @ (columns(target, layer, numbers).cpu() * gain)
        of_units.append(float(vectors.norm(dim=1).mean()))
    return norms, of_units


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


def ordered(target: Target, written: Mapping[int, Float[Tensor, " neuron"]], neurons: Iterable[Neuron]) -> Ordered:
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
    for neuron in neurons:
        beside = orders[neuron.layer, neuron.expert]
        alike = [
            other
            for other in (*excluded, *neurons, *drawn)
            if (other.layer, other.expert) == (neuron.layer, neuron.expert)
        ]
        barred = {other.neuron for other in alike}
        others = [other for other in beside if other not in barred] or beside
        drawn.append(
            Neuron(neuron.layer, neuron.expert, others[int(torch.randint(len(others), (1,), generator=generator))])
        )
    return tuple(drawn)


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
