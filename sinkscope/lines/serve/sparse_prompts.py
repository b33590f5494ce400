"""Prompts read along lines: sparse attention in place of the model's own, and what it lost (LoopServe, section 5.1)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.records import check_fields
from sinkscope.hooks.edit.base import Event, Intervention, Run
from sinkscope.hooks.edit.positions import Call
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.session import Session
from sinkscope.lines.attention import Scores, causal_cells, recovered
from sinkscope.lines.head_lines import HeadLines
from sinkscope.lines.sparse import Sparsity, all_dense, dense_attention, dense_limit, lack_of_library, sparse_attention
from sinkscope.tap.call import Attention
from sinkscope.tap.view import View


@dataclass(frozen=True, eq=False)
class PromptRow:
    """Queries, keys and values of one row of a prompt, without padding and holes.

    Attributes:
        scores: The parts of the scores.
        value: Values.
        layer: Decoder layer.
        real: Which of the padded queries these are; a slice if all are.
    """

    scores: Scores
    value: Float[Tensor, "kv_head key d_value"]
    layer: int
    real: Bool[Tensor, " padded"] | slice

    @classmethod
    def of(cls, prompt: Attention, view: View, row: int, whole: bool) -> PromptRow:
        """A row of a prompt, which is `whole` without padding and holes; it has no queries if it is all padding."""
        query, key, value = prompt.query[row], prompt.key[row], prompt.value[row]
        real = slice(None)
        if not whole:  # a choice by index copies
            real, occupied = view.query_pos[row] >= 0, view.pos[row, 0] >= 0
            query, key, value = query[:, real], key[:, occupied], value[:, occupied]
        return cls(Scores(query, key, prompt.scaling), value, prompt.layer, real)

    def without_last(self, count: int) -> PromptRow:
        """All but the last positions."""
        keys = self.scores.keys - count
        return replace(self, scores=self.scores.part(self.scores.past, keys), value=self.value[:, :keys])

    def cells(self) -> int:
        """Number of causal cells."""
        return causal_cells(self.scores.queries, self.scores.keys)

    def dense(self, queries: int) -> Float[Tensor, "head query d_value"]:
        """Attention of the last queries to everything."""
        return dense_attention(self.scores.part(self.scores.keys - queries, self.scores.keys), self.value)


@dataclass(frozen=True, eq=False)
class PromptRead:
    """How a row of a prompt was read in one layer, and what was lost.

    Attributes:
        sparsity: What was computed.
        output: What attention gives; None if every head is dense.
        recovered: Share of the attention of held-out queries that each head's lines hold; None if not measured.
        choice: Cells computed to choose lines and to measure what they hold, as a share of the causal cells.
    """

    sparsity: Sparsity
    output: Float[Tensor, "head query d_value"] | None
    recovered: Float[Tensor, " head"] | None
    choice: float

    def event_data(self) -> dict[str, Any]:
        """What the event of kind "prefill" says."""
        sparsity = self.sparsity
        attended: list[float] = []
        for cells, dense in zip(sparsity.cells, sparsity.dense, strict=True):
            attended.append(1.0 if dense else cells)
        data: dict[str, Any] = {
            "cells": fmean(attended) + self.choice,
            "computed": fmean(sparsity.computed) + self.choice,
            "attended": fmean(attended),
            "dense_heads": sum(sparsity.dense),
            "kernel": sparsity.kernel,
        }
        if self.recovered is not None:
            data["recovered"] = self.recovered.tolist()
        return data


class SparsePrompts(Intervention):
    """Base of interventions that read prompts along lines, row by row, and of no other call.

    A subclass is a frozen dataclass with the method `lines`; every row and layer of a prompt logs an event of kind
    "prefill".

    Attributes:
        dense_above: Share of computed cells above which a head is dense. None uses the kernel's default, and leaves
            prompts on devices without a kernel of their own to the model's attention.
        shortest: Prompts with fewer keys are read by the model's own attention.
        dense_rows: Number of queries at the end that attend to everything.
    """

    dense_above: float | None = torch.inf
    shortest: int = 0
    dense_rows: int = 0

    def __post_init__(self) -> None:
        check_fields(self)

    # To be written by a subclass ----------------------------------------------------------------------------------

    @abstractmethod
    def lines(self, scores: Scores, layer: int) -> HeadLines:
        """Lines along which queries of a layer attend."""

    def held_out(self, scores: Scores, layer: int) -> Int[Tensor, " row"] | None:
        """Queries on which to measure how much attention the lines hold; None: on none."""

    def pays(self, query: Float[Tensor, "head query d_head"], keys: int, flat: bool = False) -> bool:
        """Whether to look for lines; `flat` says whether every head was dense when that was last done in this cache."""
        return True

    @property
    def choice_rows(self) -> int:
        """Number of queries whose attention to all keys is computed in order to choose lines."""
        return 0

    # Done here ----------------------------------------------------------------------------------------------------

    def enter(self, run: Run, key: int) -> None:
        """Replace the attention of prompts."""
        session = Session.of(run)
        session.replace_prompts(type(self).__name__, lambda prompt, kv: self._attend(prompt, kv, session))

    def summary(self, run: Run) -> str:
        """How much of the prompts' attention was computed, or why all; "" if there was no prompt."""
        shares: list[float] = []
        reasons: list[str] = []
        for event in run.events:
            if event.kind == "prefill":
                shares.append(event.data.get("cells", 1.0))
                reasons.append(event.data.get("dense", ""))
        if not shares:
            return ""
        name = type(self).__name__
        if all(reasons):
            return f"{name} left prompts to the model's own attention: {', '.join(dict.fromkeys(reasons))}."
        return f"{name} computed {fmean(shares):.0%} of the attention of prompts, the choice of lines included."

    def _attend(
        self, prompt: Attention, kv: CacheLayer | None, session: Session
    ) -> Float[Tensor, "batch query head d_value"] | None:
        """Attention of a prompt in one layer; None if the model's own attention reads it."""
        call, view = session.now.call, prompt.view
        assert call is not None and view is not None
        flat: set[int] = set()  # layers in which no head had lines when they were last looked for
        if session.now.state is not None:
            flat = session.now.state.memory.setdefault("flat", flat)
        whole_rows = not call.tokens.padded and (kv is None or kv.gapless)
        why_dense = self.why_dense(prompt, view, kv, prompt.layer in flat)
        rows: dict[int, PromptRow] = {}
        reads: dict[int, PromptRead] = {}
        if why_dense is None:
            for number in range(len(prompt.query)):
                row = PromptRow.of(prompt, view, number, whole_rows)
                if not row.scores.queries:
                    continue
                rows[number] = row
                reads[number] = self.read(row)
        _log_prompt(session.run, call, prompt.layer, view, why_dense, reads)
        if why_dense is not None:
            return None
        flat.discard(prompt.layer)
        if all(read.output is None for read in reads.values()):
            flat.add(prompt.layer)
            if whole_rows and not session.now.own_masks and not prompt.is_eager:  # stock attention builds no matrix
                return None
        batch, heads, queries = prompt.query.shape[:3]
        whole = prompt.query.new_zeros(batch, queries, heads, prompt.value.shape[-1])
        for number, row in rows.items():
            output = reads[number].output
            if output is None:
                output = row.dense(row.scores.queries)
            whole[number, row.real] = rearrange(output, "head query d_value -> query head d_value").to(whole.dtype)
        return whole

    def read(self, row: PromptRow) -> PromptRead:
        """Read a row as it would be read alone, also if it shares a batch with longer prompts."""
        heads, queries, keys = row.scores.heads, row.scores.queries, row.scores.keys
        body = row.without_last(min(self.dense_rows, queries))
        held_out = self.held_out(body.scores, row.layer)
        shares = None if held_out is None else torch.ones(heads)
        if keys < self.shortest or queries <= self.dense_rows or not self.pays(body.scores.query, keys):
            return PromptRead(all_dense(heads), None, shares, 0.0)
        lines = self.lines(body.scores, row.layer)
        met = min(self.choice_rows, queries)  # queries that meet all keys besides attention
        if dense_limit(row.scores.query, keys, self.dense_above) < 1 and bool(lines.vertical.all()):
            return PromptRead(all_dense(heads), None, shares, met * keys / row.cells())
        output, sparsity = sparse_attention(body.scores, body.value, lines, dense_above=self.dense_above)
        if held_out is not None and not all(sparsity.dense):
            met += len(held_out)
            shares = recovered(body.scores, lines, held_out)
            shares.masked_fill_(torch.tensor(sparsity.dense, device=shares.device), 1.0)
        if self.dense_rows:
            output = torch.cat([output, row.dense(self.dense_rows)], 1)
            sparsity = _with_dense_end(sparsity, body.cells() / row.cells())
        return PromptRead(sparsity, output, shares, met * keys / row.cells())

    def why_dense(self, prompt: Attention, view: View, kv: CacheLayer | None, flat: bool) -> str | None:
        """Why the model's own attention must be used or is better; None if lines are used.

        `flat` says whether every head of the layer was dense when lines were last chosen.
        """
        keys = prompt.key.shape[2]
        if keys < self.shortest:
            return f"fewer than {self.shortest} keys"
        if not self.pays(prompt.query[0, :, self.dense_rows :], keys, flat):
            return f"{prompt.queries} new tokens are too few to pay for a choice of lines"
        why_no_kernel = lack_of_library(prompt.query.device)
        if why_no_kernel is not None:
            return f"on {prompt.query.device.type}: {why_no_kernel}"
        if view.window is not None and keys > view.window:
            return "sliding window"
        if prompt.softcap is not None:
            return "soft cap"
        if prompt.is_biased:
            return "position bias"
        if prompt.sinks is not None:
            return "learned sinks"
        if kv is not None and kv.edited:
            return "tokens were evicted"
        return None


def _log_prompt(
    run: Run, call: Call, layer: int, view: View, why_dense: str | None, reads: dict[int, PromptRead]
) -> None:
    """Log an event for every row that is not all padding."""
    last_pos = view.query_pos.amax(1)
    keys = (view.pos[:, 0] >= 0).sum(-1)
    queries = (view.query_pos >= 0).sum(-1)
    counts = torch.stack([last_pos, keys, queries], 1)

    def events() -> list[Event]:
        logged: list[Event] = []
        for row, (position, row_keys, row_queries) in enumerate(counts.tolist()):
            if not row_queries:
                continue
            data: dict[str, Any] = {"keys": row_keys, "queries": row_queries}
            data |= {"dense": why_dense} if row not in reads else reads[row].event_data()
            logged.append(Event(row, call.step, position, layer, None, "prefill", data))
        return logged

    run.log(events)


def _with_dense_end(sparsity: Sparsity, line_share: float) -> Sparsity:
    """What was computed, if all causal cells but this share were computed besides."""
    return replace(
        sparsity,
        cells=tuple(line_share * cells + 1 - line_share for cells in sparsity.cells),
        computed=tuple(line_share * computed + 1 - line_share for computed in sparsity.computed),
    )
