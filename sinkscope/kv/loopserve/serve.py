"""LoopServe (Li et al. 2025, section 5): sparse attention for a new turn's prompt, progressive selection after it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Annotated, Any, Literal
from weakref import WeakKeyDictionary, WeakSet

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, Natural, Part, Whole, check_fields
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.cache import CacheLayer, Rotary
from sinkscope.kv.policy import At, Policy, register_policy
from sinkscope.kv.session import Moment, Session
from sinkscope.lines.choice import (
    HeadLines,
    Variant,
    attention_of,
    check_selection,
    draw_of,
    held_out,
    recovered,
    select_lines,
)
from sinkscope.lines.sparse import Kernel, Sparsity, dense_in_all, dense_limit, missing, sparse_attention
from sinkscope.trace.attention import Attention, View, stock_name

_FOLLOWERS: WeakKeyDictionary[Run, Callable[[int, int, HeadLines], None]] = WeakKeyDictionary()


def follow_lines(run: Run, fn: Callable[[int, int, HeadLines], None]) -> None:
    """Call `fn(layer, row, lines)` for every prompt row that is read along lines; a run has one such `fn`."""
    _FOLLOWERS[run] = fn


@dataclass(frozen=True, eq=False)
class SparsePrompts:
    """Reads prompts along lines, row by row, and logs an event of kind "prefill" for every row and layer.

    Attributes:
        name: Name of the intervention, for errors.
        choose: Function that returns lines for `query [head query d_head]`, `key [kv_head key d_head]`, the factor on
            the scores and the layer.
        dense_above: Share of computed cells above which a head is dense. None uses the kernel's default.
        shortest: Prompts with fewer keys are read by the model's own attention.
        dense_rows: Number of queries at the end that attend to everything.
        kernel: As for `sparse_attention`.
        in_blocks: Whether devices other than a CPU may use the loop over blocks. If not, prompts on devices without
            Triton are read by the model's own attention.
        held_out: Function of the numbers of queries and keys and the layer; it returns the indices of queries on which
            to measure how much attention the lines hold. None skips the measurement.
    """

    name: str
    choose: Callable[[Tensor, Tensor, float | None, int], HeadLines]
    dense_above: float | None = torch.inf
    shortest: int = 0
    dense_rows: int = 0
    kernel: Kernel = "auto"
    in_blocks: bool = True
    held_out: Callable[[int, int, int], Tensor] | None = None

    def enter(self, session: Session) -> None:
        """Replace the attention of prompts.

        Raises:
            UnsupportedError: The model is a TransformerBridge.
        """
        if session.target.kind == "bridge":
            more = "use prefill=False, or " if self.name == "LoopServe" else ""
            raise UnsupportedError(
                f"a TransformerBridge computes its own attention, so {self.name} cannot make prompts sparse on it: "
                f"{more}load the model with backend='hf'",
                page="kv-session",
            )
        session.replace_prefill(lambda prompt, kv: self._attend(prompt, kv, session))

    def _attend(self, prompt: Attention, kv: CacheLayer | None, session: Session) -> Tensor | None:
        call, rows, view = session.now.call, len(prompt.query), prompt.view
        assert call is not None and view is not None
        why = self._why_dense(prompt, view, kv)
        found: list[_Read | None] = [None] * rows
        made: dict[int, tuple[_Row, list[Tensor]]] = {}
        for row in range(rows) if why is None else ():
            if (part := _Row.of(prompt, row)) is not None:
                out, found[row], lines = self._row(part)
                made[row] = part, out
                if (follow := _FOLLOWERS.get(session.run)) is not None:
                    follow(prompt.layer, row, lines)
        step, at, layer = call.step, view.query_pos, prompt.layer
        counts = torch.stack([at.amax(1), (view.pos[:, 0] >= 0).sum(-1), (at >= 0).sum(-1)], 1)

        def events() -> list[Event]:
            told = [{"dense": why} if what is None else what.said() for what in found]
            return [
                Event(row, step, last, layer, None, "prefill", {"keys": keys, "queries": queries} | told[row])
                for row, (last, keys, queries) in enumerate(counts.tolist())
                if queries
            ]

        session.run.log(events)
        if why is not None or (_plain(prompt, session) and not any(parts for _, parts in made.values())):
            return None
        heads, queries = prompt.query.shape[1:3]
        whole = prompt.query.new_zeros(rows, queries, heads, prompt.value.shape[-1])
        for row, (part, parts) in made.items():
            out = [one.transpose(0, 1) for one in parts or [part.dense()]]
            if part.real is None:
                torch.cat(out, out=whole[row])
            else:
                whole[row, part.real] = torch.cat(out).to(whole.dtype)
        return whole

    def _row(self, row: _Row) -> tuple[list[Tensor], _Read, HeadLines]:
        """Attention of one row in consecutive parts (none if every head is dense), what was read, and the lines."""
        query, key, value = row.query, row.key, row.value
        heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        # A row is read as it would be alone, also if it shares a batch with longer prompts.
        whole = queries if keys < self.shortest else min(self.dense_rows, queries)
        if not whole:
            out, read, lines = self._along(row)
            if out is not None and read.recovered is not None:
                last = attention_of(query[:, -1:], key, torch.tensor([keys - 1], device=key.device), row.scaling)
                full = (last.unflatten(0, (len(value), -1))[:, :, 0] @ value.float()).flatten(0, 1)
                error = torch.linalg.vector_norm(out[:, -1] - full) / torch.linalg.vector_norm(full)
                read = replace(read, error=error)
            return [] if out is None else [out], read, lines
        every = torch.ones(heads, keys, dtype=torch.bool, device=query.device)
        last = HeadLines(every, every, whole)
        if whole == queries:
            what = dense_in_all(query, value, last, 0.0, "auto")
            assert what is not None
            return [], self._held(what, heads), last
        before, read, lines = self._along(row.before(whole))
        if before is None:
            return [], read, lines
        out, _ = sparse_attention(query[:, -whole:], key, value, last, scaling=row.scaling, dense_above=0.0)
        some, share = read.what, int(lines.lengths().sum())
        share = share / (share + int(last.lengths().sum()))
        cells, computed = (tuple(share * part + 1 - share for part in parts) for parts in (some.cells, some.computed))
        what = Sparsity(cells, computed, some.dense, some.kernel)
        return [before, out], replace(read, what=what), lines

    def _along(self, row: _Row) -> tuple[Tensor | None, _Read, HeadLines]:
        query, key, value, scaling, limit = row.query, row.key, row.value, row.scaling, self.dense_above
        lines = self.choose(query, key, scaling, row.layer)
        least = dense_limit(query.shape[-1], self.kernel, query.device) if limit is None else limit
        if (what := dense_in_all(query, value, lines, least, self.kernel)) is not None:
            return None, self._held(what, len(query)), lines
        out, what = sparse_attention(query, key, value, lines, scaling=scaling, dense_above=limit, kernel=self.kernel)
        if self.held_out is None or all(what.dense):
            return out, self._held(what, len(query)), lines
        rows = self.held_out(query.shape[1], key.shape[1], row.layer)
        held = recovered(query, key, lines, scaling, rows)
        held[torch.tensor(what.dense, device=held.device)] = 1.0
        return out, _Read(what, held), lines

    def _held(self, what: Sparsity, heads: int) -> _Read:
        """Shares held by dense heads, which lose nothing."""
        return _Read(what, None if self.held_out is None else torch.ones(heads))

    def _why_dense(self, prompt: Attention, view: View, kv: CacheLayer | None) -> str | None:
        """Why the model's own attention must be used or is better; None if lines are used."""
        keys, device = prompt.key.shape[2], prompt.query.device.type
        why = None
        if device != "cpu" and not self.in_blocks:
            why = missing(self.kernel, prompt.query[0], prompt.value[0])
        short = bool(((view.pos[:, 0] >= 0).sum(-1) < self.shortest).all())
        reasons = (
            (short, f"fewer than {self.shortest} keys"),
            (why is not None, f"on {device} without Triton: {why}"),
            (view.window is not None and keys > view.window, "sliding window"),
            (prompt.softcap is not None, "soft cap"),
            (prompt.sinks is not None, "learned sinks"),
            (kv is not None and kv.edited, "tokens were evicted"),
        )
        return next((why for holds, why in reasons if holds), None)


