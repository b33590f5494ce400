"""What entered the layers when texts were read, so that later passes can begin where they differ."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sinkscope.models.target import LayerInput


@dataclass(frozen=True, eq=False)
class Entering:
    """What entered the layers when some texts were read. Later passes over these texts begin where they differ.

    Attributes:
        streams: The residual stream `[row pos d_model]` where it entered a layer, by layer.
        wrapped: Whether the layers of the model return a tuple.
    """

    streams: dict[int, Tensor] = field(default_factory=dict)
    wrapped: bool = False

    def part(self, rows: Any, length: int) -> Entering:
        """The same of some rows (as an index or a slice) up to a length; later tokens do not change earlier ones."""
        streams = {layer: stream[rows, :length] for layer, stream in self.streams.items()}
        return Entering(streams, self.wrapped)

    def latest(self, layer: int) -> int:
        """The last layer up to this one at which a pass can begin; 0 is the embedding."""
        return max((known for known in self.streams if known <= layer), default=0)

    def at(self, layer: int, copies: int = 1) -> LayerInput | None:
        """What enters a layer, the texts several times one after another; None if that is not known."""
        if layer not in self.streams:
            return None
        return LayerInput(layer, self.streams[layer].repeat(copies, 1, 1), self.wrapped)


NOT_READ = Entering()
