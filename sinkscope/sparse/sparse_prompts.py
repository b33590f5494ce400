"""Prompts read along lines: sparse attention in place of the model's own, and what it lost (LoopServe, section 5.1).

In every layer of a call with several tokens:

1. Prompts that are too short, and layers whose attention is not plain, are left to the model's own attention.
2. A cache that lacks tokens, and a mask that is not causal, are refused.
3. For every row, lines are chosen and attention along them is computed, as if the row were read alone.
4. An event says which share of the cells that were.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from statistics import fmean
from typing import Any
from weakref import ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import pad

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention, AttentionOutput
from sinkscope.engine.run import Event, Run
from sinkscope.engine.step import Step
from sinkscope.engine.visible import Visible
from sinkscope.errors import UnsupportedError
from sinkscope.files.records import check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.keeper import check_seen, check_servable, own_attention
from sinkscope.models.windows import layer_window
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Copies, Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.sparse import lack_of_library, line_attention, recovered

_MASK_ROWS = 1024  # queries at a time for which a mask is compared
_UNKNOWN = -1  # the id of an embedding, and of a token that was read before the run
Read = Callable[[], dict[str, Any]]
"""Gives the data of an event, for which a GPU has to be waited for."""


class SparsePrompts(Intervention):
    """Base of interventions that read prompts along lines, row by row, and of no other call.

    A subclass is a frozen dataclass with the method `lines`; every row and layer of a prompt logs an event of kind
    "prefill".
    """

    def __post_init__(self) -> None:
        check_fields(self)

    @abstractmethod
    def lines(self, scores: Scores, layer: int, copies: Copies | None = None) -> Lines:
        """Return lines along which queries of a layer attend, or columns and bands; some queries are at copies."""

    def held_out(self, scores: Scores, layer: int, copies: Copies | None = None) -> Int[Tensor, " row"] | None:
        """Queries on which to measure how much attention the lines of a layer hold; None: on none."""

    def too_short(self, queries: int, keys: int, device: torch.device) -> str | None:
        """Why a prompt is too short for lines; None if it is not."""

    @property
    def choice_rows(self) -> int:
        """Number of queries whose attention to all keys is computed in order to choose lines."""
        return 0

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
                other = type(actor.prompts).__name__
                raise UnsupportedError(f"{other} and {name} would both decide how prompts are read: enter one of them")
        run.act(PromptReader(self, run, key))

    def summary(self, run: Run) -> str:
        """Return how much of the prompts' attention was computed, or why all; "" if there was no prompt."""
        prompts = [event.data for event in run.events if event.kind == "prefill"]
        reasons = dict.fromkeys(data["dense"] for data in prompts if "dense" in data)
        name = type(self).__name__
        if not prompts:
            return ""
        if all("dense" in data for data in prompts):
            return f"{name} left prompts to the model's own attention: {', '.join(reasons)}."
        share = fmean(data.get("cells", 1.0) for data in prompts)
        return f"{name} computed {share:.0%} of the attention of prompts, the choice of lines included."

    def read(
        self, scores: Scores, value: Float[Tensor, "kv_head key d_value"], layer: int, copies: Copies
    ) -> tuple[Float[Tensor, "head query d_value"], Read]:
        """Read a row as it would be read alone, also if it shares a batch with longer prompts.

        Args:
            scores: Its scores, without padding and holes.
            value: Values of its keys.
            layer: Decoder layer.
            copies: Where the text copies itself.

        Returns:
            What attention gives, and what computes the data of the event of kind "prefill".
        """
        if self.too_short(scores.queries, scores.keys, scores.key.device) is None:
            lines = self.lines(scores, layer, copies)
            rows = min(self.choice_rows, scores.queries)
            held_out = self.held_out(scores, layer, copies)
        else:
            lines = select_bands(scores, 1)
            rows = 0
            held_out = None
        shares = None
        numbers = (lines.attended(), lines.dense)
        if held_out is not None and len(held_out):
            shares = recovered(scores, lines, held_out)
            rows += len(held_out)
        choice = rows * scores.keys / lines.grid.cells

        def data() -> dict[str, Any]:
            attended, dense = (number.tolist() for number in numbers)
            share = fmean(attended)
            found = {"cells": share + choice, "attended": share, "dense_heads": sum(dense)}
            return found if shares is None else found | {"recovered": shares.tolist()}

        return line_attention(scores, value, lines), data

    def why_dense(self, prompt: Attention) -> str | None:
        """Why the model's own attention must be used or is better; None if lines are used."""
        device = prompt.query.device
        keys = prompt.key.shape[2]
        config = prompt.module.config
        window = layer_window(config, prompt.layer)
        why_no_kernel = lack_of_library(device)
        reasons = {
            f"on {device.type}: {why_no_kernel}": why_no_kernel is not None,
            "sliding window": window is not None and keys > window,
            "soft cap": prompt.softcap is not None,
            "learned sinks": prompt.sinks is not None,
        }
        short = self.too_short(prompt.queries, keys, device)
        return short or next((reason for reason, holds in reasons.items() if holds), None)


