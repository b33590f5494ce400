"""How much of its attention a head puts on the same offsets as one period earlier, position by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.kv.session import Observe, Rows

_QUERIES = 32  # rows that are turned into offsets at a time


@dataclass(frozen=True)
class Track:
    """One layer over a sequence, per query head and position.

    Attributes:
        mass: share of attention on the suffix.
        shared: share that lies on the same offsets of the suffix as `shift` positions earlier; 0 for the first ones.
        width: on how many positions of the suffix it lies, in effect (exponential of its entropy).
    """

    mass: Float[Tensor, "head pos"]
    shared: Float[Tensor, "head pos"]
    width: Float[Tensor, "head pos"]


class Overlaps:
    """Takes all rows of a single sequence in order, however many calls they come in.

    The first position, where sinks are, belongs to no suffix. Kept are three numbers per head and position, and
    `shift` rows of `suffix` offsets.
    """

    def __init__(self, layers: list[int], suffix: int, shift: int) -> None:
        self.layers, self.suffix, self.shift = layers, suffix, shift
        self.before: dict[int, Tensor] = {}  # the last `shift` rows: head row offset
        self.found: dict[int, list[Tensor]] = {layer: [] for layer in layers}  # each [3 head pos]

    def observe(self) -> Observe:
        """The observer to enter."""
        return Observe(self.see, self.layers)

    def see(self, rows: Rows) -> None:
        """Some rows of one layer."""
        probs, groups = rows.probs[0], rows.probs.shape[1] // rows.pos.shape[1]
        pos = rows.pos[0].repeat_interleave(groups, 0)[:, None]  # head 1 slot
        for start in range(0, probs.shape[1], _QUERIES):
            part = slice(start, start + _QUERIES)
            back = rows.query_pos[0, part, None] - pos  # head query slot
            inside = (pos > 0) & (back >= 0) & (back < self.suffix)
            cut = probs[:, part] * inside
            offsets = cut.new_zeros(*cut.shape[:2], self.suffix)
            offsets.scatter_add_(2, back.clamp(0, self.suffix - 1), cut)
            self._take(rows.layer, offsets)

    def _take(self, layer: int, offsets: Float[Tensor, "head query offset"]) -> None:
        # In place of rows that are not there stand empty ones, which share nothing.
        before = self.before.get(layer, offsets.new_zeros(len(offsets), self.shift, self.suffix))
        both = torch.cat([before, offsets], 1)
        mass = offsets.sum(-1)
        share = offsets / mass[..., None].clamp_min(1e-12)
        width = torch.special.entr(share).sum(-1).exp()
        shared = torch.minimum(offsets, both[:, : -self.shift]).sum(-1)
        self.before[layer] = both[:, -self.shift :].clone()
        self.found[layer].append(torch.stack([mass, shared, width]).cpu())

    def tracks(self) -> dict[int, Track]:
        """What was seen, by layer."""
        return {layer: Track(*torch.cat(parts, 2)) for layer, parts in self.found.items()}