def _plain(prompt: Attention, session: Session) -> bool:
    """Whether the model's own attention is as fast as any for a prompt: it needs neither a mask nor a whole matrix."""
    view = prompt.view
    assert view is not None
    same = prompt.query.shape[2] == prompt.key.shape[2] and bool((view.query_pos >= 0).all())
    return same and not session.now.own_masks and stock_name(prompt.module.config) != "eager"


@dataclass(frozen=True, eq=False)
class _Row:
    """Queries, keys and values of one row of a prompt, without padding and holes.

    Attributes:
        real: Which of the padded queries these are. None means all.
    """

    query: Float[Tensor, "head query d_head"]
    key: Float[Tensor, "kv_head key d_head"]
    value: Float[Tensor, "kv_head key d_value"]
    scaling: float
    layer: int
    real: Bool[Tensor, " padded"] | None = None

    @classmethod
    def of(cls, prompt: Attention, row: int) -> _Row | None:
        """A row of a prompt; None if it is all padding."""
        view = prompt.view
        assert view is not None
        real, held = view.query_pos[row] >= 0, view.pos[row, 0] >= 0
        if not bool(real.any()):
            return None
        query, key, value = prompt.query[row], prompt.key[row], prompt.value[row]
        which: Tensor | None = None
        if not bool(real.all()):
            query, which = query[:, real], real
        if not bool(held.all()):
            key, value = key[:, held], value[:, held]
        return cls(query, key, value, prompt.scaling, prompt.layer, which)

    def before(self, last: int) -> _Row:
        """All but the last positions."""
        return replace(self, query=self.query[:, :-last], key=self.key[:, :-last], value=self.value[:, :-last])

    def dense(self) -> Float[Tensor, "head query d_value"]:
        """Attention to everything."""
        every = torch.ones(len(self.query), self.key.shape[1], dtype=torch.bool, device=self.key.device)
        lines = HeadLines(every, every, self.query.shape[1])
        return sparse_attention(self.query, self.key, self.value, lines, scaling=self.scaling, dense_above=0.0)[0]


