"""Parts of a model that results name: neurons, heads and components."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sinkscope.results.notation import head_name, neuron_name

ComponentKind = Literal["embedding", "attention", "mixer", "mlp"]


@dataclass(frozen=True)
class Neuron:
    """The address of a neuron. `expert` is None if the layer is not a mixture, and for a neuron of a shared expert."""

    layer: int
    expert: int | None
    neuron: int

    @classmethod
    def of(cls, site: Sequence[int]) -> Neuron:
        """Return the neuron that interventions take as (layer, neuron) or (layer, expert, neuron)."""
        if len(site) == 2:
            return cls(site[0], None, site[1])
        return cls(site[0], site[1], site[2])

    @property
    def site(self) -> tuple[int, ...]:
        """(layer, neuron) or (layer, expert, neuron), as interventions take it."""
        if self.expert is None:
            return (self.layer, self.neuron)
        return (self.layer, self.expert, self.neuron)

    def __str__(self) -> str:
        return neuron_name(self.layer, self.expert, self.neuron)


@dataclass(frozen=True)
class Head:
    """The address of an attention head."""

    layer: int
    head: int

    def __str__(self) -> str:
        return head_name(self.layer, self.head)


@dataclass(frozen=True)
class Component:
    """A component that writes into the residual stream; the embedding has no layer.

    A mixer is what a layer without softmax attention has in its place, such as a convolution.
    """

    kind: ComponentKind
    layer: int | None = None

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"{self.kind} {self.layer}"
