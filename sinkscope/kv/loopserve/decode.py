"""Progressive selection while decoding (Li et al. 2025, LoopServe, section 5.2 and algorithm 6).

The paper leaves some points open, which are settled here. The first 16 decoding steps read everything, as its text
says; line 3 of the algorithm would select at once with an interval of 16. Tokens since the last selection are always
read; the budget covers all tokens before them, generated ones included. Each kv head has one selection, from the mean
over its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.policy import At, Policy, check_fields
from sinkscope.kv.rebase import Rotary
from sinkscope.kv.registry import register_policy
from sinkscope.kv.session import Moment, Session


@dataclass(eq=False)
class _Reads:
    """Tokens of one cache that decoding steps attended to, per row, mean over layers and kv heads."""

    steps: int = 0
    total: Float[Tensor, " batch"] | None = None

    def add(self, read: Float[Tensor, " batch"]) -> None:
        if self.total is not None and len(self.total) != len(read):  # rows were multiplied or chosen: start again
            self.steps, self.total = 0, None
        self.steps, self.total = self.steps + 1, read if self.total is None else self.total + read


@dataclass(eq=False)
class _Record:
    reads: list[_Reads] = field(default_factory=list)
    layers: WeakSet[CacheLayer] = field(default_factory=WeakSet)


_RECORDS: WeakKeyDictionary[Run, _Record] = WeakKeyDictionary()


def tokens_read(run: Run) -> list[list[float]]:
    """Tokens that a decoding step attends to, its own included, for each cache of the run and each of its rows.

    They are means over steps, layers and kv heads. The list is empty if the run has no `Progressive` or `LoopServe`.
    """
    record = _RECORDS.get(run)
    found = [] if record is None else record.reads
    return [(reads.total / reads.steps).tolist() for reads in found if reads.total is not None]


@register_policy("progressive")
@dataclass(frozen=True, kw_only=True)
class Progressive(Policy):
    """Read only the part of the cache that the latest queries attend to, chosen again after every `every` tokens.

    Attributes:
        every: tokens between selections, and number of queries that vote in each (n_d).
        after: decoding steps before the first selection. 16: these steps read everything, as in the paper's text. 0:
            the last queries of the prompt select when it has been read.
        mode: "select" keeps the whole cache. "evict" frees tokens that are not chosen; they cannot come back.
        gather: copy the selected keys and values once per selection, so that the steps between read and append to the
            copy only. `run.usage` counts the tokens of the whole cache, and the bytes of both. The cache is whole again
            at the next turn and when the run ends. Without `gather` a mask hides the other tokens, which takes longer.

    Raises:
        SinkscopeError: an interval below 1, a negative `after`, and as for every policy.
        UnsupportedError: beam search, as soon as it exchanges rows.

    Example:
        >>> Progressive(budget=1024).every
        16
    """

    every: int | Literal["prefill"] = 16
    after: int = 16
    mode: Literal["evict", "select"] = "select"
    gather: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.every == "prefill" or self.every < 1 or self.after < 0:
            raise SinkscopeError(
                f"{type(self).__name__}: every={self.every!r}, after={self.after}: expected an interval from 1 and a "
                "number of steps from 0"
            )
        super().__post_init__()

    @property
    def interval(self) -> int:
        """Tokens between selections."""
        return int(self.every)

    def enter(self, run: Run, key: int) -> None:
        """Enter as every policy does; besides, a new prompt sees the whole cache."""
        super().enter(run, key)
        record = _RECORDS.setdefault(run, _Record())
        Session.of(run).before_prompt(lambda moment: self._open(moment.layers))
        run.stack.callback(lambda: self._open(list(record.layers)))

    def watch(self, session: Session, key: int) -> None:
        """Keep the latest queries, also those of generated tokens."""
        session.window_queries(self.interval, decoding=True)

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Attention of the latest queries; padding does not vote."""
        rows = at.session.window_rows(at.moment, at.layer, self.interval)
        real = at.moment.state.queries[at.layer][1][:, -self.interval :] >= 0
        votes = (real.to(rows)[:, None, None] @ rows)[:, :, 0]
        return self.group(votes, at.kv.pos.shape[1])

    def _act(self, moment: Moment, session: Session, key: int, rotary: Rotary | None) -> None:
        state, layers = moment.state, moment.layers
        assert state.prompt is not None
        record = _RECORDS[session.run]
        memory = state.memory.setdefault(key, {})
        if moment.prefill_ended:
            if "reads" not in memory:
                memory["reads"] = _Reads()
                record.reads.append(memory["reads"])
            memory["budget"], memory["reorders"] = self.tokens(state.prompt), layers[0].reorders
            record.layers.update(layers)
            self._count(memory, layers, 0)
        if layers[0].reorders != memory["reorders"]:
            raise UnsupportedError(
                f"beam search lets rows change places, and {type(self).__name__} follows the latest queries of each "
                "row: use num_beams=1",
                page="kv-session",
            )
        since = state.decoded - self.after
        # A guard may have cut the cache, for which it had to be whole.
        lost = memory.get("copied", False) and all(kv.aside is None for kv in layers)
        if (since >= 0 and since % self.interval == 0) or lost:
            self._choose(moment, session, memory)
            self._count(memory, layers, state.decoded)
        memory["reads"].add(memory["shown"] + (state.decoded - memory["at"] + 1))

    def _choose(self, moment: Moment, session: Session, memory: dict[Any, Any]) -> None:
        self._open(moment.layers)
        memory["copied"] = False
        budget = memory["budget"]
        least = budget if isinstance(budget, int) else int(budget.min())
        for number, kv in enumerate(moment.layers):
            if kv.slots <= least:
                continue
            at = At(number, kv, moment, session, memory)
            keep = self.select(self.checked_scores(at), at, budget)
            if self.mode == "evict":
                kv.evict(keep)
            elif self.gather:
                kv.work_on(keep)
                memory["copied"] = True
            else:
                kv.select(keep)

    def _open(self, layers: list[CacheLayer]) -> None:
        """Make everything in the cache readable."""
        for kv in layers:
            kv.settle()
            if self.mode == "select" and kv.hidden is not None:
                kv.select(None)

    def _count(self, memory: dict[Any, Any], layers: list[CacheLayer], at: int) -> None:
        """Note how many tokens are read from here on, before new ones come."""
        shown: list[Tensor] = []
        for kv in layers:
            shown.append(kv.readable.sum(-1).float().mean(1).to(layers[0].pos.device))
        memory["shown"], memory["at"] = torch.stack(shown).mean(0), at