@dataclass(frozen=True, eq=False)
class _Read:
    """How a row of a prompt was read in one layer, and what was lost: nothing where the last query is dense."""

    what: Sparsity
    recovered: Float[Tensor, " head"] | None = None
    error: Tensor | float = 0.0

    def said(self) -> dict[str, Any]:
        what = self.what
        attended = [1.0 if dense else cells for cells, dense in zip(what.cells, what.dense, strict=True)]
        mean = torch.tensor([what.cells, what.computed, attended]).mean(1).tolist()
        shares = {"cells": mean[0], "computed": mean[1], "attended": mean[2]}
        lost = {} if self.recovered is None else {"recovered": self.recovered.tolist(), "last_error": float(self.error)}
        return shares | {"dense_heads": sum(what.dense), "kernel": what.kernel} | lost


@dataclass(eq=False)
class _Reads:
    """Tokens of one cache that decoding steps attended to, per row, averaged over layers and kv heads."""

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
    """Tokens that a decoding step attends to, including its own, for each cache of the run and each of its rows.

    They are averaged over steps, layers and kv heads. The list is empty if the run has no `Progressive` or `LoopServe`.
    """
    record = _RECORDS.get(run)
    found = [] if record is None else record.reads
    return [(reads.total / reads.steps).tolist() for reads in found if reads.total is not None]


