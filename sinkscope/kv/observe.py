"""See attention while a model runs, prefill and decoding alike, with or without a cache policy beside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.session import Rows, Session


@dataclass(frozen=True)
class Observe(Intervention):
    """Show attention rows to a function; nothing of size query x key is kept.

    In a single-token call of a watched layer the output is computed from the rows that are shown (equal to the stock
    one up to rounding); elsewhere the model's own attention runs beside.

    Attributes:
        fn: called with `Rows`, some queries at a time.
        layers: only these; None: all.
        last: only the last queries of each call; None: all.

    Example:
        >>> seen = []
        >>> watcher = Observe(lambda rows: seen.append(rows.probs.sum(-1)), layers=[0], last=1)
    """

    fn: Callable[[Rows], None]
    layers: Sequence[int] | None = None
    last: int | None = None

    def __post_init__(self) -> None:
        if self.last is not None and self.last < 1:
            raise SinkscopeError(f"last={self.last}: expected a number of queries from 1, or None for all")

    def enter(self, run: Run, key: int) -> None:
        """Watch."""
        layers = None if self.layers is None else list(self.layers)
        for layer in layers or []:
            if not 0 <= layer < run.target.n_layers:
                raise SinkscopeError(f"layer {layer}: {run.target.name} has layers 0 to {run.target.n_layers - 1}")
        Session.of(run).watch(self.fn, layers, self.last)
