"""What is shown of attention under a cache: rows of each call, to policies and observers; and given tokens removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from jaxtyping import Bool
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention, AttentionRows, Shown
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.files.records import Natural, check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.keeper import CacheKeeper, check_seen, check_servable
from sinkscope.models.inputs import attending_layers


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
        check_seen(step)

    def attends(self, step: Step) -> bool:
        """Return True: rows are wanted in every call."""
        return True

    def attend(self, step: Step, attention: Attention) -> None:
        """Ask for the rows of a layer."""
        if self.layers is None or attention.layer in self.layers:
            first = 0 if self.last is None else max(0, attention.queries - self.last)
            attention.show(self.fn, step, first=first)


def watch(run: Run, fn: Shown, layers: Sequence[int] | None = None, last: int | None = None) -> None:
    """Show attention rows to a function in every call of a run: of some layers, of the `last` queries.

    Raises:
        UnsupportedError: The attention of the model cannot be observed.
    """
    check_servable(run.target)
    run.act(_Watcher(fn, layers, last))


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
            pos = target.whole_heads(cast("Tensor", rows.pos), target.n_kv_heads)
            self.fn(replace(rows, probs=target.whole_heads(rows.probs, target.n_heads), pos=pos))

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
