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
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.masking_utils import causal_mask_function

from sinkscope.engine.actor import Actor
from sinkscope.engine.attention import Attention, AttentionOutput
from sinkscope.engine.run import Event, Run
from sinkscope.engine.step import Step
from sinkscope.engine.visible import CausalMask
from sinkscope.errors import UnsupportedError
from sinkscope.files.records import check_fields
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.keeper import check_seen, check_servable, own_attention
from sinkscope.models.layers import layer_window
from sinkscope.sparse.attention import Scores
from sinkscope.sparse.bands import Lines
from sinkscope.sparse.choice import select_bands
from sinkscope.sparse.sparse import lack_of_library, line_attention, recovered

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
    def lines(self, scores: Scores, layer: int) -> Lines:
        """Return lines along which queries of a layer attend, or columns and bands."""

    def held_out(self, scores: Scores, layer: int) -> Int[Tensor, " row"]:
        """Return queries on which to measure how much attention the lines of a layer hold, by default none."""
        return torch.arange(0)

    def too_short(self, queries: int, keys: int, device: torch.device) -> str | None:
        """Why a prompt is too short for lines; None if it is not."""

    def enter(self, run: Run, key: int) -> None:
        """Replace the attention of prompts.

        Raises:
            UnsupportedError: The attention of the model cannot be computed along lines, or something in this block
                reads prompts already.
        """
        check_servable(run.target)
        own_attention(run)
        name = type(self).__name__
        run.uncached = f"{name} reads prompts, and without a cache each call is one"
        run.by_token = f"{name} would read these as a prompt"
        for actor in run.acting["attends"]:
            if isinstance(actor, PromptReader):
                both = f"{type(actor.prompts).__name__} and {name}"
                raise UnsupportedError(f"{both} would both decide how prompts are read: enter one of them")
        run.act(PromptReader(self, run))

    def summary(self, run: Run) -> str:
        """Return how much of the prompts' attention was computed, or why all; "" if there was no prompt."""
        prompts = [event.data for event in run.events if event.kind == "prefill"]
        if not prompts:
            return ""
        share = fmean(data.get("attended", 1.0) for data in prompts)
        reasons = ", ".join(dict.fromkeys(data["dense"] for data in prompts if "dense" in data))
        of_the_rest = f"; what the model's own attention read: {reasons}" if reasons else ""
        return f"{type(self).__name__} computed {share:.0%} of the attention of prompts{of_the_rest}."

    def read(
        self, scores: Scores, value: Float[Tensor, "kv_head key d_value"], layer: int
    ) -> tuple[Float[Tensor, "head query d_value"], Read]:
        """Read a row as it would be read alone, also if it shares a batch with longer prompts.

        Args:
            scores: Its scores, without padding and holes.
            value: Values of its keys.
            layer: Decoder layer.

        Returns:
            What attention gives, and what computes the data of the event of kind "prefill".
        """
        numbers: dict[str, Tensor] = {}
        if self.too_short(scores.queries, scores.keys, scores.key.device) is None:
            lines = self.lines(scores, layer)
            held_out = self.held_out(scores, layer)
            if len(held_out):
                numbers["recovered"] = recovered(scores, lines, held_out)
        else:
            lines = select_bands(scores, 1)
        attended = lines.attended()
        dense = lines.dense

        def data() -> dict[str, Any]:
            found = {name: number.tolist() for name, number in numbers.items()}
            return {"attended": fmean(attended.tolist()), "dense_heads": int(dense.sum()), **found}

        return line_attention(scores, value, lines), data

    def why_dense(self, prompt: Attention) -> str | None:
        """Why the model's own attention must be used or is better; None if lines are used."""
        device = prompt.query.device
        lack = lack_of_library(device)
        short = self.too_short(prompt.queries, prompt.key.shape[2], device)
        if short:
            return short
        if lack is not None:
            return f"on {device.type}: {lack}"
        if layer_window(prompt.module.config, prompt.layer) is not None:
            return "sliding window"
        if prompt.softcap is not None:
            return "soft cap"
        if prompt.sinks is not None:
            return "learned sinks"
        return None


