"""Attention of prompts along chosen lines, which `LoopServe` and the baselines with a fixed shape share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.interventions.base import Event, Run
from sinkscope.kv.session import Prompt, Session
from sinkscope.lines import flex
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.sparse import Kernel, Sparsity, sparse_attention

_FOLLOWERS: WeakKeyDictionary[Run, Callable[[int, int, HeadLines], None]] = WeakKeyDictionary()


def follow_lines(run: Run, fn: Callable[[int, int, HeadLines], None]) -> None:
    """Call `fn(layer, row, lines)` for every row of a prompt that is read along lines; a run has one such `fn`."""
    _FOLLOWERS[run] = fn


@dataclass(frozen=True, eq=False)
class SparsePrompts:
    """Attention of prompts along lines, row by row, with an event of kind "prefill" for every row and layer.

    Attributes:
        name: name of the intervention, for errors.
        choose: returns lines for `query [head query d_head]`, `key [kv_head key d_head]` and the factor on the scores.
        dense_above: share of computed cells above which a head is dense; None: that of the kernel.
        shortest: prompts with fewer keys are read by the model's own attention.
        dense_rows: number of queries at the end that attend to everything.
        kernel: as for `sparse_attention`.
        in_blocks: whether other devices than a CPU use the loop over blocks. If not, prompts on devices without
            FlexAttention are read by the model's own attention.
    """

    name: str
    choose: Callable[[Tensor, Tensor, float | None], HeadLines]
    dense_above: float | None = torch.inf
    shortest: int = 0
    dense_rows: int = 0
    kernel: Kernel = "auto"
    in_blocks: bool = True

    def enter(self, session: Session) -> None:
        """Replace the attention of prompts.

        Raises:
            UnsupportedError: on a TransformerBridge.
        """
        if session.target.kind == "bridge":
            more = "use prefill=False, or " if self.name == "LoopServe" else ""
            raise UnsupportedError(
                f"a TransformerBridge computes its own attention, so {self.name} cannot make prompts sparse on it: "
                f"{more}load the model with backend='hf'",
                page="kv-session",
            )
        session.replace_prefill(lambda prompt: self._attend(prompt, session))

    def _attend(self, prompt: Prompt, session: Session) -> Tensor | None:
        why, call, rows = self._why_dense(prompt), session.now.call, len(prompt.query)
        assert call is not None
        out: Tensor | None = None
        found: list[Sparsity | None] = [None] * rows
        if why is None:
            out = prompt.query.new_zeros(*prompt.query.shape[:3], prompt.value.shape[-1]).transpose(1, 2).contiguous()
            for row in range(rows):
                real, held = prompt.query_pos[row] >= 0, prompt.pos[row, 0] >= 0
                if not bool(real.any()):
                    continue
                made, found[row], lines = self._row(prompt, row, real, held)
                if (follow := _FOLLOWERS.get(session.run)) is not None:
                    follow(prompt.layer, row, lines)
                out[row, real] = made.transpose(0, 1).to(out.dtype)
        step, at, layer = call.step, prompt.query_pos, prompt.layer
        counts = torch.stack([at.amax(1), (prompt.pos[:, 0] >= 0).sum(-1), (at >= 0).sum(-1)], 1)

        def events() -> list[Event]:
            told = [{"dense": why} if what is None else _said(what) for what in found]
            return [
                Event(row, step, last, layer, None, "prefill", {"keys": keys, "queries": queries} | told[row])
                for row, (last, keys, queries) in enumerate(counts.tolist())
                if queries
            ]

        session.run.log(events)
        return out

    def _row(self, prompt: Prompt, row: int, real: Tensor, held: Tensor) -> tuple[Tensor, Sparsity, HeadLines]:
        query, key, value = prompt.query[row], prompt.key[row], prompt.value[row]
        if not bool(real.all()):
            query = query[:, real]
        if not bool(held.all()):
            key, value = key[:, held], value[:, held]
        scaling = prompt.settings.get("scaling")
        scaling = None if scaling is None else float(scaling)
        heads, queries, keys = query.shape[0], query.shape[1], key.shape[1]
        # A row is read as it would be alone, also if it shares a batch with longer prompts.
        whole = queries if keys < self.shortest else min(self.dense_rows, queries)
        if not whole:
            return self._along(query, key, value, scaling)
        every = torch.ones(heads, keys, dtype=torch.bool, device=query.device)
        last = HeadLines(every, every, whole)
        out, what = sparse_attention(query[:, -whole:], key, value, last, scaling=scaling, dense_above=0.0)
        if whole == queries:
            return out, what, last
        before, some, lines = self._along(query[:, :-whole], key[:, :-whole], value[:, :-whole], scaling)
        share = int(lines.lengths().sum())
        share = share / (share + int(last.lengths().sum()))
        cells, computed = (tuple(share * part + 1 - share for part in parts) for parts in (some.cells, some.computed))
        return torch.cat([before, out], 1), Sparsity(cells, computed, some.dense, some.kernel), lines

    def _along(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None
    ) -> tuple[Tensor, Sparsity, HeadLines]:
        lines = self.choose(query, key, scaling)
        limit, kernel = self.dense_above, self.kernel
        return *sparse_attention(query, key, value, lines, scaling=scaling, dense_above=limit, kernel=kernel), lines

    def _why_dense(self, prompt: Prompt) -> str | None:
        """Why the model's own attention has to be used, or is better; None: lines are used."""
        keys, settings, device = prompt.key.shape[2], prompt.settings, prompt.query.device.type
        missing = None
        if device != "cpu" and not self.in_blocks:
            missing = flex.why_not(prompt.query[0], prompt.value[0]) if self.kernel != "blocks" else "not asked for"
        short = bool(((prompt.pos[:, 0] >= 0).sum(-1) < self.shortest).all())
        reasons = (
            (short, f"fewer than {self.shortest} keys"),
            (missing is not None, f"on {device} without FlexAttention: {missing}"),
            (prompt.window is not None and keys > prompt.window, "sliding window"),
            (settings.get("softcap") is not None, "soft cap"),
            (settings.get("s_aux") is not None, "learned sinks"),
            (prompt.kv is not None and prompt.kv.edited, "tokens were evicted"),
        )
        return next((why for holds, why in reasons if holds), None)


def _said(what: Sparsity) -> dict[str, float | int | str]:
    attended = [1.0 if dense else cells for cells, dense in zip(what.cells, what.dense, strict=True)]
    mean = torch.tensor([what.cells, what.computed, attended]).mean(1).tolist()
    shares = {"cells": mean[0], "computed": mean[1], "attended": mean[2]}
    return shares | {"dense_heads": sum(what.dense), "kernel": what.kernel}
