"""What the steps of `find_sinks` share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.layer_scan import LayerScan


@dataclass(frozen=True)
class SinkContext:
    """The model, its text and its layer scan. Every step after the scan reads it, and none changes it.

    Attributes:
        target: The model.
        ids: Typical text; position 0 holds the first token.
        scan: The layers, as typical text shows them.
        sink_layer: The layer that builds most of the spike. None if no MLP makes one.
        generator: Source of all random draws.
    """

    target: Target
    ids: Int[Tensor, "row pos"]
    scan: LayerScan
    sink_layer: int | None
    generator: torch.Generator

    @classmethod
    def of(cls, setup: Setup, scan: LayerScan) -> SinkContext:
        """The context of a measurement, with a generator that begins at its seed."""
        generator = torch.Generator().manual_seed(setup.seed)
        return cls(setup.target, setup.ids, scan, scan.sink_layer, generator)

    @property
    def layer(self) -> int:
        """The sink layer of a model that has one."""
        assert self.sink_layer is not None
        return self.sink_layer
