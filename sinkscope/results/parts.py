"""What a claim is about: neurons, heads and other parts of a model, lines of its attention, and tokens of its input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sinkscope.results.notation import head_name, neuron_name, word_list

ComponentKind = Literal["token embedding", "attention", "mixer", "mlp", "layer"]


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

    @property
    def address(self) -> Neuron:
        """The neuron alone, of one with numbers of a measurement beside it."""
        return Neuron(self.layer, self.expert, self.neuron)

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
    """A component that writes into the residual stream; the kind "layer" is a whole layer.

    A mixer is what a layer without softmax attention has in its place, such as a convolution.
    """

    kind: ComponentKind
    layer: int | None = None

    def __str__(self) -> str:
        if self.layer is None:
            return self.kind
        if self.kind == "layer":
            return f"layer {self.layer}"
        kind = "MLP" if self.kind == "mlp" else self.kind
        return f"{kind} of layer {self.layer}"


@dataclass(frozen=True)
class Tokens:
    """Tokens of the input: `count` copies of one, or those at the places of a sink."""

    which: Literal["copies", "sink places"]
    count: int = 0

    def __str__(self) -> str:
        if self.which == "copies":
            return f"{self.count} copies of a token"
        return self.which


@dataclass(frozen=True)
class Lines:
    """The heaviest lines of this kind in the attention of every head."""

    kind: Literal["vertical", "slash"]

    def __str__(self) -> str:
        return f"the heaviest {self.kind} lines"


Part = Neuron | Head | Component | Tokens | Lines
Parts = tuple[Part, ...]


def in_words(parts: Parts, most: int = 4) -> str:
    """Return parts in a sentence: neurons and heads by their names, others with an article."""
    names: list[str] = []
    for part in parts:
        bare = not isinstance(part, Component) or part.kind == "layer"
        names.append(str(part) if bare else f"the {part}")
    return word_list(names, most)


def is_several(parts: Parts) -> bool:
    """Return whether a verb about these parts is in the plural."""
    return len(parts) > 1 or any(isinstance(part, Tokens) for part in parts)


def removed(parts: Parts, edit: str = "", names: str = "") -> str:
    """Return "without it", or "with it replaced" of heads and components, which still write.

    Args:
        parts: The parts.
        edit: How they were edited, if they were neither zeroed nor replaced.
        names: What they are called. Empty: it, or them.
    """
    it = names or ("them" if is_several(parts) else "it")
    if not edit and all(isinstance(part, Neuron | Lines) for part in parts):
        return f"without {it}"
    return f"with {it} {edit or 'replaced'}"


def kind_of(parts: Parts) -> str:
    """Return what parts are in one word, in the plural."""
    if all(isinstance(part, Neuron) for part in parts):
        return "neurons"
    if all(isinstance(part, Tokens) for part in parts):
        return "tokens"
    return "heads"


def sites_of(neurons: Iterable[Neuron]) -> tuple[tuple[int, ...], ...]:
    """Return neurons in the form that interventions take."""
    return tuple(neuron.site for neuron in neurons)