class PromptReader(Actor):
    """Reads the prompts of a block along lines.

    Ids are kept with the rows of each cache, so that a turn's copies reach into it.

    Args:
        prompts: What chooses the lines.
        run: The block.
        key: Key of the edit in the block.
    """

    def __init__(self, prompts: SparsePrompts, run: Run, key: int) -> None:
        self.prompts = prompts
        self._run = ref(run)
        self._ids = (key, "ids")  # by what the ids of the rows are known
        self._copies: dict[tuple[int, torch.device], Copies] = {}  # of the rows of a call
        self._causal: set[int] = set()  # masks of a call, by their identity

    def before(self, step: Step) -> None:
        """Add the ids of a call to those before it."""
        check_seen(step)
        self._copies = {}
        self._causal = set()
        new = step.earlier.pos.new_full((step.rows, step.new), _UNKNOWN)
        if step.ids is not None:
            new = step.ids.to(new.device)
        earlier = step.state.known.get(self._ids, new[:, :0])[:, : step.past]
        earlier = pad(earlier, (0, step.past - earlier.shape[1]), value=_UNKNOWN)
        step.state.known[self._ids] = torch.cat([earlier, new], 1)

    def attends(self, step: Step) -> bool:
        """Return whether the call reads several tokens."""
        return step.new > 1

    def attend(self, step: Step, attention: Attention) -> None:
        """Compute the attention of a layer."""
        attention.compute = partial(self._compute, step)

    def _compute(self, step: Step, prompt: Attention) -> AttentionOutput | None:
        """Read the rows of a layer along lines; None if the model's own attention reads it."""
        run = self._run()
        assert run is not None
        device = prompt.key.device
        keys = prompt.key.shape[2]
        index = step.on(device)
        columns = step.columns[:, prompt.first_key : prompt.first_key + keys].to(device)
        number = step.number  # events hold neither the cache nor its keys
        layer = prompt.layer
        reads: list[Read] = []
        rows: list[Float[Tensor, "query head d_value"]] = []
        why = self.prompts.why_dense(prompt)
        if prompt.own.kind == "eager" and asks_attention(step, prompt.module.config):
            why = why or "its rows are asked for"
        if why is None:
            self._check(step, prompt)
            for row in range(step.rows):
                attended, read = self._row(step, prompt, row, index[row] >= 0, columns[row] >= 0)
                rows.append(attended)
                reads.append(read)

        def events() -> list[Event]:
            logged: list[Event] = []
            for row in range(len(index)):
                queries = int((index[row] >= 0).sum())
                if queries:
                    data = {"keys": int((columns[row] >= 0).sum()), "queries": queries}
                    data |= reads[row]() if reads else {"dense": why}
                    logged.append(Event(row, number, int(index[row].max()), layer, None, "prefill", data))
            return logged

        run.log(events)
        if why is not None:
            return None
        return (rows[0][None] if len(rows) == 1 else torch.stack(rows)), None

    def _row(
        self,
        step: Step,
        prompt: Attention,
        row: int,
        real: Bool[Tensor, " query"],
        there: Bool[Tensor, " key"],
    ) -> tuple[Float[Tensor, "query head d_value"], Read]:
        """Read a row whose real queries and keys are these along lines; nothing attends where there is padding."""
        query = prompt.query[row]
        key = prompt.key[row]
        value = prompt.value[row]
        output = None
        if step.tokens.padded:
            output = query.new_zeros(query.shape[1], len(query), value.shape[-1])
            if not bool(real.any()):
                return output, dict
            query = query[:, real]
            key = key[:, there]
            value = value[:, there]
        copies = self._copies_in(step, row, key.device)
        attended, read = self.prompts.read(Scores(query, key, prompt.scaling), value, prompt.layer, copies)
        attended = attended.transpose(0, 1)
        if output is None:
            return attended, read
        output[real] = attended
        return output, read

    def _copies_in(self, step: Step, row: int, device: torch.device) -> Copies:
        """Find the copies in a row of a prompt; the first layer waits for the device."""
        copies = self._copies
        if (row, device) not in copies:
            ids = step.state.known[self._ids][row][step.columns[row] >= 0].cpu()
            copies[row, device] = Copies.of(ids, int((step.index[row] >= 0).sum()), device)
        return copies[row, device]

    def _check(self, step: Step, prompt: Attention) -> None:
        """Refuse a cache that lacks tokens, and a mask that is not that of a causal model with padding.

        Raises:
            UnsupportedError: The layer has either.
        """
        name = type(self.prompts).__name__
        visible = prompt.visible
        kv = step.by_number.get(prompt.layer)
        if kv is not None and kv.edited:
            raise UnsupportedError(
                f"{name} reads prompts along lines of all tokens, and the cache has lost some: begin a new cache"
            )
        known = visible.is_causal and not step.is_padded
        if known or (id(prompt.mask) in self._causal and not visible.hidden):
            return
        if not _is_causal(step, visible):
            raise UnsupportedError(
                f"{name} reads prompts under causal masks, with padding or without, and this mask hides or shows other "
                "keys: leave out what hides them, or read such prompts without it"
            )
        self._causal.add(id(prompt.mask))


def asks_attention(step: Step, config: Any) -> bool:
    """Return whether the caller asks for rows of attention, which only the model's own attention gives."""
    asked = step.arguments.get("output_attentions")
    return bool(getattr(config, "output_attentions", False) if asked is None else asked)


def _is_causal(step: Step, visible: Visible) -> bool:
    """Whether every real token sees all real tokens up to itself, and no other."""
    columns = step.columns.to(visible.device)
    key = visible.key_columns()
    real_key = columns.gather(1, key[:, 0])[:, None, None] >= 0
    for start in range(0, len(visible.query), _MASK_ROWS):
        part = visible.section(slice(start, start + _MASK_ROWS))
        at = part.query_columns()
        causal = (key[:, :, None] <= at[:, None, :, None]) & real_key
        real = columns.gather(1, at)[:, None, :, None] >= 0
        if bool(((part.sees() != causal) & real).any()):
            return False
    return True
