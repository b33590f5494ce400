"""What may stay exact while a model is rounded: the sink's places, neurons and layers, and random ones beside them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sinkscope.hooks.edit.quantize import down_projection, linear_modules
from sinkscope.measure import Setup
from sinkscope.models.draws import draws
from sinkscope.models.target import Target
from sinkscope.sinks.find.places import Place
from sinkscope.sinks.find.result import FindSinks
from sinkscope.sinks.removal.components import Sites
from sinkscope.sinks.removal.search import random_sites
from sinkscope.sinks.tokens import TokenRows

DRAWS = 3
"""Random ones with which what stays exact is compared."""
ACTIVATIONS, KV = "activations", "kv"


@dataclass(frozen=True)
class Exact:
    """What stays exact.

    Attributes:
        fields: Fields of `Quantize`.
        of: What is rounded where it can make a difference.
        prefix: Tokens put before every text.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    of: tuple[str, ...] = (ACTIVATIONS, KV)
    prefix: tuple[int, ...] = ()


Compared = Sequence[Exact]
"""What was chosen, and after it random ones of the same size."""


def _compared(name: str, values: Sequence[Any], of: tuple[str, ...] = Exact.of) -> Compared:
    """Values of a field of `Quantize`."""
    return [Exact({name: value}, of) for value in values]


@dataclass(frozen=True)
class Sink:
    """What is known of a model's sinks.

    Attributes:
        places: The places of norm spikes or, without any, those that heads attend to.
        neurons: The neurons that make the spikes of all kinds of places.
        layers: The layers that build them.
    """

    places: tuple[Place, ...]
    neurons: Sites
    layers: tuple[int, ...]

    @classmethod
    def of(cls, found: FindSinks) -> Sink:
        """What `find_sinks` says."""
        places = [each.place for each in found.spikes or found.sinks if each.place is not None]
        neurons: Sites = ()
        for spike in found.spikes:
            if spike.set is not None:
                neurons += spike.set.edit_sites
        layers = {stage.layer for stage in found.stages} | {site[0] for site in neurons}
        return cls(tuple(places), tuple(dict.fromkeys(neurons)), tuple(sorted(layers)))

    def there(self, ids: TokenRows) -> Bool[Tensor, "text pos"]:
        """The places in some texts."""
        there = torch.zeros_like(ids, dtype=torch.bool)
        for place in self.places:
            there |= place.means(ids)
        return there

    def prefix(self, ids: TokenRows) -> tuple[int, ...]:
        """The most common tokens of places after the first position, as many as texts have such places on average.

        With the token that texts begin with after them, they are the prefix of Chen et al. 2024 (PrefixQuant).
        """
        there = self.there(ids)
        there[:, 0] = False
        tokens, counts = ids[there].unique(return_counts=True)
        order = counts.argsort(descending=True, stable=True)[: int((there.sum() / len(ids)).ceil())]
        return tuple(tokens[order].tolist())


def comparisons(setup: Setup, sink: Sink, ids: TokenRows) -> dict[str, Compared]:
    """What may stay exact in some texts, by its name.

    The first tokens are as many as a text has places of the sink, or one where no text has such a place.
    """
    target = setup.target
    there = sink.there(ids)
    count = there.sum(1, keepdim=True)
    if not there.any():
        count = torch.ones_like(count)
    first = torch.arange(ids.shape[1]) < count
    generator = draws(setup.seed, "places beside those of the sink")
    others = torch.rand(DRAWS, *ids.shape, generator=generator).masked_fill(there | first, 2.0)
    random = (others.argsort(-1).argsort(-1) < count).unbind()
    compared: dict[str, Compared] = {}
    for name, places in (("sink places", there), ("first tokens", first)):
        if places.any():
            compared[name] = _compared("places", [one.nonzero().tolist() for one in (places, *random)])
    prefix = sink.prefix(ids)
    if prefix:
        generator = draws(setup.seed, "tokens beside the prefix")
        tokens = torch.randint(int(target.config.vocab_size), (DRAWS, len(prefix)), generator=generator).tolist()
        begin = {"positions": slice(0, len(prefix) + (setup.bos is not None))}
        compared["prefix"] = [Exact(begin, prefix=tuple(one)) for one in (prefix, *tokens)]
    if sink.neurons and not has_experts(target):
        drawn = [random_sites(target, sink.neurons, sink.neurons, setup.seed, number) for number in range(DRAWS)]
        compared["sink neurons"] = _compared("neurons", [sink.neurons, *drawn], (ACTIVATIONS,))
    if sink.layers and not has_experts(target):
        layers = (sink.layers, *random_layers(setup, sink.layers))
        projections = [down_projections(target, one) for one in layers]
        compared["down projections"] = _compared("layers", projections, (ACTIVATIONS,))
    if sink.layers:
        compared["sink layers"] = compared_layers(setup, sink.layers)
    return compared


def compared_layers(setup: Setup, layers: Sequence[int]) -> Compared:
    """Some layers, and as many random other ones."""
    return _compared("layers", [layers, *random_layers(setup, layers)])


def random_layers(setup: Setup, layers: Sequence[int]) -> list[list[int]]:
    """As many other layers, in several draws; none if there are not enough others."""
    generator = draws(setup.seed, f"layers beside {list(layers)}")
    others = [layer for layer in range(setup.n_layers) if layer not in layers]
    drawn = list[list[int]]()
    while len(others) >= len(layers) and len(drawn) < DRAWS:
        order = torch.randperm(len(others), generator=generator)[: len(layers)].tolist()
        drawn.append([others[index] for index in order])
    return drawn


def down_projections(target: Target, layers: Sequence[int]) -> list[str]:
    """Names of the down projections of some layers."""
    modules = [down_projection(target, layer) for layer in layers]
    return [one.name for one in linear_modules(target) if one.module in modules]


def has_experts(target: Target) -> bool:
    """Whether some layer is a mixture of experts, so that only keys and values can be rounded."""
    return any(map(target.is_mixture, range(target.n_layers)))
