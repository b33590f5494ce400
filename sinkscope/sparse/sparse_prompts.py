"""Prompts read along lines: sparse attention in place of the model's own, and what it lost (LoopServe, section 5.1)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.files.records import check_fields
from sinkscope.hooks.call import Call
from sinkscope.hooks.edit.base import Event, Intervention, Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.cache_state import Moment
from sinkscope.kv.session import Session
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Bands, BlockGrid
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.devices import lack_of_library, triton_module
from sinkscope.sparse.head_lines import HeadLines
from sinkscope.sparse.prompt_calls import PromptCall, PromptCalls
from sinkscope.sparse.sample import Copies
from sinkscope.sparse.sparse import band_attention, line_attention
from sinkscope.sparse.sums import recovered
from sinkscope.tap.call import Attention, View


@dataclass(frozen=True, eq=False)
class PromptRow:
    """Queries, keys and values of one row of a prompt, without padding and holes.

    Attributes:
        scores: The parts of the scores.
        value: Values.
        layer: Decoder layer.
        real: Which of the padded queries these are; a slice if all are.
        number: Number of the row in its batch.
        copies: Where the text copies itself; None if the ids are not known.
    """

    scores: Scores
    value: Float[Tensor, "kv_head key d_value"]
    layer: int
    real: Bool[Tensor, " padded"] | slice
    number: int
    copies: Copies | None

    @classmethod
    def of(cls, prompt: Attention, view: View, row: int, whole: bool, copies: Copies | None) -> PromptRow:
        """Return a row of a prompt, which is `whole` without padding and holes.

        It has no queries if it is all padding.
        """
        query, key, value = prompt.query[row], prompt.key[row], prompt.value[row]
        real = slice(None)
        if not whole:  # a choice by index copies
            real, occupied = view.query_pos[row] >= 0, view.pos[row, 0] >= 0
            query, key, value = query[:, real], key[:, occupied], value[:, occupied]
        return cls(Scores(query, key, prompt.scaling), value, prompt.layer, real, row, copies)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The lines of a row of a prompt in one layer.

    Attributes:
        lines: Lines, or columns and bands.
        attended: Share of the causal cells from which each head computes its output.
        dense: Whether each head computes all of them.
        lists: What `triton.lists_of` gives for columns and bands, if it is known.
    """

    lines: HeadLines | Bands
    attended: Float[Tensor, " head"]
    dense: Bool[Tensor, " head"]
    lists: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, lines: HeadLines | Bands) -> Chosen:
        """Return these lines with their numbers."""
        return cls(lines, lines.attended(), lines.dense)


@dataclass(frozen=True, eq=False)
class PromptRead:
    """How a row of a prompt was read in one layer; numbers stay on the device until they are asked for.

    Attributes:
        attended: Share of the causal cells from which each head computed its output.
        dense: Whether each head computed all of them.
        kernel: What computed the others: "blocks", "triton" or "mask".
        output: What attention gives.
        recovered: Share of the attention of held-out queries that each head's lines hold; None if not measured.
        choice: Cells computed to choose lines and to measure what they hold, as a share of the causal cells.
    """

    attended: Float[Tensor, " head"]
    dense: Bool[Tensor, " head"]
    kernel: str
    output: Float[Tensor, "head query d_value"]
    recovered: Float[Tensor, " head"] | None
    choice: float

    def event_data(self) -> dict[str, Any]:
        """Return what the event of kind "prefill" says."""
        attended = fmean(self.attended.tolist())
        data: dict[str, Any] = {
            "cells": attended + self.choice,
            "attended": attended,
            "dense_heads": int(self.dense.sum()),
            "kernel": self.kernel,
        }
        if self.recovered is not None:
            data["recovered"] = self.recovered.tolist()
        return data


