"""Attention rows of a call, as policies and observers see them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.kv.adopt import check_seen, own_layers
from sinkscope.kv.keeper import layer_of, note_gaps, place_keys
from sinkscope.kv.slots import Slots
from sinkscope.kv.windows import check_servable
from sinkscope.models.grouped_heads import per_query_head


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention rows of one layer in one call, for a chunk of queries.

    Attributes:
        layer: Decoder layer.
        first: Index of the first query among the call's new tokens.
        probs: `[batch head query slot]`, float32, after softmax.
        pos: Position of each slot in its document, -1 if it holds no token.
        kv: The layer's cache; None if it is not a sinkscope cache.
        step: The forward call.
    """

    layer: int
    first: int
    probs: Float[Tensor, "batch head query slot"]
    pos: Int[Tensor, "batch kv_head slot"]
    kv: Slots | None
    step: Step

    @property
    def query_pos(self) -> Int[Tensor, "batch query"]:
        """Position of each query in its document, -1 at padding."""
        return self.step.on(self.probs.device)[:, self.first : self.first + self.probs.shape[2]]

    def by_position(self, length: int) -> Float[Tensor, "batch head query pos"]:
        """Return the rows over the positions of a text of a length; a position that no slot holds gets nothing."""
        pos = per_query_head(self.pos, self.probs.shape[1])[:, :, None]
        by_position = self.probs.new_zeros(*self.probs.shape[:3], length)
        return by_position.scatter_add_(3, pos.clamp(min=0).expand_as(self.probs), self.probs * (pos >= 0))


@dataclass(frozen=True, eq=False)
class RowWatcher(Actor):
    """Shows attention rows to a function.

    Attributes:
        fn: The function.
        layers: Layers that it sees; None for all.
        last: How many of the last queries of a call it sees; None for all.
    """

    fn: Callable[[AttentionRows], None]
    layers: list[int] | None = None
    last: int | None = None

    def before(self, step: Step) -> None:
        """Refuse a cache on which attention cannot be seen."""
        if step.cache is not None:
            check_seen(step.cache)
            if not step.layers:  # another block may have cut this cache
                for kv in own_layers(step.cache):
                    step.layers.append(kv)
                    kv.upcoming = step.tokens
                note_gaps(step)

    def attends(self, step: Step) -> bool:
        """Return True: rows are wanted in every call."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Ask for the rows of a layer."""
        if self.layers is None or attention.layer in self.layers:
            if step.has_gaps and not attention.lacks_keys:
                place_keys(step, attention)
            first = 0 if self.last is None else max(0, attention.queries - self.last)
            attention.show(partial(self._show, step, attention), first=first)

    def _show(self, step: Step, attention: Attention, first: int, probs: Tensor) -> None:
        kv = layer_of(step, attention.layer)
        pos = _positions(step, attention) if kv is None else kv.pos
        self.fn(AttentionRows(attention.layer, first, probs, pos, kv, step))


def watch(run: Run, watcher: RowWatcher) -> None:
    """Show attention rows to a function in every call of a block.

    Raises:
        UnsupportedError: The attention of the model cannot be observed.
    """
    check_servable(run.target)
    run.act(watcher)


def _positions(step: Step, attention: Attention) -> Int[Tensor, "batch kv_head slot"]:
    """The position of each slot of a cache that is not ours."""
    key = attention.key
    begin, end = attention.first_key, attention.first_key + key.shape[2]
    columns = torch.nn.functional.pad(step.columns, (0, max(0, end - step.columns.shape[1])), value=-1)
    # "batch slot -> batch kv_head slot" as a view: masks are then computed once for all heads.
    return columns[:, begin:end].to(key.device)[:, None].expand(key.shape[:3])
