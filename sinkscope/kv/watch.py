"""What is shown of attention under a cache: rows of each call, to policies and observers; and given tokens removed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.files.records import Natural, check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.keeper import (
    CacheKeeper,
    check_seen,
    check_servable,
    note_layers,
)
from sinkscope.kv.slots import Slots
from sinkscope.models.grouped_heads import per_query_head
from sinkscope.models.inputs import attending_layers


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Attention rows of one layer in one call, for a chunk of queries.

    Attributes:
        layer: Decoder layer.
        first: Index of the first query among the call's new tokens.
        probs: `[batch head query slot]`, float32, after softmax.
        pos: Position of each slot in its row, -1 if it holds no token.
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
        """Position of each query in its row, -1 at padding."""
        return self.step.on(self.probs.device)[:, self.first : self.first + self.probs.shape[2]]

    def by_position(self, length: int) -> Float[Tensor, "batch head query pos"]:
        """Return the rows over the positions of a text of a length; a position that no slot holds gets nothing."""
        pos = per_query_head(self.pos, self.probs.shape[1])[:, :, None]
        by_position = self.probs.new_zeros(*self.probs.shape[:3], length)
        return by_position.scatter_add_(3, pos.clamp(min=0).expand_as(self.probs), self.probs * (pos >= 0))


Shown = Callable[[AttentionRows], None]
"""What is shown rows, one chunk of queries at a time."""


@dataclass(frozen=True, eq=False)
class _Watcher(Actor):
    """Shows attention rows to a function.

    Attributes:
        fn: The function.
        layers: Layers that it sees; None for all.
        last: How many of the last queries of a call it sees; None for all.
    """

    fn: Shown
    layers: Sequence[int] | None
    last: int | None

    def before(self, step: Step) -> None:
        """Refuse a cache on which attention cannot be seen."""
        if step.cache is not None:
            check_seen(step.cache)
            if not step.layers:  # another run may have cut this cache
                note_layers(step)

    def attends(self, step: Step) -> bool:
        """Return True: rows are wanted in every call."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Ask for the rows of a layer."""
        if self.layers is None or attention.layer in self.layers:
            first = 0 if self.last is None else max(0, attention.queries - self.last)
            attention.show(partial(self._show, step, attention), first=first)

    def _show(self, step: Step, attention: Attention, first: int, probs: Tensor) -> None:
        kv = step.by_number.get(attention.layer)
        pos = _positions(step, attention) if kv is None else kv.pos
        self.fn(AttentionRows(attention.layer, first, probs, pos, kv, step))


def watch(run: Run, fn: Shown, layers: Sequence[int] | None = None, last: int | None = None) -> None:
    """Show attention rows to a function in every call of a run: of some layers, of the `last` queries.

    Raises:
        UnsupportedError: The attention of the model cannot be observed.
    """
    check_servable(run.target)
    run.act(_Watcher(fn, layers, last))


def _positions(step: Step, attention: Attention) -> Int[Tensor, "batch kv_head slot"]:
    """The position of each slot of a cache that is not ours."""
    key = attention.key
    begin = attention.first_key
    end = attention.first_key + key.shape[2]
    columns = torch.nn.functional.pad(step.columns, (0, max(0, end - step.columns.shape[1])), value=-1)
    # "batch slot -> batch kv_head slot" as a view: masks are then computed once for all heads.
    return columns[:, begin:end].to(key.device)[:, None].expand(key.shape[:3])


@dataclass(frozen=True)
class Observe(Intervention):
    """Show attention rows to a function; no full query x key matrix is stored.

    In a single-token call, the output of a watched layer is computed from the rows that are shown, and equals the stock
    output up to rounding. In other calls, the model's own attention computes the output.

    Attributes:
        fn: Called with `AttentionRows`, one chunk of queries at a time.
        layers: Layers to watch. None watches all.
        last: How many of the last queries of each call to watch. None watches all.

    Of a model that is split over processes, the rows of all heads are shown in each.

    Example:
        >>> seen = []
        >>> watcher = Observe(lambda rows: seen.append(rows.probs.sum(-1)), layers=[0], last=1)
    """

    fn: Shown
    layers: Sequence[int] | None = None
    last: Natural | None = None

    ACTS: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def enter(self, run: Run, key: int) -> None:
        """Watch."""
        target = run.target

        def whole(rows: AttentionRows) -> None:
            pos = target.whole_heads(rows.pos, target.n_kv_heads, 1)
            self.fn(replace(rows, probs=target.whole_heads(rows.probs, target.n_heads, 1), pos=pos))

        layers = None if self.layers is None else attending_layers(target, self.layers)
        watch(run, whole if target.processes > 1 else self.fn, layers, self.last)


@dataclass(frozen=True, eq=False)
class RemoveTokens(Intervention, Actor):
    """Evict tokens of the prompt from every layer and head, before the first generated token is read.

    It chooses nothing itself, so it may be entered after a policy, and acts after it.

    Attributes:
        removed: Which true positions of each row go; all rows have prompts of this length.
    """

    removed: Bool[Tensor, "row pos"]

    def enter(self, run: Run, key: int) -> None:
        """Own the cache, and act when a prompt has ended."""
        CacheKeeper.of(run).watch_decoding(run)
        run.act(self)

    def before(self, step: Step) -> None:
        """Evict."""
        if step.prefill_ended:
            for kv in step.layers:
                kv.evict_others(~self.removed)