class SparsePrompts(Intervention):
    """Base of interventions that read prompts along lines, row by row, and of no other call.

    A subclass is a frozen dataclass with the method `lines`; every row and layer of a prompt logs an event of kind
    "prefill".
    """

    def __post_init__(self) -> None:
        check_fields(self)

    # To be written by a subclass ----------------------------------------------------------------------------------

    @abstractmethod
    def lines(self, scores: Scores, layer: int, copies: Copies | None = None) -> HeadLines | Bands:
        """Return lines along which queries of a layer attend, or columns and bands; some queries are at copies."""

    def chosen(self, row: PromptRow, call: PromptCall) -> Chosen:
        """Return the lines of a row with their numbers, which a later layer of the call may overwrite."""
        return Chosen.of(self.lines(row.scores, row.layer, row.copies))

    def held_out(self, scores: Scores, layer: int, copies: Copies | None = None) -> Int[Tensor, " row"] | None:
        """Queries on which to measure how much attention the lines of a layer hold; None: on none."""

    def too_short(self, queries: int, keys: int, device: torch.device) -> str | None:
        """Why a prompt is too short for lines; None if it is not."""

    @property
    def choice_rows(self) -> int:
        """Number of queries whose attention to all keys is computed in order to choose lines."""
        return 0

    # Done here ----------------------------------------------------------------------------------------------------

    def enter(self, run: Run, key: int) -> None:
        """Replace the attention of prompts."""
        session, calls = Session.of(run), PromptCalls(run, key)
        name = type(self).__name__
        session.replace_prompts(name, lambda prompt, moment: self._attend(prompt, moment, run, calls))

    def summary(self, run: Run) -> str:
        """Return how much of the prompts' attention was computed, or why all; "" if there was no prompt."""
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
        self, prompt: Attention, moment: Moment, run: Run, calls: PromptCalls
    ) -> Float[Tensor, "batch query head d_value"] | None:
        """Attention of a prompt in one layer; None if the model's own attention reads it."""
        call, view, kv = moment.call, prompt.view, moment.layer(prompt.layer)
        assert view is not None
        whole_rows = not call.tokens.padded and (kv is None or kv.gapless)
        why_dense = self.why_dense(prompt, view, kv)
        counts = calls.of(call).counts_of(view)
        if why_dense is not None:
            _log_prompt(run, call, prompt.layer, counts, why_dense, {})
            return None
        rows: dict[int, PromptRow] = {}
        reads: dict[int, PromptRead] = {}
        for number in range(len(prompt.query)):
            copies = calls.copies(call, number, prompt.key.device)
            row = PromptRow.of(prompt, view, number, whole_rows, copies)
            if row.scores.queries:
                rows[number], reads[number] = row, self.read(row, calls.of(call))
        _log_prompt(run, call, prompt.layer, counts, None, reads)
        if whole_rows and len(reads) == 1:
            return rearrange(reads[0].output, "head query d_value -> 1 query head d_value")
        batch, heads, queries = prompt.query.shape[:3]
        output = prompt.query.new_zeros(batch, queries, heads, prompt.value.shape[-1])
        for number, read in reads.items():
            output[number, rows[number].real] = rearrange(read.output, "head query d_value -> query head d_value")
        return output

    def read(self, row: PromptRow, call: PromptCall) -> PromptRead:
        """Read a row as it would be read alone, also if it shares a batch with longer prompts."""
        scores, choice_rows, held_out = row.scores, 0, None
        if self.too_short(scores.queries, scores.keys, scores.key.device) is None:
            chosen = self.chosen(row, call)
            choice_rows = min(self.choice_rows, scores.queries)
            held_out = self.held_out(scores, row.layer, row.copies)
        else:
            chosen = Chosen.of(select_bands(scores, 1))
        lines = chosen.lines
        if isinstance(lines, HeadLines):
            output, kernel = line_attention(scores, row.value, lines), "mask"
        else:
            output = band_attention(scores, row.value, lines, chosen.lists)
            kernel = "blocks" if triton_module(scores.key.device, "triton") is None else "triton"
        shares = None
        if held_out is not None and len(held_out):
            shares = recovered(scores, lines, held_out)
            choice_rows += len(held_out)
        choice = choice_rows * scores.keys / BlockGrid(scores.queries, scores.keys).cells
        return PromptRead(chosen.attended.clone(), chosen.dense.clone(), kernel, output, shares, choice)

    def why_dense(self, prompt: Attention, view: View, kv: CacheLayer | None) -> str | None:
        """Why the model's own attention must be used or is better; None if lines are used."""
        keys = prompt.key.shape[2]
        short = self.too_short(prompt.queries, keys, prompt.key.device)
        if short is not None:
            return short
        why_no_kernel = lack_of_library(prompt.query.device)
        if why_no_kernel is not None:
            return f"on {prompt.query.device.type}: {why_no_kernel}"
        if view.window is not None and keys > view.window:
            return "sliding window"
        if prompt.softcap is not None:
            return "soft cap"
        if prompt.sinks is not None:
            return "learned sinks"
        if kv is not None and kv.edited:
            return "tokens were evicted"
        return None


def _log_prompt(
    run: Run, call: Call, layer: int, counts: Int[Tensor, "row 3"], why_dense: str | None, reads: dict[int, PromptRead]
) -> None:
    """Log an event for every row that is not all padding."""
    step = call.step  # and not the call, which holds the cache

    def events() -> list[Event]:
        logged: list[Event] = []
        for row, (position, row_keys, row_queries) in enumerate(counts.tolist()):
            if not row_queries:
                continue
            data: dict[str, Any] = {"keys": row_keys, "queries": row_queries}
            data |= {"dense": why_dense} if row not in reads else reads[row].event_data()
            logged.append(Event(row, step, position, layer, None, "prefill", data))
        return logged

    run.log(events)