def said_of_prompts(name: str, run: Run) -> str:
    """One sentence on how much of the prompts' attention was computed."""
    shares = [event.data.get("attended", 1.0) for event in run.events if event.kind == "prefill"]
    return f"{name} computed {fmean(shares):.0%} of the attention of prompts." if shares else ""


def said_of_steps(name: str, run: Run) -> str:
    """One sentence on how much decoding steps read."""
    read = [tokens for rows in tokens_read(run) for tokens in rows]
    held = max((one.read_tokens for one in run.usage), default=0)
    return f"{name} read {fmean(read):,.0f} of up to {held:,} tokens in a decoding step." if read else ""


@register_policy("progressive")
@dataclass(frozen=True, kw_only=True)
class Progressive(Policy):
    """Read only the part of the cache that the latest queries attend to; choose it again every `every` tokens.

    Attributes:
        every: Tokens between selections, and number of queries that vote in each (n_d).
        after: Decoding steps before the first selection. With 16, these steps read everything, as in the paper's
            text. With 0, the last queries of the prompt select as soon as it has been read.
        mode: "select" keeps the whole cache. "evict" frees tokens that are not chosen; they cannot come back.
        gather: Copy the selected keys and values once per selection, so that the steps in between read and extend only
            the copy. `run.usage` counts the tokens of the whole cache, and the bytes of both. The cache is restored at
            the next turn and when the run ends. Without `gather` a mask hides the other tokens, which is slower.
        per_head: Every query head reads the tokens that it attends to most. By default, query heads that share a kv
            head read the same tokens: those with the highest mean attention. No copy is made with `per_head`.

    Raises:
        SinkscopeError: The interval is below 1, `after` is negative, or a setting of the base policy is invalid.
        UnsupportedError: Beam search reorders rows.

    Example:
        >>> Progressive(budget=1024).every
        16
    """

    every: Natural = 16
    after: Whole = 16
    mode: Literal["evict", "select"] = "select"
    gather: bool = True
    per_head: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.per_head and self.mode == "evict":
            raise SinkscopeError(f'{type(self).__name__}: per_head=True hides tokens: give mode="select"')

    @property
    def interval(self) -> int:
        """Tokens between selections."""
        return int(self.every)

    def enter(self, run: Run, key: int) -> None:
        """Enter like any policy; in addition, a new prompt sees the whole cache."""
        super().enter(run, key)
        record = _RECORDS.setdefault(run, _Record())
        Session.of(run).before_prompt(lambda moment: self._open(moment.layers))
        run.stack.callback(lambda: self._open(list(record.layers)))

    def summary(self, run: Run) -> str:
        """The tokens that a decoding step read, and those held in the cache."""
        return f"{said_of_steps(type(self).__name__, run)} {super().summary(run)}".strip()

    def watch(self, session: Session, key: int) -> None:
        """Keep the latest queries, also those of generated tokens."""
        session.window_queries(self.interval, decoding=True)

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Attention of the latest queries; padding does not vote."""
        return self.group(self._votes(at), at.kv.pos.shape[1])

    def _votes(self, at: At) -> Float[Tensor, "batch head slot"]:
        rows = at.session.window_rows(at.moment, at.layer, self.interval)
        real = at.moment.state.queries[at.layer][1][:, -self.interval :] >= 0
        return (real.to(rows)[:, None, None] @ rows)[:, :, 0]

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
            if self.per_head:
                votes = self._votes(at).unflatten(1, (kv.pos.shape[1], -1)).unbind(2)
                own = [self.select(each, at, budget) for each in votes]
                kv.select(torch.stack(own, 2).flatten(1, 2))
                continue
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
        """Record how many tokens are read from here on, before new ones arrive."""
        shown: list[Tensor] = []
        for kv in layers:
            shown.append(kv.readable.sum(-1).float().mean(1).to(layers[0].pos.device))
        memory["shown"], memory["at"] = torch.stack(shown).mean(0), at


class LoopServeDecoding(Progressive):
    """The decoding half of LoopServe; a class of its own, so that errors name what the user wrote."""


LoopServeDecoding.__name__ = "LoopServe"


@dataclass(frozen=True, kw_only=True)
class LoopServe(Intervention):
    """Choose lines of attention for every prompt and head, compute only those, and decode from part of the cache.

    A prompt is any call with several tokens. In a dialogue on one cache it consists of the new turn's tokens, which
    attend to the whole context along their own lines. With `alpha=1` and a budget that covers everything, the model's
    output does not change.

    The defaults are the settings that preserve the right answer with the fewest cells (docs/papers/loopserve.md).
    `LoopServe.paper()` uses the paper's settings.

    Every prompt logs an event of kind "prefill" per row and layer. Its `data` has "keys", "queries" and either "dense"
    (the reason why the model's own attention read it) or "cells" and "computed" (shares of the causal cells, mean over
    heads), "attended" (like "cells", but counting dense heads as 1), "dense_heads" (number of heads for which computing
    everything is faster) and "kernel" (what computed the others). It also has what was lost: "recovered", the share of
    the attention weight that each head's lines hold for 16 queries that were not sampled (1 for dense heads), and
    "last_error", the error of the layer's attention output at the last query, as a share of its norm (0 with
    `dense_rows`). If the mean of "recovered" over a run is below alpha, a warning says so at the end.
    `tokens_read` is the counterpart of "cells" for decoding.

    Attributes:
        alpha: Share of the sampled attention weight that the lines hold (0.955 in the paper's main results, which finds
            0.99 to 1 best in its own sweep).
        budget: Tokens that each layer and kv head reads while decoding, besides those since the last selection.
        interval: Tokens between selections, and number of queries that vote (n_d).
        sample: Number of queries whose attention decides which lines are chosen.
        recent: How many sampled queries are the last ones read along lines; the others are drawn at random.
        dense_rows: Number of queries at the end of the prompt that attend to everything. They are not sampled. With 0,
            as in the paper, keys to which only the end of the prompt attends may lie on no line, for instance the facts
            that a question is about.
        first: Number of initial decoding steps that read everything; 0 selects as soon as the prompt has been read.
        per_head: Whether every query head chooses its own tokens while decoding (`Progressive`).
        prefill: Read prompts sparsely. With `decode=False` this is the paper's "-P".
        decode: Select tokens progressively while decoding. With `prefill=False` this is the paper's "-D".
        variant: Variant of the choice of lines, "exact" or "faithful" (`select_lines`).
        shortest: Prompts that attend to fewer keys are read by the model's own attention, which is faster there.
        dense_above: Share of computed cells above which a head is computed densely. None means 0.65, less for heads
            narrower than 48, and 0.5 on CUDA. Other devices then read densely, because a loop over blocks does not pay
            there.
        kernel: What computes the lines: "blocks", "triton" or "auto" (`sparse_attention`).
        seed: Seed for drawing queries. Draws also depend on the layer and on the lengths of prompt and context, so they
            differ between the turns of a conversation.
        begin: Number of first tokens that all queries see. 1 in the paper.
        local: Number of latest tokens that a query sees, including itself. 1 in the paper. With fewer, a head that
            mostly attends to the first token may lose its neighbours, because the first token alone holds alpha.
        sharp: Lines on which the attention is at least this dense are taken even if alpha is reached (`select_lines`).
            None in the paper: a row may then lose a key that holds all its attention.
        checked: Number of queries outside the sample that are checked for a single sought key, which is then kept
            (`select_lines`). 0 in the paper: the key that one mid-prompt query searches for is then lost.

    Raises:
        SinkscopeError: alpha is outside (0, 1], an interval or sample is below 1, or a policy setting is wrong.
        UnsupportedError: Prompts are sparse and the model is a TransformerBridge, which computes attention itself.

    Example:
        >>> LoopServe(alpha=0.99, budget=512).interval
        16
    """

    budget: Budget = field(default=1024, kw_only=False)
    alpha: Part = 0.75
    interval: Natural = 16
    sample: Natural = 48
    recent: Whole = 0
    dense_rows: Whole = 16
    first: Whole = 16
    prefill: bool = True
    decode: bool = True
    variant: Variant = "exact"
    shortest: Whole = 2048
    dense_above: Annotated[float, Field(ge=0)] | None = None
    kernel: Kernel = "auto"
    seed: int = 0
    per_head: bool = False
    begin: Natural = 4
    local: Natural = 16
    sharp: Annotated[float, Field(gt=0)] | None = 0.1
    checked: Whole = 64

    def __post_init__(self) -> None:
        check_fields(self)
        check_selection(self.alpha, self.sample, self.variant, self.recent)
        if not self.prefill and not self.decode:
            raise SinkscopeError("prefill=False, decode=False: nothing would be done; leave one of them on")
        _ = self.decoding

    @classmethod
    def paper(cls, budget: int | float = 1024, **given: Any) -> LoopServe:
        """The paper's algorithm 5 with the paper's settings; values given here override them.

        Args:
            budget: As for the plain constructor.
            given: Other fields to set.

        Example:
            >>> LoopServe.paper(budget=512).variant
            'faithful'
        """
        printed: dict[str, Any] = {"alpha": 0.955, "dense_rows": 0, "variant": "faithful", "shortest": 0}
        printed |= {"begin": 1, "local": 1, "sharp": None, "checked": 0}
        return cls(budget, **(printed | given))

    @property
    def decoding(self) -> Progressive:
        """The policy of the decoding half."""
        return LoopServeDecoding(budget=self.budget, every=self.interval, after=self.first, per_head=self.per_head)

    def enter(self, run: Run, key: int) -> None:
        """Replace attention of prompts, and own the cache."""
        session = Session.of(run)
        if self.prefill and self.alpha < 1:
            limit = self.dense_above
            prompts = SparsePrompts(
                "LoopServe",
                self._lines,
                limit,
                self.shortest,
                self.dense_rows,
                self.kernel,
                limit is not None,
                lambda queries, keys, layer: held_out(queries, **self._draw(queries, keys, layer)),
            )
            prompts.enter(session)
            run.stack.callback(lambda: self._warn(run))
        if self.decode:
            self.decoding.enter(run, key)

    def _draw(self, queries: int, keys: int, layer: int) -> dict[str, int]:
        return {"sample": self.sample, "recent": self.recent, "seed": draw_of(self.seed, layer, queries, keys)}

    def _lines(self, query: Tensor, key: Tensor, scaling: float | None, layer: int) -> HeadLines:
        limit = self.dense_above
        limit = dense_limit(query.shape[-1], self.kernel, query.device) if limit is None else limit
        draw = self._draw(query.shape[1], key.shape[1], layer)
        more = {name: getattr(self, name) for name in ("variant", "begin", "local", "sharp", "checked")}
        return select_lines(query, key, self.alpha, **draw, **more, scaling=scaling, dense_above=limit)

    def summary(self, run: Run) -> str:
        """The share of attention that prompts computed, and the tokens that a decoding step read."""
        return " ".join(filter(None, [said_of_prompts("LoopServe", run), said_of_steps("LoopServe", run)]))

    def _warn(self, run: Run) -> None:
        """Warn if the lines of a run's prompts hold less than they should for queries that did not choose them."""
        held = [share for event in run.events for share in event.data.get("recovered", ())]
        if held and fmean(held) < self.alpha - 0.001:
            warnings.warn(
                f"outside of the sample, LoopServe's lines hold less of the attention than alpha={self.alpha}; events "
                'of kind "prefill" say how much for every head ("recovered"): give a larger alpha, or a larger sample',
                stacklevel=2,
            )
