"""What the steps of `find_sinks` share."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.measure import Setup
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.attention_received import AttentionReading
from sinkscope.sinks.first_token.layer_scan import NOT_READ, Entering, LayerScan, scan_far_enough

SPIKE_TEXTS = 0.1  # least share of the texts, and at least two, that have a spike of some texts; fewer texts are read


@dataclass(frozen=True)
class SinkContext:
    """The model, its text and its layer scan. Every step after the scan reads it, and none changes it.

    Attributes:
        target: The model.
        ids: Typical text; position 0 holds the first token. If only some texts have a spike there, these texts.
        scan: The layers, as this text shows them.
        sink_layer: The layer that builds most of the spike. None if no MLP makes one.
        generator: Source of all random draws.
        share: Share of all texts that `ids` are.
        entering: What entered each layer when `ids` were read.
    """

    target: Target
    ids: Int[Tensor, "row pos"]
    scan: LayerScan
    sink_layer: int | None
    generator: torch.Generator
    share: float = 1.0
    entering: Entering = NOT_READ

    @classmethod
    def read(
        cls,
        setup: Setup,
        *,
        whole: bool | None = None,
        reading: AttentionReading | None = None,
    ) -> SinkContext:
        """Scan the typical text; if the first token's norm stands out in some texts only, these alone.

        Args:
            setup: The model and its text.
            whole: Read every layer. None: if the model is in memory.
            reading: Takes down the attention of all the texts.
        """
        if whole is None:
            whole = setup.target.resident
        ids = setup.ids
        share = 1.0
        listening = nullcontext()
        if reading is not None:
            listening = reading.listening(slice(None), setup.target.n_layers)
        with listening:
            scan = scan_far_enough(setup, ids, whole=whole)
        spiking = scan.spiking
        count = int(spiking.sum())
        if count < len(ids) and count >= max(2, SPIKE_TEXTS * len(ids)):
            share = count / len(ids)
            ids = ids[spiking]
            scan = scan_far_enough(setup, ids, whole=whole)
        generator = torch.Generator().manual_seed(setup.seed)
        return cls(setup.target, ids, scan, scan.sink_layer, generator, share, scan.entering)

    @property
    def layer(self) -> int:
        """The sink layer of a model that has one."""
        assert self.sink_layer is not None
        return self.sink_layer
