"""Prompts along chosen lines: what `LoopServe` and the baselines with a fixed shape share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sinkscope.errors import UnsupportedError
from sinkscope.interventions.base import Event, Run
from sinkscope.kv.moments import Prompt
from sinkscope.kv.session import Session
from sinkscope.lines import flex
from sinkscope.lines.choice import HeadLines
from sinkscope.lines.sparse import Kernel, Sparsity, sparse_attention

_FOLLOWERS: WeakKeyDictionary[Run, Callable[[int, int, HeadLines], None]] = WeakKeyDictionary()


def follow_lines(run: Run, fn: Callable[[int, int, HeadLines], None]) -> None:
    """Call `fn(layer, row, lines)` for every row of a prompt that is read along lines in this run; one `fn` a run."""
    _FOLLOWERS[run] = fn


@dataclass(frozen=True, eq=False)
class SparsePrompts:
    """Attention of prompts along lines, row by row, with an event of kind "prefill" for every row and layer.

    Attributes:
        name: for errors.
        choose: lines for `query [head query d_head]`, `key [kv_head key d_head]` and the factor on the scores.
        dense_above: share of computed cells above which a head is dense; None: that of the kernel.
        shortest: prompts with fewer keys are left to the model.
        dense_rows: the last queries attend to everything.
        kernel: as for `sparse_attention`.
        in_blocks: also on other devices than a CPU; else those without FlexAttention leave prompts to the model.
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
        keys, queries = (prompt.pos[:, 0] >= 0).sum(-1), (at >= 0).sum(-1)

        def events() -> list[Event]:
            made: list[Event] = []
            lengths = zip(at.amax(1).tolist(), keys.tolist(), queries.tolist(), strict=True)
            for row, (last, n_keys, n_queries) in enumerate(lengths):
                what, data = found[row], {"keys": n_keys, "queries": n_queries}
                if n_queries:
                    said = {"dense": why} if what is None else _said(what)
                    made.append(Event(row, step, last, layer, None, "prefill", data | said))
            return made

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
        # As it would be alone, whatever longer prompts it shares a batch with.
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
        """Why the model's own attention has to be, or is better, used; None: it is not."""
        keys, settings = prompt.key.shape[2], prompt.settings
        if bool(((prompt.pos[:, 0] >= 0).sum(-1) < self.shortest).all()):
            return f"fewer than {self.shortest} keys"
        device = prompt.query.device.type
        if device != "cpu" and not self.in_blocks:
            missing = flex.why_not(prompt.query[0], prompt.value[0]) if self.kernel != "blocks" else "not asked for"
            if missing is not None:
                return f"on {device} without FlexAttention: {missing}"
        if prompt.window is not None and keys > prompt.window:
            return "sliding window"
        if settings.get("softcap") is not None:
            return "soft cap"
        if settings.get("s_aux") is not None:
            return "learned sinks"
        if prompt.kv is not None and prompt.kv.edited:
            return "tokens were evicted"
        return None


def _said(what: Sparsity) -> dict[str, float | int | str]:
    attended = [1.0 if dense else cells for cells, dense in zip(what.cells, what.dense, strict=True)]
    mean = torch.tensor([what.cells, what.computed, attended]).mean(1).tolist()
    shares = {"cells": mean[0], "computed": mean[1], "attended": mean[2]}
    return shares | {"dense_heads": sum(what.dense), "kernel": what.kernel}
