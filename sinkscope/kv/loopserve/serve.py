"""LoopServe (Li et al. 2025, section 5): sparse attention for a new turn's prompt, progressive selection after it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.loopserve.decode import Progressive
from sinkscope.kv.loopserve.prefill import SparsePrompts
from sinkscope.kv.policy import check_fields
from sinkscope.kv.session import Session
from sinkscope.lines.choice import HeadLines, Variant, check_selection, select_lines
from sinkscope.lines.sparse import Kernel, dense_limit


class LoopServeDecoding(Progressive):
    """The decoding half; its own class, so that errors name it."""


@dataclass(frozen=True, kw_only=True)
class LoopServe(Intervention):
    """Choose lines of attention for every prompt and head, compute only those, and decode from a part of the cache.

    A prompt is every call with several tokens. In a dialogue over one cache these are the new turn's tokens, which
    attend to the whole context along their own lines. With `alpha=1` and a budget that covers everything, the model's
    output does not change.

    Every prompt logs an event of kind "prefill" per row and layer. Its `data` has "keys", "queries" and either "dense"
    (the reason why the model's own attention read it) or "cells" and "computed" (shares of the causal cells, mean over
    heads), "attended" (as "cells", with dense heads counted as 1), "dense_heads" (number of heads for which computing
    everything is faster) and "kernel" (what computed the others). `tokens_read` says the same of decoding.

    Attributes:
        alpha: share of the sampled attention weight that the lines hold (0.955 in the paper's main results, which finds
            0.99 to 1 best in its own sweep).
        budget: tokens that each layer and kv head reads while decoding, besides those since the last selection.
        interval: tokens between selections, and number of queries that vote (n_d).
        sample: number of queries whose attention decides which lines are chosen.
        recent: how many of these are the last of the prompt; the others are drawn. With 0, as in the paper, all are
            drawn. Then keys to which only the end of the prompt attends may lie on no line, for instance the facts that
            a question asks for.
        first: decoding steps that read everything; 0 selects as soon as the prompt has been read.
        prefill: make prompts sparse. With `decode=False` this is the paper's "-P".
        decode: select progressively. With `prefill=False` this is the paper's "-D".
        variant: variant of the choice of lines, "exact" or "faithful" (`select_lines`).
        shortest: prompts that attend to fewer keys are read by the model's own attention, which is faster there.
        dense_above: share of computed cells above which a head is computed densely. None: 0.75, less for heads
            narrower than 48, 0.5 on CUDA, and everything on other devices, where a loop over blocks does not pay.
        kernel: what computes the lines, "blocks", "flex" or "auto" (`sparse_attention`).

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
    recent: int = 0
    first: int = 16
    prefill: bool = True
    decode: bool = True
    variant: Variant = "exact"
    shortest: int = 2048
    dense_above: float | None = None
    kernel: Kernel = "auto"

    def __post_init__(self) -> None:
        check_fields(self)
        check_selection(self.alpha, self.sample, self.variant, self.recent)
        if self.shortest < 0 or (self.dense_above is not None and self.dense_above < 0):
            raise SinkscopeError(
                f"shortest={self.shortest!r}, dense_above={self.dense_above!r}: expected numbers from 0"
            )
        if self.interval < 1 or self.first < 0:
            raise SinkscopeError(
                f"interval={self.interval}, first={self.first}: expected an interval from 1 and a number of steps from "
                "0"
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
            limit = self.dense_above
            prompts = SparsePrompts(
                "LoopServe", self._lines, limit, self.shortest, kernel=self.kernel, in_blocks=limit is not None
            )
            prompts.enter(session)
        if self.decode:
            self.decoding.enter(run, key)

    def _lines(self, query: Tensor, key: Tensor, scaling: float | None) -> HeadLines:
        limit = self.dense_above
        limit = dense_limit(query.shape[-1], self.kernel, query.device) if limit is None else limit
        return select_lines(
            query,
            key,
            self.alpha,
            sample=self.sample,
            recent=self.recent,
            variant=self.variant,
            scaling=scaling,
            dense_above=limit,
        )
