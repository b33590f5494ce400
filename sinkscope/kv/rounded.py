"""Keys and values with few bits, as a quantised cache holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sinkscope.files.records import check_fields
from sinkscope.hooks.edit.base import Intervention, Run
from sinkscope.hooks.edit.quantize import rounded, rounding_step
from sinkscope.kv.cache_state import Moment
from sinkscope.kv.session import Session
from sinkscope.models.draws import draws

Bits = Annotated[int, Field(ge=2, le=8)]


@dataclass(frozen=True)
class Rounded(Intervention):
    """Round what enters the cache to `bits`, separately for each token and kv head; later calls read it so.

    The step is the largest number of the vector divided by 2^(bits - 1) - 1.

    Attributes:
        bits: Bits of a number.
        noise: Also add random numbers, uniform within half a step: as large as the error, and independent of it.

    Raises:
        SinkscopeError: `bits` is not from 2 to 8.
    """

    bits: Bits = 4
    noise: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    def enter(self, run: Run, key: int) -> None:
        """Own the cache, and change what a call has added to it."""
        session = Session.of(run)
        session.own_cache()
        session.after_call(self._round)

    def _round(self, moment: Moment) -> None:
        new = moment.call.new
        for layer, kv in enumerate(moment.layers):
            kv.keys = self._rounded(kv.keys, new, f"keys of layer {layer}")
            kv.values = self._rounded(kv.values, new, f"values of layer {layer}")
            kv.grown = {}

    def _rounded(
        self, whole: Float[Tensor, "batch kv_head slot d"], new: int, name: str
    ) -> Float[Tensor, "batch kv_head slot d"]:
        before, added = whole[..., :-new, :], whole[..., -new:, :]
        largest = added.abs().amax(-1, keepdim=True)
        changed = rounded(added, largest, self.bits)
        if self.noise:
            generator = draws(0, f"noise of {name} at slot {before.shape[2]}")
            noise = torch.rand(added.shape, generator=generator).to(added.device) - 0.5
            changed = changed + (rounding_step(largest, self.bits) * noise).to(added.dtype)
        return torch.cat([before, changed], -2)
