"""Prompts read along lines: sparse attention in place of the model's own, and what it lost (LoopServe, section 5.1)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any
from weakref import ref

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention, AttentionOutput
from sinkscope.engine.run import Event, Run
from sinkscope.engine.step import Step
from sinkscope.engine.visible import TensorMask, Visible
from sinkscope.errors import UnsupportedError
from sinkscope.files.records import check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.keeper import check_seen, check_servable, note_layers, own_attention
from sinkscope.models.windows import layer_window
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Copies, Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.replay import Replayed
from sinkscope.sparse.sparse import lack_of_library, line_attention, recovered, triton_module

_MASK_ROWS = 1024  # queries at a time for which a mask is compared
_UNKNOWN = -1  # the id of an embedding, and of a token that was read before the run


@dataclass(eq=False)
class PromptCall:
    """What the layers of one call share.

    Attributes:
        copies: Copies in each row, on each device; None if no id is known.
        replayed: The choices of lines that were recorded for each row.
        causal: Whether a mask is causal, by its identity.
    """

    copies: dict[tuple[int, torch.device], Copies | None] = field(default_factory=dict)
    replayed: dict[int, dict[Hashable, Replayed]] = field(default_factory=dict)
    causal: dict[int, bool] = field(default_factory=dict)
    _counts: dict[int, Int[Tensor, "row 3"]] = field(default_factory=dict)

    def counts_of(self, index: Int[Tensor, "row query"], columns: Int[Tensor, "row key"]) -> Int[Tensor, "row 3"]:
        """Return the last position of each row, and the numbers of its keys and of its queries."""
        keys = columns.shape[1]
        if keys not in self._counts:
            numbers = [index.amax(1), (columns >= 0).sum(-1), (index >= 0).sum(-1)]
            self._counts[keys] = torch.stack(numbers, 1)
        return self._counts[keys]


class PromptReader(Actor):
    """Reads the prompts of a block along lines; `call` is what the layers of the latest call share.

    Ids are kept with the rows of each cache, so that a turn's copies reach into it.

    Args:
        prompts: What chooses the lines.
        run: The block.
        key: Key of the edit in the block.
    """

    def __init__(self, prompts: SparsePrompts, run: Run, key: int) -> None:
        self._prompts, self._run = prompts, ref(run)
        self._ids = (key, "ids")  # by what the ids of the rows are known
        self.call = PromptCall()

    @property
    def name(self) -> str:
        """Name of what chooses the lines."""
        return type(self._prompts).__name__

    def before(self, step: Step) -> None:
        """Add the ids of a call to those before it."""
        if step.cache is not None:
            check_seen(step.cache)
            if not step.layers:  # another run may have cut this cache
                note_layers(step)
        new = step.earlier.pos.new_full((step.rows, step.new), _UNKNOWN)
        if step.ids is not None:
            new = step.ids.to(new.device)
        known, self.call = step.state.known, PromptCall()
        earlier = known.get(self._ids, new[:, :0])[:, : step.past]
        unknown = new.new_full((step.rows, step.past - earlier.shape[1]), _UNKNOWN)
        known[self._ids] = torch.cat([earlier, unknown, new], 1)

    def attends(self, step: Step) -> bool:
        """Return whether the call reads several tokens."""
        return step.new > 1

    def attend(self, step: Step, attention: Attention) -> None:
        """Compute the attention of a layer."""
        attention.compute = partial(self._compute, step)

    def _compute(self, step: Step, attention: Attention) -> AttentionOutput | None:
        run = self._run()
        assert run is not None
        output = self._prompts.attend(attention, step, run, self)
        return None if output is None else (output, None)

    def copies(self, step: Step, row: int, device: torch.device) -> Copies | None:
        """Find the copies in a row of a prompt; None if no id of it is known. The first layer waits for the device."""
        copies = self.call.copies
        if (row, device) not in copies:
            ids = step.state.known[self._ids][row]
            real = ids[step.columns[row] >= 0].cpu()
            queries = int((step.index[row] >= 0).sum())
            is_known = bool((real[len(real) - queries :] != _UNKNOWN).any())
            copies[row, device] = Copies.of(real, queries, device) if is_known else None
        return copies[row, device]

    def is_causal(self, step: Step, attention: Attention) -> bool:
        """Return whether every real token sees all real tokens up to itself, and no other; asked once of each mask."""
        visible = attention.visible
        if visible.is_causal and not step.is_padded:
            return True
        known = self.call.causal
        key = id(attention.mask) if attention.mask is not None else id(visible.source)
        if key not in known or visible.hidden:
            known[key] = _is_causal(step, visible)
        return known[key]


def asks_attention(step: Step, config: Any) -> bool:
    """Return whether the caller asks for rows of attention, which only the model's own attention gives."""
    asked = step.arguments.get("output_attentions")
    return bool(getattr(config, "output_attentions", False) if asked is None else asked)