@dataclass(frozen=True, eq=False)
class RowsOfPrompt:
    """Where the rows of a prompt have queries and keys in a layer; it holds neither the cache nor its keys.

    Attributes:
        step: Number of the forward call.
        layer: The layer.
        positions: Position of each query in its row; -1 at padding.
        has_key: Which columns hold a real token.
    """

    step: int
    layer: int
    positions: Int[Tensor, "row query"]
    has_key: Bool[Tensor, "row key"]

    @classmethod
    def of(cls, step: Step, prompt: Attention) -> RowsOfPrompt:
        """Return those of a forward call."""
        device = prompt.key.device
        columns = slice(prompt.first_key, prompt.first_key + prompt.key.shape[2])
        return cls(step.number, prompt.layer, step.on(device), step.tokens.pos[:, columns].to(device) >= 0)

    def slices(self, row: int, *, padded: bool) -> tuple[Any, Any]:
        """Return by what the queries and the keys of a row are chosen: all of them where nothing is padded."""
        if not padded:
            return slice(None), slice(None)
        return self.positions[row] >= 0, self.has_key[row]

    def events(self, read: Callable[[int], dict[str, Any]]) -> list[Event]:
        """Return the event of each row that has queries, with what was read of it."""
        events: list[Event] = []
        for row, n_queries in enumerate((self.positions >= 0).sum(1).tolist()):
            if n_queries:
                data = {"keys": int(self.has_key[row].sum()), "queries": n_queries, **read(row)}
                last = int(self.positions[row].max())
                events.append(Event(row, self.step, last, self.layer, "prefill", data))
        return events


def rows_are_asked_for(step: Step, prompt: Attention) -> bool:
    """Return whether the caller gets the rows of attention, which eager attention alone gives."""
    is_asked = step.arguments.get("output_attentions")
    if is_asked is None:
        is_asked = getattr(prompt.module.config, "output_attentions", False)
    return bool(is_asked) and prompt.selected.kind == "eager"


class PromptReader(Actor):
    """Reads the prompts of a block along lines.

    Args:
        prompts: What chooses the lines.
        run: The block.
    """

    def __init__(self, prompts: SparsePrompts, run: Run) -> None:
        self.prompts = prompts
        self._log = run.log

    def before(self, step: Step) -> None:
        """Look at the cache that is read."""
        check_seen(step)

    def attends(self, step: Step) -> bool:
        """Return whether the call reads several tokens."""
        return step.new > 1

    def attend(self, step: Step, attention: Attention) -> None:
        """Compute the attention of a layer."""
        attention.compute = partial(self._compute, step)

    def _compute(self, step: Step, prompt: Attention) -> AttentionOutput | None:
        """Read the rows of a layer along lines; None if the model's own attention reads it."""
        rows = RowsOfPrompt.of(step, prompt)
        why_dense = self.prompts.why_dense(prompt)
        if why_dense is None and rows_are_asked_for(step, prompt):
            why_dense = "its rows are asked for"
        if why_dense is not None:
            self._log(partial(rows.events, lambda _: {"dense": why_dense}))
            return None
        self._check(step, prompt)
        n_rows, n_heads, n_queries, _ = prompt.query.shape
        output = prompt.query.new_zeros(n_rows, n_queries, n_heads, prompt.value.shape[-1])  # padding has no attention
        reads: dict[int, Read] = {}
        for row in range(n_rows):
            queries, keys = rows.slices(row, padded=bool(step.tokens.padded))
            scores = Scores(prompt.query[row, :, queries], prompt.key[row, :, keys], prompt.scaling)
            if scores.queries:
                attended, reads[row] = self.prompts.read(scores, prompt.value[row, :, keys], prompt.layer)
                output[row, queries] = attended.transpose(0, 1)
        self._log(partial(rows.events, lambda row: reads[row]()))
        return output, None

    def _check(self, step: Step, prompt: Attention) -> None:
        """Refuse a cache that lacks tokens, and a mask that is not that of a causal model with padding.

        Raises:
            UnsupportedError: The layer has either.
        """
        name = type(self.prompts).__name__
        kv = step.by_number.get(prompt.layer)
        if kv is not None and kv.edited:
            raise UnsupportedError(
                f"{name} reads prompts along lines of all tokens, and the cache has lost some: begin a new cache"
            )
        if prompt.hidden or not (
            isinstance(prompt.source, CausalMask) or getattr(prompt.source, "function", None) is causal_mask_function
        ):
            raise UnsupportedError(
                f"{name} reads prompts under causal masks, with padding or without, and this mask hides or shows other "
                "keys: leave out what hides them, or read such prompts without it"
            )
