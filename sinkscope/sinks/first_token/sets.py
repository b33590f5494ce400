"""The smallest set of neurons whose ablation takes the sink away: at the sink layer, later, and in attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from sinkscope.interventions import Ablate
from sinkscope.models.target import Target
from sinkscope.sinks.first_token.ablation import DRAWS, Neuron, numbers, stage_neurons
from sinkscope.sinks.first_token.effects import Edit, Effects, effects
from sinkscope.sinks.first_token.received import LOST, losses
from sinkscope.sinks.first_token.walk import SINK_RATIO, Walk, walk

Site = tuple[int, ...]
ROUNDS = 4  # times that the model may repair itself before the search ends
_TRIED = 128  # sets of one size that are tried at most
_QUERIES = 48  # tokens of the texts in which attention is compared
_TEXTS = 2


@dataclass(frozen=True)
class CausalSet:
    """Neurons that make the sink together, and what zeroing all of them takes away.

    Attributes:
        sites: the neurons, largest effect first.
        drop_sink_layer: share of the first token's norm at the sink layer that goes with them.
        drop_last_layer: the same at the last layer after which the norm stands out.
        drop_attention: share of the attention to the first token, over the heads of the sink behind the sink layer,
            that goes with them; None: there are no such heads among the layers read.
        heads_lost: share of these heads that lose at least half of it.
        control: the largest of these drops among 20 random sets of as many neurons of the same layers.
        kind: "minimal": the smallest set found that takes the effect away; "partial": the best one found does not;
            "backup": neurons of the minimal set that are silent until the others are zeroed.
    """

    sites: tuple[Neuron, ...]
    drop_sink_layer: float
    drop_last_layer: float
    drop_attention: float | None
    heads_lost: float | None
    control: float
    kind: Literal["minimal", "partial", "backup"]

    @property
    def verified(self) -> bool:
        """Whether every effect is larger than that of any random set."""
        drops = (self.drop_sink_layer, self.drop_last_layer, self.drop_attention)
        return all(drop is None or drop > self.control for drop in drops[:2])
