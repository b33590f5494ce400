"""Prompts read along lines: sparse attention in place of the model's own, and what it lost (LoopServe, section 5.1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.attention import Attention, View
from sinkscope.engine.block import Event, Run
from sinkscope.engine.step import Call, Memory
from sinkscope.files.records import check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.cache_state import Moment
from sinkscope.kv.session import Session
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Bands, BlockGrid, Copies
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.head_lines import HeadLines
from sinkscope.sparse.replay import Replayed
from sinkscope.sparse.sparse import band_attention, lack_of_library, line_attention, recovered, triton_module

_UNKNOWN = -1  # the id of an embedding, and of a token that was read before the run


@dataclass(eq=False)
class PromptCall:
    """What the layers of one call share.

    Attributes:
        copies: Copies in each row, on each device; None if no id is known.
        replayed: The choices of lines that were recorded for each row.
    """

    copies: dict[tuple[int, torch.device], Copies | None] = field(default_factory=dict)
    replayed: dict[int, dict[Hashable, Replayed]] = field(default_factory=dict)
    _counts: dict[int, Int[Tensor, "row 3"]] = field(default_factory=dict)

    def counts_of(self, view: View) -> Int[Tensor, "row 3"]:
        """Return the last position of each row, and the numbers of its keys and of its queries."""
        slots = view.pos.shape[2]
        if slots not in self._counts:
            queries = view.query_pos
            keys = (view.pos[:, 0] >= 0).sum(-1)
            self._counts[slots] = torch.stack([queries.amax(1), keys, (queries >= 0).sum(-1)], 1)
        return self._counts[slots]


class PromptCalls:
    """Follows the calls of a run. Ids are kept with the rows of each cache, so that a turn's copies reach into it.

    Args:
        run: The run.
        key: Key of the edit in the run.
    """

    def __init__(self, run: Run, key: int) -> None:
        self._run, self._key = ref(run), key
        self._calls: WeakKeyDictionary[Call, PromptCall] = WeakKeyDictionary()
        run.hook((run.target.base, "pre", self._note))

    def of(self, call: Call) -> PromptCall:
        """Return what is known of a call, as long as it lasts."""
        return self._calls.setdefault(call, PromptCall())

    def copies(self, call: Call, row: int, device: torch.device) -> Copies | None:
        """Find the copies in a row of a prompt; None if no id of it is known. The first layer waits for the device."""
        found = self.of(call).copies
        if (row, device) not in found:
            ids = call.state.memory[self._key].of_tokens["ids"][row]
            real = ids[call.columns[row] >= 0].cpu()
            queries = int((call.index[row] >= 0).sum())
            is_known = bool((real[len(real) - queries :] != _UNKNOWN).any())
            found[row, device] = Copies.of(real, queries, device) if is_known else None
        return found[row, device]

    def _note(self, *_: Any) -> None:
        """Add the ids of a call to those before it."""
        run = self._run()
        call = None if run is None else run.call
        if call is None:
            return
        new = torch.full_like(call.index, _UNKNOWN) if call.ids is None else call.ids.to(call.index.device)
        memory = call.state.memory.setdefault(self._key, Memory())
        earlier = memory.of_tokens.get("ids", new[:, :0])[:, : call.past]
        unknown = new.new_full((call.rows, call.past - earlier.shape[1]), _UNKNOWN)
        memory.of_tokens["ids"] = torch.cat([earlier, unknown, new], 1)


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

    def chosen(
        self, scores: Scores, layer: int, copies: Copies | None, replayed: dict[Hashable, Replayed]
    ) -> HeadLines | Bands:
        """Return the lines of a row, which a later layer of the call may overwrite.

        `replayed` are the choices that were recorded for the row.
        """
        return self.lines(scores, layer, copies)

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
        known, why_dense = calls.of(call), self.why_dense(prompt, view, kv)
        counts = known.counts_of(view)
        if why_dense is not None:
            run.log(_events(call.step, prompt.layer, counts, why_dense, {}))
            return None
        reads: dict[int, Callable[[], dict[str, Any]]] = {}
        batch, heads, queries = prompt.query.shape[:3]
        output = None
        if not whole_rows or batch > 1:
            output = prompt.query.new_zeros(batch, queries, heads, prompt.value.shape[-1])
        for row in range(batch):
            query, key, value = prompt.query[row], prompt.key[row], prompt.value[row]
            real: Tensor | slice = slice(None)
            if not whole_rows:  # a choice by index copies
                real, occupied = view.query_pos[row] >= 0, view.pos[row, 0] >= 0
                query, key, value = query[:, real], key[:, occupied], value[:, occupied]
            if not query.shape[1]:  # it is all padding
                continue
            copies = calls.copies(call, row, key.device)
            replayed = known.replayed.setdefault(row, {})
            attended, reads[row] = self.read(Scores(query, key, prompt.scaling), value, prompt.layer, copies, replayed)
            attended = rearrange(attended, "head query d_value -> query head d_value")
            if output is None:
                output = attended[None]
            else:
                output[row, real] = attended
        run.log(_events(call.step, prompt.layer, counts, None, reads))
        return output

    def read(
        self,
        scores: Scores,
        value: Float[Tensor, "kv_head key d_value"],
        layer: int,
        copies: Copies | None,
        replayed: dict[Hashable, Replayed],
    ) -> tuple[Float[Tensor, "head query d_value"], Callable[[], dict[str, Any]]]:
        """Read a row as it would be read alone, also if it shares a batch with longer prompts.

        Args:
            scores: Its scores, without padding and holes.
            value: Values of its keys.
            layer: Decoder layer.
            copies: Where the text copies itself; None if the ids are not known.
            replayed: The choices that were recorded for it.

        Returns:
            What attention gives, and what computes the data of the event of kind "prefill", for which a GPU has to be
            waited for.
        """
        choice_rows, held_out = 0, None
        if self.too_short(scores.queries, scores.keys, scores.key.device) is None:
            lines = self.chosen(scores, layer, copies, replayed)
            choice_rows = min(self.choice_rows, scores.queries)
            held_out = self.held_out(scores, layer, copies)
        else:
            lines = select_bands(scores, 1)
        attended, dense = lines.attended(), lines.dense
        if isinstance(lines, HeadLines):
            output, kernel = line_attention(scores, value, lines), "mask"
        else:
            output = band_attention(scores, value, lines)
            kernel = "blocks" if triton_module(scores.key.device, "triton") is None else "triton"
        shares = None
        if held_out is not None and len(held_out):
            shares = recovered(scores, lines, held_out)
            choice_rows += len(held_out)
        choice = choice_rows * scores.keys / BlockGrid(scores.queries, scores.keys).cells

        def data() -> dict[str, Any]:
            share = fmean(attended.tolist())
            numbers = {"cells": share + choice, "attended": share, "dense_heads": int(dense.sum()), "kernel": kernel}
            return numbers if shares is None else numbers | {"recovered": shares.tolist()}

        return output, data

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


def _events(
    step: int,
    layer: int,
    counts: Int[Tensor, "row 3"],
    why_dense: str | None,
    reads: dict[int, Callable[[], dict[str, Any]]],
) -> Callable[[], list[Event]]:
    """What makes the events of a layer: one for every row that is not all padding."""

    def events() -> list[Event]:
        logged: list[Event] = []
        for row, (position, row_keys, row_queries) in enumerate(counts.tolist()):
            if not row_queries:
                continue
            data: dict[str, Any] = {"keys": row_keys, "queries": row_queries}
            data |= reads[row]() if row in reads else {"dense": why_dense}
            logged.append(Event(row, step, position, layer, None, "prefill", data))
        return logged

    return events
