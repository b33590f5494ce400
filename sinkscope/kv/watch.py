"""What is seen of attention under a cache: rows of each call, the latest queries, and given tokens removed.

By the attention of the latest queries a policy such as SnapKV scores what the cache holds. The latest *real* queries of
a row are kept: padding, which may stand at the end of a prompt or before a later turn, asks nothing. What a query sees
is what the function of the latest mask says of its column.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention, Shown
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.engine.tap import of_all_heads
from sinkscope.engine.visible import Hidden, MaskSource, Visible
from sinkscope.files.records import Natural, check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.keeper import LATEST_QUERIES, CacheKeeper, check_seen, check_servable
from sinkscope.models.inputs import attending_layers
from sinkscope.models.layers import per_query_head
from sinkscope.models.quirks import keys_of


@dataclass(frozen=True)
class Observe(Intervention, Actor):
    """Show attention rows to a function; no full query x key matrix is stored.

    In a single-token call, the output of a watched layer is computed from the rows that are shown, and equals the stock
    output up to rounding. In other calls, the model's own attention computes the output. A policy that needs attention
    lets it act by itself, `run.act(Observe(self.fn))`.

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
        """Watch.

        Raises:
            UnsupportedError: The attention of the model cannot be observed.
        """
        check_servable(run.target)
        layers = None if self.layers is None else attending_layers(run.target, self.layers)
        run.act(Observe(of_all_heads(run.target, self.fn), layers, self.last))

    def before(self, step: Step) -> None:
        """Refuse a cache on which attention cannot be seen."""
        check_seen(step)

    def attends(self, step: Step) -> bool:
        """Return True: rows are wanted in every call."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Ask for the rows of a layer."""
        if self.layers is None or attention.layer in self.layers:
            first = 0 if self.last is None else max(0, attention.queries - self.last)
            attention.show(self.fn, step, first=first)


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


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """The latest queries of a layer, in the order of their columns; a row with fewer lacks the first of them.

    Attributes:
        query: Queries after rotary.
        column: Their columns; -1 where a row has no more.
        end: Number of columns when they were read.
        source: Says who sees whom, as the model said it in the latest call.
        hidden: What is hidden beside that.
        module: The attention module.
        probs: Gives rows of queries and keys of the layer under a mask (`Attention.probs_function`).
    """

    query: Float[Tensor, "batch head query d_head"]
    column: Int[Tensor, "batch query"]
    end: int
    source: MaskSource
    hidden: tuple[Hidden, ...]
    module: Any
    probs: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def of(cls, attention: Attention, step: Step, earlier: LayerQueries | None, count: int) -> LayerQueries:
        """Return the latest `count` real queries after an attention; `earlier`: those before it.

        They are copies: a part of the queries of a prompt would keep all of them in memory.
        """
        query = attention.query.detach()
        end = step.past + step.new
        column = torch.arange(step.past, end, device=query.device).expand(len(query), -1)
        if step.new > 1:  # a single one is real
            column = torch.where(step.on(query.device) >= 0, column, -1)
            query, column = _latest(query, column, count)
        if earlier is not None and earlier.end == step.past:
            query = torch.cat([earlier.query, query], 2)
            column = torch.cat([earlier.column.to(query.device), column], 1)
            if step.new > 1:
                query, column = _latest(query, column, count)
        query = query[:, :, -count:].clone()
        column = column[:, -count:]
        hidden = tuple(attention.hidden)
        return cls(query, column, end, attention.source, hidden, attention.module, attention.probs_function())

    def take(self, rows: Int[Tensor, " row"]) -> LayerQueries:
        """Return those of other rows of the batch, by their numbers."""
        rows = rows.to(self.query.device)
        return replace(self, query=self.query[rows], column=self.column[rows])

    def rows(
        self, kv: CacheLayer, columns: Int[Tensor, "batch _ slot"], last: int
    ) -> Float[Tensor, "batch head query slot"]:
        """Return the attention of the `last` ones to what a layer holds, in float32; 0 where a row has fewer.

        Args:
            kv: The layer.
            columns: Columns of its slots.
            last: Number of queries.
        """
        keys = keys_of(self.module, kv.keys, kv.values)
        at = self.column[:, -last:]
        query = self.query[:, :, -last:]
        by_head = per_query_head(columns.to(at.device), query.shape[1])
        visible = Visible(self.source, at.clamp(min=0), by_head, self.hidden, by_slot=True)
        rows = self.probs(query, keys, visible.mask())
        return rows.mul_((at >= 0)[:, None, :, None])


def _latest(
    query: Float[Tensor, "batch head query d_head"], column: Int[Tensor, "batch query"], count: int
) -> tuple[Float[Tensor, "batch head _ d_head"], Int[Tensor, "batch _"]]:
    """The last of the real queries of each row, and their columns; padding (-1) before them if a row has fewer."""
    order = (column >= 0).int().argsort(dim=1, stable=True)[:, -count:]
    index = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
    return query.gather(2, index), column.gather(1, order)


@dataclass(eq=False)
class LatestQueries:
    """The latest queries of each layer; it lies on the cache, and moves with its rows.

    Attributes:
        by_layer: The queries of each layer.
        nbytes: Bytes of the queries; their columns, which every process of a split model has, are few.
    """

    by_layer: dict[int, LayerQueries] = field(default_factory=dict)
    nbytes: int = 0

    def take(self, rows: Int[Tensor, " row"]) -> LatestQueries:
        """Return those of other rows of the batch, by their numbers."""
        return LatestQueries({layer: queries.take(rows) for layer, queries in self.by_layer.items()}, self.nbytes)

    def __deepcopy__(self, memo: object) -> LatestQueries:
        """Return another dictionary of the same queries, which never change: a copy would copy modules as well."""
        return LatestQueries(dict(self.by_layer), self.nbytes)


@dataclass(eq=False)
class QueryKeeper(Actor):
    """Keeps the latest queries of each layer.

    Attributes:
        count: How many.
        keeps_decoding: Whether those of generated tokens are kept, too.
    """

    count: int = 0
    keeps_decoding: bool = False

    def attends(self, step: Step) -> bool:
        """Return whether queries of the call are kept."""
        return step.new > 1 or step.state.prefilling or self.keeps_decoding

    def attend(self, step: Step, attention: Attention) -> None:
        """Keep the queries of a layer."""
        if not attention.is_repeated:
            known = step.state.known.setdefault(LATEST_QUERIES, LatestQueries())
            earlier = known.by_layer.get(attention.layer)
            latest = LayerQueries.of(attention, step, earlier, self.count)
            known.by_layer[attention.layer] = latest
            known.nbytes += latest.query.nbytes - (0 if earlier is None else earlier.query.nbytes)


def keep_queries(run: Run, last: int, decoding: bool = False) -> None:
    """Keep the `last` queries of prompts for `LayerMoment.window_rows`; with `decoding`, generated tokens too."""
    keeper = next((actor for actor in run.acting["attends"] if isinstance(actor, QueryKeeper)), None)
    if keeper is None:
        keeper = QueryKeeper()
        run.act(keeper)
    keeper.count = max(keeper.count, last)
    keeper.keeps_decoding |= decoding
