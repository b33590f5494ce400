"""What removals are held against: the intact model, and random neurons, heads and components.

A draw goes by an order of the candidates that is measured (what a neuron writes, what is left without a head), so that
it is the same whatever the numbers of neurons and heads are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.models.draws import draws, some_of
from sinkscope.models.neurons import columns, flat_number, view_layer
from sinkscope.models.target import Target
from sinkscope.results.parts import Component, Head, Neuron
from sinkscope.sinks.spikes.spike import Part, Parts
from sinkscope.sinks.tokens import TokenRows

RANDOM_SETS = 12  # random sets beside one that is removed: one for each text of a survey
TRIES = 4  # draws for each set, of which some are the same where there are few others

Sizes = Mapping[int, Float[Tensor, " neuron"]]
"""What each neuron of a layer writes, by the numbers of a `LayerView`."""


@dataclass(frozen=True, eq=False)
class Others:
    """The neurons of some layers, from which random ones are drawn.

    Attributes:
        target: The model.
        written: How much each neuron writes; those that write nothing are drawn only if there are too few others.
        orders: The neurons of a layer and an expert from which was drawn.
    """

    target: Target
    written: Sizes
    orders: dict[tuple[int, int | None], list[Neuron]] = field(default_factory=dict)

    @classmethod
    @torch.no_grad()
    def of(cls, target: Target, ids: TokenRows, neurons: Iterable[Neuron]) -> Others:
        """Measure what the neurons of the layers of some neurons write in a text, mean over its tokens."""
        written, text = dict[int, Tensor](), ids[:1]
        for layer in sorted({neuron.layer for neuron in neurons}):
            post = view_layer(target, layer, text, torch.ones_like(text, dtype=torch.bool)).post
            size, every = post.abs().mean(0), torch.arange(post.shape[1], device=post.device)
            for some in every.split(1024):
                size[some] *= columns(target, layer, some).norm(dim=1)
            written[layer] = size.cpu()
        return cls(target, written)

    def draw(
        self, neurons: Sequence[Neuron], seed: int, number: int = 0, excluded: Sequence[Neuron] = ()
    ) -> tuple[Neuron, ...]:
        """Draw as many other neurons of the same layers (and experts), none of these or `excluded` if there are enough.

        Args:
            neurons: The neurons that are compared with the random ones.
            seed: Seed of the measurement.
            number: Number of the draw, of several beside the same neurons.
            excluded: Other neurons that are not drawn.
        """
        generator, drawn = draws(seed, f"random neurons, draw {number}"), list[Neuron]()
        barred = {*excluded, *neurons}
        for one in neurons:
            beside = self._beside(one)
            others = [neuron for neuron in beside if neuron not in barred and neuron not in drawn] or beside
            drawn.append(others[int(torch.randint(len(others), (1,), generator=generator))])
        return tuple(drawn)

    def sets(self, neurons: Sequence[Neuron], seed: int, excluded: Sequence[Neuron] = ()) -> list[Parts]:
        """Draw different random sets; where there are few, nearly all that there are."""
        found: dict[frozenset[Part], Parts] = {}
        for number in range(TRIES * RANDOM_SETS):
            drawn = self.draw(neurons, seed, number, excluded)
            if not {*drawn} & {*neurons}:  # else there are too few others
                found.setdefault(frozenset(drawn), drawn)
            if len(found) == RANDOM_SETS:
                break
        return list(found.values())

    def _beside(self, one: Neuron) -> list[Neuron]:
        """The neurons of a layer and an expert, those that write most first."""
        key = one.layer, one.expert
        if key not in self.orders:
            self.orders[key] = self._ordered(one)
        return self.orders[key]

    def _ordered(self, one: Neuron) -> list[Neuron]:
        first = flat_number(self.target, one.layer, one.expert, 0)
        size = self.written[one.layer].abs()[first : first + self.target.width(one.layer, one.expert)]
        order = size.argsort(descending=True, stable=True)
        numbers = order[size[order] > 0].tolist() or order.tolist()
        return [Neuron(one.layer, one.expert, number) for number in numbers]


def random_heads(heads: Sequence[Head], among: Sequence[Head], seed: int) -> list[Parts]:
    """As many other heads, a dozen draws; none if there are not as many others.

    Args:
        heads: The heads that are compared with the random ones.
        among: Heads from which is drawn, in an order that was measured.
        seed: Seed of the measurement.
    """
    others, generator = [head for head in among if head not in heads], draws(seed, "heads beside those that mark")
    if len(others) < len(heads):
        return []
    return [tuple(some_of(others, len(heads), generator)) for _ in range(RANDOM_SETS)]


def other_components(left: Mapping[Component, float], needed: Parts) -> list[Parts]:
    """Return other components, each alone, those without which least is left: of the same kinds, if there are such.

    Everything is computed from the embedding, so it is none of them.

    Args:
        left: How far what is left without each is from nothing.
        needed: The components that are needed.
    """
    others = [part for part in left if part not in needed and part.layer is not None]
    kinds = {part.kind for part in needed if isinstance(part, Component)}
    alike = [part for part in others if part.kind in kinds] or others
    return [(part,) for part in sorted(alike, key=lambda part: left[part])[:RANDOM_SETS]]
