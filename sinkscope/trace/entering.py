"""What entered the layers when texts were read, so that later passes can begin where they differ."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from sinkscope.models.target import LayerInput

KEPT_POSITIONS = 1024  # most positions of which it is kept what enters each layer


@dataclass(frozen=True, eq=False)
class Entering:
    """What entered the layers when some texts were read. Later passes over these texts begin where they differ.

    Attributes:
        inputs: The residual stream where it entered a layer, by layer.
    """

    inputs: dict[int, LayerInput] = field(default_factory=dict)

    def part(self, rows: slice, length: int) -> Entering:
        """The same of some rows up to a length; later tokens do not change earlier ones."""
        parts = {}
        for layer, entered in self.inputs.items():
            parts[layer] = replace(entered, hidden=entered.hidden[rows, :length])
        return Entering(parts)

    def up_to(self, layer: int) -> Entering:
        """The same of the layers up to one."""
        return Entering({known: entered for known, entered in self.inputs.items() if known <= layer})

    def latest(self, layer: int) -> int:
        """The last layer up to this one at which a pass can begin; 0 is the embedding."""
        return max((known for known in self.inputs if known <= layer), default=0)

    def at(self, layer: int, copies: int = 1) -> LayerInput | None:
        """What enters a layer, the texts several times one after another; None if that is not known."""
        if layer not in self.inputs:
            return None
        entered = self.inputs[layer]
        return replace(entered, hidden=entered.hidden.repeat(copies, 1, 1))


NOT_READ = Entering()
