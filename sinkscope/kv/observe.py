"""For scripts and measurements: an observer of attention rows, and the removal of given tokens from the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from jaxtyping import Bool
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.files.records import Natural, check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.attention_rows import AttentionRows, RowWatcher, watch
from sinkscope.kv.keeper import CacheKeeper
from sinkscope.models.inputs import attending_layers
from sinkscope.models.target import Target


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

    fn: Callable[[AttentionRows], None]
    layers: Sequence[int] | None = None
    last: Natural | None = None

    ACTS: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_fields(self)

    def enter(self, run: Run, key: int) -> None:
        """Watch."""
        layers = None if self.layers is None else attending_layers(run.target, self.layers)
        watch(run, RowWatcher(partial(self._show, run.target), layers, self.last))

    def _show(self, target: Target, rows: AttentionRows) -> None:
        if target.processes > 1:
            pos = target.whole_heads(rows.pos, target.n_kv_heads, 1)
            rows = replace(rows, probs=target.whole_heads(rows.probs, target.n_heads, 1), pos=pos)
        self.fn(rows)


@dataclass(frozen=True, eq=False)
class RemoveTokens(Intervention):
    """Evict tokens of the prompt from every layer and head, before the first generated token is read.

    It chooses nothing itself, so it may be entered after a policy, and acts after it.

    Attributes:
        removed: Which true positions of each row go; all rows have prompts of this length.
    """

    removed: Bool[Tensor, "row pos"]

    def enter(self, run: Run, key: int) -> None:
        """Own the cache, and act when a prompt has ended."""
        CacheKeeper.of(run).watch_decoding()
        run.act(_Remover(self.removed))


@dataclass(frozen=True, eq=False)
class _Remover(Actor):
    """Evicts tokens when a prompt has ended."""

    removed: Bool[Tensor, "row pos"]

    def before(self, step: Step) -> None:
        """Evict."""
        if step.prefill_ended:
            for kv in step.layers:
                kv.evict_others(~self.removed)
