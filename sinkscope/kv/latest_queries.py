"""The latest queries of each layer, by whose attention a policy such as SnapKV scores what the cache holds.

The latest *real* queries of a row are kept: padding, which may stand at the end of a prompt or before a later turn,
asks nothing. What a query sees is kept as the model said it in the query's own call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention
from sinkscope.engine.step import Step
from sinkscope.engine.visible import Hidden, MaskSource, TensorMask, Visible
from sinkscope.kv.cache import CacheLayer
from sinkscope.models.grouped_heads import per_query_head


@dataclass(frozen=True, eq=False)
class Visibility:
    """What the queries from a column on see, as the model said it in their call.

    Attributes:
        first: The first column.
        source: Says who sees whom.
        hidden: What is hidden beside that.
        is_single: Whether the call read a single token.
    """

    first: int
    source: MaskSource
    hidden: tuple[Hidden, ...]
    is_single: bool


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """The latest queries of a layer, in the order of their columns; a row with fewer lacks the first of them.

    Attributes:
        query: Queries after rotary.
        column: Their columns; -1 where a row has no more.
        end: Number of columns when they were read; the columns are the last ones of all rows if they are `aligned`.
        aligned: Whether no padding was left out among them.
        visibility: What they see, for ascending first columns.
        module: The attention module.
        probs: Gives rows of queries and keys of the layer under a mask (`Attention.probs_function`).
    """

    query: Float[Tensor, "batch head query d_head"]
    column: Int[Tensor, "batch query"]
    end: int
    aligned: bool
    visibility: tuple[Visibility, ...]
    module: Any
    probs: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    @classmethod
    def of(cls, attention: Attention, step: Step, earlier: LayerQueries | None, count: int) -> LayerQueries:
        """Return the latest `count` real queries after an attention; `earlier`: those before it.

        They are copies: a part of the queries of a prompt would keep all of them in memory.
        """
        query, device, end = attention.query.detach(), attention.query.device, step.past + step.new
        column = torch.arange(step.past, end, device=device).expand(len(query), -1)
        aligned = not step.is_padded
        if not aligned:
            column = torch.where(step.on(device) >= 0, column, -1)
        visible = attention.visible
        source = visible.source.for_last(count if aligned else step.new)
        visibility = (Visibility(step.past, source, visible.hidden, step.new == 1),)
        if earlier is not None and earlier.end == step.past and (step.new < count or not aligned):
            query = torch.cat([earlier.query, query], 2)
            column = torch.cat([earlier.column.to(device), column], 1)
            visibility, aligned = _joined(earlier.visibility, visibility[0], count), aligned and earlier.aligned
        if aligned:
            query, column = query[:, :, -count:].clone(), column[:, -count:]
        else:
            query, column = _latest(query, column, count)
        return cls(query, column, end, aligned, visibility, attention.module, attention.probs_function())

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
        keys, at = kv.keys, self.column[:, -last:]
        if hasattr(self.module, "expand_kv"):  # the cache holds latent vectors, from which the module makes keys
            keys = self.module.expand_kv(kv.keys, kv.values)[0]
        query = self.query[:, :, -last:]
        columns = columns.to(at.device)
        if self.aligned:
            mask = self._mask_of(range(self.end - at.shape[1], self.end), columns)
        else:  # rows have queries in different columns
            masks: list[Tensor] = []
            for row, own in enumerate(at.tolist()):
                masks.append(self._mask_of(own, columns, row))
            mask = torch.cat(masks)
        rows = self.probs(query, keys, per_query_head(mask, query.shape[1]))
        return rows.mul_((at >= 0)[:, None, :, None])

    def _mask_of(self, at: Sequence[int], columns: Int[Tensor, "batch _ slot"], row: int | None = None) -> Tensor:
        """The mask of queries in these columns, run by run of neighbours of one call."""
        parts: list[Tensor] = []
        batch = len(columns)
        for visibility, run in self._runs(at):
            visible = Visible(visibility.source, run, columns, batch, columns.device, visibility.hidden)
            mask = visible.mask()
            parts.append(mask if row is None else mask[row : row + 1])
        return torch.cat(parts, 2)

    def _runs(self, at: Sequence[int]) -> list[tuple[Visibility, range]]:
        """Runs of neighbouring columns, each with what its queries see; each query that a row lacks is its own run."""
        runs: list[tuple[Visibility, range]] = []
        for column in at:
            visibility = self.visibility[0]
            for later in self.visibility:
                if later.first <= column:
                    visibility = later
            if runs and runs[-1][0] is visibility and runs[-1][1].stop == column:
                runs[-1] = (visibility, range(runs[-1][1].start, column + 1))
            else:
                column = max(column, visibility.first)
                runs.append((visibility, range(column, column + 1)))
        return runs


def _joined(earlier: tuple[Visibility, ...], latest: Visibility, count: int) -> tuple[Visibility, ...]:
    """What queries of several calls see; generated tokens that see by one function need it once."""
    before = earlier[-1]
    both = before.is_single and latest.is_single and type(before.source) is type(latest.source)
    if both and not isinstance(latest.source, TensorMask):
        return (*earlier[:-1], replace(latest, first=before.first))
    return (*earlier, latest)[-count - 2 :]


def _latest(
    query: Float[Tensor, "batch head n d_head"], column: Int[Tensor, "batch n"], count: int
) -> tuple[Float[Tensor, "batch head count d_head"], Int[Tensor, "batch count"]]:
    """The last `count` queries that are real, of every row."""
    order = (column >= 0).int().argsort(dim=1, stable=True)[:, -count:]
    index = order[:, None, :, None].expand(-1, query.shape[1], -1, query.shape[3])
    return query.gather(2, index), column.gather(1, order)


@dataclass(eq=False)
class LatestQueries:
    """The latest queries of each layer; it lies on the cache, and moves with its rows.

    Attributes:
        by_layer: The queries of each layer.
    """

    by_layer: dict[int, LayerQueries] = field(default_factory=dict)

    def take(self, rows: Int[Tensor, " row"]) -> LatestQueries:
        """Return those of other rows of the batch, by their numbers."""
        return LatestQueries({layer: queries.take(rows) for layer, queries in self.by_layer.items()})

    def __deepcopy__(self, memo: object) -> LatestQueries:
        """Return another dictionary of the same queries, which never change: a copy would copy modules as well."""
        return LatestQueries(dict(self.by_layer))


@dataclass(eq=False)
class QueryKeeper(Actor):
    """Keeps the latest queries of each layer.

    Attributes:
        count: How many.
        keeps_decoding: Whether those of generated tokens are kept, too.
    """

    count: int = 0
    keeps_decoding: bool = False
    KEY: ClassVar[str] = "latest queries"

    def attends(self, step: Step) -> bool:
        """Return whether queries of the call are kept."""
        return step.new > 1 or step.state.prefilling or self.keeps_decoding

    def attend(self, step: Step, attention: Attention) -> None:
        """Keep the queries of a layer."""
        if attention.is_repeated or not self.attends(step):
            return
        latest = step.state.of_actors.get(self.KEY)
        if not isinstance(latest, LatestQueries):
            latest = step.state.of_actors[self.KEY] = LatestQueries()
        earlier = latest.by_layer.get(attention.layer)
        latest.by_layer[attention.layer] = LayerQueries.of(attention, step, earlier, self.count)
