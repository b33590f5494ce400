"""LoopServe (Li et al. 2025, section 5): sparse attention for a new turn's prompt, progressive selection after it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.loopserve.decode import Progressive
from sinkscope.kv.loopserve.select import Variant, check_selection, select_lines
from sinkscope.kv.loopserve.sparse import DENSE_ABOVE, Sparsity, sparse_attention
from sinkscope.kv.moments import Prompt
from sinkscope.kv.session import Session


class LoopServeDecoding(Progressive):
    """The decoding half; its own class, so that errors name it."""


@dataclass(frozen=True, kw_only=True)
class LoopServe(Intervention):
    """Choose lines of attention for every prompt and head, compute only those, and decode from a part of the cache.

    A prompt is every call with several tokens: in a dialogue over one cache those are the new turn's tokens, which
    attend to the whole context along their own lines. With `alpha=1` and a budget that covers everything the model does
    exactly what it does without.

    Every prompt is an event of kind "prefill" per row and layer, with `data` "keys", "queries" and either "dense" (why
    it was read by the model's own attention) or "cells" and "computed" (shares of the causal cells, mean over heads)
    and "dense_heads" (number of heads for which computing everything is faster). See `tokens_read` for decoding.

    Attributes:
        alpha: share of the sampled attention weight that the lines hold (0.955 in the paper's main results, which finds
            0.99 to 1 best in its own sweep).
        budget: tokens that each layer and kv head reads while decoding, beside those since the last selection.
        interval: tokens between selections, and queries that vote (n_d).
        sample: queries whose attention the lines are chosen by.
        first: decoding steps that read everything; 0 selects as soon as the prompt has been read.
        prefill: sparse prompts. Alone ("-P" in the paper): `decode=False`.
        decode: progressive selection. Alone ("-D"): `prefill=False`.
        variant: of the choice of lines, "exact" or "faithful" (`select_lines`).
        shortest: prompts that attend to fewer keys are read by the model's own attention, which is faster there.
        dense_above: share of computed cells above which a head is computed densely. None: 0.6 on a CPU; elsewhere all
            is dense: a loop over blocks of queries does not pay against the kernels of a GPU.

    Raises:
        SinkscopeError: alpha outside (0, 1], an interval or sample below 1, and as for every policy.
        UnsupportedError: sparse prompts on a TransformerBridge, which computes attention itself.

    Example:
        >>> LoopServe(alpha=0.99, budget=512).interval
        16
    """

    alpha: float = 0.955
    budget: int | float = 1024
    interval: int = 16
    sample: int = 48
    first: int = 16
    prefill: bool = True
    decode: bool = True
    variant: Variant = "exact"
    shortest: int = 2048
    dense_above: float | None = None

    def __post_init__(self) -> None:
        check_selection(self.alpha, self.sample, self.variant)
        if self.shortest < 0 or (self.dense_above is not None and self.dense_above < 0):
            raise SinkscopeError(
                f"shortest={self.shortest!r}, dense_above={self.dense_above!r}: expected numbers from 0"
            )
        if not self.prefill and not self.decode:
            raise SinkscopeError("prefill=False, decode=False: nothing would be done; leave one of them on")
        _ = self.decoding

    @property
    def decoding(self) -> Progressive:
        """The policy of the decoding half."""
        return LoopServeDecoding(budget=self.budget, every=self.interval, after=self.first)

    def enter(self, run: Run, key: int) -> None:
        """Replace attention of prompts, and own the cache."""
        session = Session.of(run)
        if self.prefill and self.alpha < 1:
            if run.target.kind == "bridge":
                raise UnsupportedError(
                    "a TransformerBridge computes its own attention, so LoopServe cannot make prompts sparse on it: "
                    "use prefill=False, or load the model with backend='hf'",
                    page="kv-session",
                )
            session.replace_prefill(lambda prompt: self._attend(prompt, session))
        if self.decode:
            self.decoding.enter(run, key)

    def _attend(self, prompt: Prompt, session: Session) -> Tensor | None:
        why = self._why_dense(prompt)
        call, rows, found = session.call, len(prompt.query), list[Sparsity | None]()
        assert call is not None
        out = None
        if why is None:
            out = prompt.query.new_zeros(*prompt.query.shape[:3], prompt.value.shape[-1]).transpose(1, 2).contiguous()
            for row in range(rows):
                real, held = prompt.query_pos[row] >= 0, prompt.pos[row, 0] >= 0
                if not bool(real.any()):
                    found.append(None)
                    continue
                made, what = self._row(prompt, row, real, held)
                out[row, real] = made.transpose(0, 1).to(out.dtype)
                found.append(what)
        step, at, layer = call.step, prompt.query_pos, prompt.layer
        keys, queries = (prompt.pos[:, 0] >= 0).sum(-1), (at >= 0).sum(-1)
        given: list[Sparsity | None] = found or [None] * rows

        def events() -> list[Event]:
            made: list[Event] = []
            lengths = zip(at.amax(1).tolist(), keys.tolist(), queries.tolist(), strict=True)
            for row, (last, n_keys, n_queries) in enumerate(lengths):
                what, data = given[row], {"keys": n_keys, "queries": n_queries}
                if n_queries:
                    said = {"dense": why} if what is None else _said(what)
                    made.append(Event(row, step, last, layer, None, "prefill", data | said))
            return made

        session.run.log(events)
        return out

    def _row(self, prompt: Prompt, row: int, real: Tensor, held: Tensor) -> tuple[Tensor, Sparsity]:
        query, key, value = prompt.query[row, :, real], prompt.key[row, :, held], prompt.value[row, :, held]
        scaling = prompt.settings.get("scaling")
        scaling = None if scaling is None else float(scaling)
        lines = select_lines(query, key, self.alpha, sample=self.sample, variant=self.variant, scaling=scaling)
        limit = DENSE_ABOVE if self.dense_above is None else self.dense_above
        return sparse_attention(query, key, value, lines, scaling=scaling, dense_above=limit)

    def _why_dense(self, prompt: Prompt) -> str | None:
        """Why the model's own attention has to be, or is better, used; None: it is not."""
        keys, settings = prompt.key.shape[2], prompt.settings
        if keys < self.shortest:
            return f"fewer than {self.shortest} keys"
        if self.dense_above is None and prompt.query.device.type != "cpu":
            return f"on {prompt.query.device.type}"
        if prompt.window is not None and keys > prompt.window:
            return "sliding window"
        if settings.get("softcap") is not None:
            return "soft cap"
        if settings.get("s_aux") is not None:
            return "learned sinks"
        if prompt.kv is not None and prompt.kv.edited:
            return "tokens were evicted"
        return None


def _said(what: Sparsity) -> dict[str, float | int]:
    mean = torch.tensor([what.cells, what.computed]).mean(1).tolist()
    return {"cells": mean[0], "computed": mean[1], "dense_heads": sum(what.dense)}