def _is_causal(step: Step, visible: Visible) -> bool:
    """Whether a mask is that of a causal model whose padding is hidden."""
    device = visible.device
    columns, column = step.columns.to(device), visible.key_columns()
    real = columns.gather(1, visible.query_columns()) >= 0
    for start in range(0, len(visible.query), _MASK_ROWS):
        part = visible.section(slice(start, start + _MASK_ROWS))
        at = part.query_columns()[0]
        causal = (column[:, :, None] <= at[:, None]) & (columns.gather(1, column[:, 0]) >= 0)[:, None, None]
        differs = (part.sees() != causal) & real[:, None, start : start + _MASK_ROWS, None]
        if bool(differs.any()):
            return False
    return True


class SparsePrompts(Intervention):
    """Base of interventions that read prompts along lines, row by row, and of no other call.

    A subclass is a frozen dataclass with the method `lines`; every row and layer of a prompt logs an event of kind
    "prefill".
    """

    def __post_init__(self) -> None:
        check_fields(self)

    # To be written by a subclass ----------------------------------------------------------------------------------

    @abstractmethod
    def lines(self, scores: Scores, layer: int, copies: Copies | None = None) -> Lines:
        """Return lines along which queries of a layer attend, or columns and bands; some queries are at copies."""

    def chosen(self, scores: Scores, layer: int, copies: Copies | None, replayed: dict[Hashable, Replayed]) -> Lines:
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
        """Replace the attention of prompts.

        Raises:
            UnsupportedError: The attention of the model cannot be computed along lines, or something in this block
                reads prompts already.
        """
        check_servable(run.target)
        own_attention(run)
        name = type(self).__name__
        run.refuse_generation(
            uncached=f"{name} reads prompts, and without a cache each call is one",
            by_token=f"{name} would read these as a prompt",
        )
        for actor in run.actors:
            if isinstance(actor, PromptReader):
                raise UnsupportedError(
                    f"{actor.name} and {name} would both decide how prompts are read: enter one of them"
                )
        run.act(PromptReader(self, run, key))

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

    def attend(
        self, prompt: Attention, step: Step, run: Run, reader: PromptReader
    ) -> Float[Tensor, "batch query head d_value"] | None:
        """Return the attention of a prompt in one layer; None if the model's own attention reads it."""
        kv, begin = step.by_number.get(prompt.layer), prompt.first_key
        columns = step.columns[:, begin : begin + prompt.key.shape[2]].to(prompt.key.device)
        if kv is not None and kv.edited:
            columns = kv.pos[:, 0]
        whole_rows = not step.tokens.padded and (kv is None or kv.gapless)
        known, why_dense = reader.call, self.why_dense(prompt, step, reader, kv)
        index = step.on(prompt.key.device)
        counts = known.counts_of(index, columns)
        if why_dense is not None:
            run.log(_events(step.number, prompt.layer, counts, why_dense, {}))
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
                real, occupied = index[row] >= 0, columns[row] >= 0
                query, key, value = query[:, real], key[:, occupied], value[:, occupied]
            if not query.shape[1]:  # it is all padding
                continue
            copies = reader.copies(step, row, key.device)
            replayed = known.replayed.setdefault(row, {})
            attended, reads[row] = self.read(Scores(query, key, prompt.scaling), value, prompt.layer, copies, replayed)
            attended = rearrange(attended, "head query d_value -> query head d_value")
            if output is None:
                output = attended[None]
            else:
                output[row, real] = attended
        run.log(_events(step.number, prompt.layer, counts, None, reads))
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
        output, kernel = line_attention(scores, value, lines), "mask"
        if lines.grid.block > 1:
            kernel = "blocks" if triton_module(scores.key.device, "triton") is None else "triton"
        shares = None
        if held_out is not None and len(held_out):
            shares = recovered(scores, lines, held_out)
            choice_rows += len(held_out)
        choice = choice_rows * scores.keys / lines.grid.cells

        def data() -> dict[str, Any]:
            share = fmean(attended.tolist())
            numbers = {"cells": share + choice, "attended": share, "dense_heads": int(dense.sum()), "kernel": kernel}
            return numbers if shares is None else numbers | {"recovered": shares.tolist()}

        return output, data

    def why_dense(self, prompt: Attention, step: Step, reader: PromptReader, kv: CacheLayer | None) -> str | None:
        """Why the model's own attention must be used or is better; None if lines are used."""
        keys, source = prompt.key.shape[2], prompt.source
        short = self.too_short(prompt.queries, keys, prompt.key.device)
        if short is not None:
            return short
        why_no_kernel = lack_of_library(prompt.query.device)
        if why_no_kernel is not None:
            return f"on {prompt.query.device.type}: {why_no_kernel}"
        window = layer_window(prompt.module.config, prompt.layer)
        if window is not None and keys > window:
            return "sliding window"
        if prompt.own.kind == "eager" and asks_attention(step, prompt.module.config):
            return "its rows are asked for"
        if prompt.softcap is not None:
            return "soft cap"
        if prompt.sinks is not None:
            return "learned sinks"
        if kv is not None and kv.edited:
            return "tokens were evicted"
        if isinstance(source, TensorMask) and source.mask.is_floating_point():
            return "a mask of numbers"
        if not reader.is_causal(step, prompt):
            return "a mask that is not causal"
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
