"""Attention of chosen heads over generation steps, kept as it comes: step x position, never query x key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.kv.session import Observe, Rows

Head = tuple[int, int]
"""(layer, query head)."""
NEAR_STEPS, NEAR = 96, 192  # steps at the end, and positions back, that are always kept one by one


class Recorder:
    """Takes the last row of every call of a single sequence.

    Memory: `steps x heads x bins` numbers of two bytes (raw: `steps x heads x positions` of four), and a window of
    the last `NEAR_STEPS` steps.
    """

    def __init__(
        self,
        heads: list[Head],
        steps: int,
        positions: int,
        bins: int | None,
        on_step: Callable[[int, Tensor], None] | None = None,
    ) -> None:
        """Make room.

        Args:
            heads: what to keep, by layer.
            steps: rows at most.
            positions: length of prompt and new tokens together.
            bins: columns; neighbouring positions are summed. None: a column per position.
            on_step: called with the step and the mean row over the heads kept, `[column]`.
        """
        self.heads, self.steps, self.positions, self.on_step = heads, steps, positions, on_step
        self.columns = positions if bins is None else min(bins, positions)
        self.dtype = torch.float32 if bins is None else torch.float16
        self.layers: dict[int, list[int]] = {}
        for layer, head in heads:
            self.layers.setdefault(layer, []).append(head)
        self.wide: dict[int, Tensor] = {}  # by layer: step head column
        self.near: dict[int, Tensor] = {}  # by layer: step (modulo NEAR_STEPS) head offset
        self.done = 0  # steps that are complete
        self._row: Tensor | None = None

    def observe(self) -> Observe:
        """The observer to enter."""
        return Observe(self.see, list(self.layers), last=1)

    def see(self, rows: Rows) -> None:
        """Keep the last query's row of the heads of one layer."""
        here, at = self.layers[rows.layer], rows.call.past + rows.call.index.shape[1] - 1
        if rows.layer not in self.wide:
            device = rows.probs.device
            self.wide[rows.layer] = torch.zeros(self.steps, len(here), self.columns, dtype=self.dtype, device=device)
            self.near[rows.layer] = torch.zeros(NEAR_STEPS, len(here), NEAR, device=device)
        step = rows.call.step
        if step >= self.steps:
            return
        groups = rows.probs.shape[1] // rows.pos.shape[1]
        pos = rows.pos[0].repeat_interleave(groups, 0)[here]
        probs = rows.probs[0, here, -1] * (pos >= 0)
        column = (pos.clamp(min=0) * self.columns) // self.positions
        wide = probs.new_zeros(len(here), self.columns).scatter_add_(1, column, probs)
        self.wide[rows.layer][step] = wide.to(self.dtype)
        back = at - pos
        near = probs.new_zeros(len(here), NEAR)
        near.scatter_add_(1, back.clamp(0, NEAR - 1), probs * (back < NEAR))
        self.near[rows.layer][step % NEAR_STEPS] = near
        self._told(rows.layer, step, wide)

    def _told(self, layer: int, step: int, wide: Tensor) -> None:
        last = layer == max(self.layers)
        if last:
            self.done = step + 1
        if self.on_step is None:
            return
        total = wide.sum(0).cpu()
        self._row = total if self._row is None else self._row + total
        if last:
            self.on_step(step, self._row / len(self.heads))
            self._row = None

    def array(self, head: Head) -> Float[Tensor, "step column"]:
        """All steps of one head."""
        layer, number = head
        return self.wide[layer][: self.done, self.layers[layer].index(number)].cpu()

    def recent(self, head: Head) -> Float[Tensor, "step offset"]:
        """The last steps of one head, in order, by how far a position lies behind the query."""
        layer, number = head
        first = max(0, self.done - NEAR_STEPS)
        order = [step % NEAR_STEPS for step in range(first, self.done)]
        return self.near[layer][order, self.layers[layer].index(number)].cpu()

    @property
    def nbytes(self) -> int:
        """What the arrays take."""
        kept: list[Any] = [*self.wide.values(), *self.near.values()]
        return sum(t.numel() * t.element_size() for t in kept)
