"""An observer of attention rows, for scripts and measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sinkscope.files.records import Natural, check_fields
from sinkscope.hooks.edit.base import Intervention, Run
from sinkscope.kv.attention_watch import AttentionRows
from sinkscope.kv.session import Session
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

    def __post_init__(self) -> None:
        check_fields(self)

    def enter(self, run: Run, key: int) -> None:
        """Watch."""
        layers = None if self.layers is None else attending_layers(run.target, self.layers)
        Session.of(run).watch(partial(self._show, run.target), layers, self.last)

    def _show(self, target: Target, rows: AttentionRows) -> None:
        if target.processes > 1:
            pos = target.whole_heads(rows.pos, target.n_kv_heads, 1)
            rows = replace(rows, probs=target.whole_heads(rows.probs, target.n_heads, 1), pos=pos)
        self.fn(rows)
