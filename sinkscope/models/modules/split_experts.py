"""Experts of which every process holds some neurons, as transformers splits them by tensor parallelism."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import linear

from sinkscope.models.modules.experts import Experts, Hidden, Neurons
from sinkscope.models.shards import local, shards_of


class SplitExperts(Experts):
    """Gated experts whose neurons are split: each process computes those that it holds, and one sum brings them to all.

    The part of `gate_up_proj` in a process holds the gates of its neurons and then their ups.

    Args:
        module: The module in which the experts are one call.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._shards = shards_of(module.down_proj)

    @property
    def is_plain(self) -> bool:
        """Whether the weights can be read: other layouts, and biases, are not served."""
        is_usual = not self._is_transposed and self._is_concatenated and self._down.ndim == 3
        return is_usual and not hasattr(self.module, "gate_up_proj_bias")

    def factors(self, expert: int, hidden: Hidden, neurons: list[int] | None = None) -> list[Neurons]:
        """Gate and up of some neurons of an expert, or of all, on every process."""
        wanted = list(range(self.width)) if neurons is None else neurons
        weight = local(self._gate_up)[expert]
        places, here = self._shards.axis(self.width).here(wanted)
        found: list[Tensor] = []
        for rows in weight.chunk(2):
            part = hidden.new_zeros(len(hidden), len(wanted))
            part[:, places] = linear(hidden, rows[here])
            found.append(self._shards.sum(part))
        return found

    def columns(self, expert: int, neurons: list[int]) -> Float[Tensor, "neuron d_model"]:
        """What neurons of an expert write when their `hook_post` is 1, on every process."""
        return self._shards.columns(local(self._down)[expert], neurons, self.width).T
