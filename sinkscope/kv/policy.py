"""Base class of cache policies. A policy scores each slot; slots are then chosen by score under a budget.

Scoring and choosing are separate, so a new score needs no code for choosing, and a new choice no code for scoring.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from sinkscope.engine.actor import Actor
from sinkscope.engine.run import Run
from sinkscope.engine.step import Step
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, Natural, Whole, check_fields, share_of
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.cache import CacheLayer, places_without
from sinkscope.kv.keeper import LATEST_QUERIES, CacheKeeper
from sinkscope.kv.usage import held_summary

LayerBudget = int | Int[Tensor, "batch _"]
"""Tokens that a layer keeps: one number, or one for each row, or for each row and kv head."""


@dataclass(frozen=True)
class KeptPerRow:
    """What a policy keeps of each row, in tokens; fixed at the end of the prompt.

    Attributes:
        total: Tokens kept in each layer and kv head, unless the policy gives layers or heads budgets of their own.
        first: First tokens that are always kept, with those that a guard in the same run keeps.
        latest: Latest tokens that are always kept.
    """

    total: tuple[int, ...]
    first: tuple[int, ...]
    latest: tuple[int, ...]

    @cached_property
    def most_protected(self) -> int:
        """The largest number of tokens of a row that are always kept."""
        return max(map(sum, zip(self.first, self.latest, strict=True)))

    @cached_property
    def one_budget(self) -> LayerBudget:
        """The total as `Policy.layer_budget` gives it: one number if it is the same for all rows."""
        return _number_or_rows(self.total)


@dataclass(frozen=True, eq=False)
class LayerMoment:
    """One layer at the moment when a policy acts.

    Attributes:
        kv: The layer's cache.
        step: The forward call that is about to run, and what is known about its rows.
        rows: What the policy keeps of each row.
    """

    kv: CacheLayer
    step: Step
    rows: KeptPerRow

    def __repr__(self) -> str:
        """Return what it is, without its numbers."""
        return f"LayerMoment(layer={self.layer}, keys={[*self.kv.keys.shape]}, rows={self.rows})"

    @property
    def layer(self) -> int:
        """Index of the decoder layer."""
        return self.kv.number

    @property
    def length(self) -> Int[Tensor, " batch"]:
        """Number of real tokens of each row so far, evicted or not."""
        return self.step.earlier.length.to(self.kv.keys.device)

    def window_rows(self, last: int) -> Float[Tensor, "batch head query slot"]:
        """Recompute, in float32, the attention of the `last` queries to everything in the cache; 0 at padding.

        Raises:
            UnsupportedError: No query was seen. `keep_queries`, called in `watch`, has them kept.
        """
        latest = self.step.state.known.get(LATEST_QUERIES)
        if latest is None or self.layer not in latest.by_layer:
            raise unseen_queries()
        columns = self.step.earlier.columns_of(self.kv.pos)
        return latest.by_layer[self.layer].rows(self.kv, columns, last)


@dataclass(frozen=True, kw_only=True)
class Policy(Intervention):
    """Base class of cache policies. A subclass implements `scores`, and `watch` if it needs to see attention.

    A policy acts when the whole prompt has been read (in any number of calls), before the first generated token is
    processed, and then before every `every`-th token. The next step attends to the budget and to its own token.
    Positions are true positions in each row, so padded batches give the same results as single prompts.

    Attributes:
        budget: Tokens kept per row, layer and kv head: a number, or a fraction of the row's prompt, fixed at the end
            of prefill.
        first: Number of first positions that are always kept.
        last: Number of latest positions that are always kept.
        every: Number of generated tokens between two choices. "prefill" chooses only once, after a prompt is read.
    """

    budget: Budget = field(default=1024, kw_only=False)
    first: Whole = 0
    last: Whole = 0
    every: Natural | Literal["prefill"] = 1

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.budget, int):
            self.check_prompt(0)

    # To be written by a policy ------------------------------------------------------------------------------------

    @abstractmethod
    def scores(self, at: LayerMoment) -> Real[Tensor, "batch kv_head slot"]:
        """Score each slot; the slots with the highest scores are kept."""

    def layer_budget(self, at: LayerMoment) -> LayerBudget:
        """Return the budget of a layer in tokens: by default that of each row, the same in every layer and kv head.

        Args:
            at: The layer. `at.rows.total` holds the budget of each row in tokens.

        Returns:
            One number, or one for each row `[batch 1]`, or for each row and kv head. Where it is less than what is
            always kept, that is kept.
        """
        return at.rows.one_budget

    def watch(self, run: Run) -> None:
        """Ask the block for the attention that `scores` needs; by default none."""

    @property
    def shown_name(self) -> str:
        """Name in messages."""
        return type(self).__name__

    # Done here ----------------------------------------------------------------------------------------------------

    def summary(self, run: Run) -> str:
        """Return how many tokens the run's caches held, out of how many were read."""
        return held_summary(f"{self.shown_name}({self.budget})", run)

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache and act at the right moments."""
        CacheKeeper.of(run, self.shown_name, self.first).watch_decoding(run)
        self.watch(run)
        run.act(PolicyActor(self))

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget, given as a fraction, that is smaller than the tokens that are always kept."""
        self.kept_of(tokens)

    def kept_of(self, prompt: int, anchors: int = 0) -> tuple[int, int, int]:
        """Return what is kept of a row with a prompt of this length: its budget, and first and latest tokens.

        Args:
            prompt: Tokens of the prompt.
            anchors: First tokens that a guard in the same run keeps; they take up to half of what the latest leave.

        Raises:
            SinkscopeError: What is always kept does not fit into the budget.
        """
        budget = self.budget
        named = f"budget={budget}"
        if not isinstance(budget, int):
            budget = share_of(budget, prompt)
            named += f" of a prompt of {prompt} tokens, {budget},"
        first, latest = self.always_kept(budget)
        least = max(1, first + latest)
        if budget < least:
            raise SinkscopeError(
                f"{self.shown_name}: {named} is below the {least} tokens that are always kept: raise the budget or "
                "protect fewer"
            )
        return budget, max(first, min(anchors, (budget - latest) // 2)), latest

    def kept_per_row(self, step: Step) -> KeptPerRow:
        """Return what is kept of each row: its budget, and the first and latest tokens that are always kept."""
        kept = [self.kept_of(prompt, step.anchors) for prompt in step.state.prompt]
        return KeptPerRow(*zip(*kept, strict=True))

    def always_kept(self, budget: int) -> tuple[int, int]:
        """Return numbers of first and of latest tokens of a row that are always kept at a budget in tokens."""
        return self.first, self.last

    def protected(self, at: LayerMoment) -> Bool[Tensor, "batch kv_head slot"]:
        """Return slots that are always kept: the first and the last ones, and those that a guard in the run keeps."""
        pos = at.kv.pos
        protected = pos < _by_slot(_number_or_rows(at.rows.first), pos)
        if any(at.rows.latest):
            latest = _by_slot(_number_or_rows(at.rows.latest), pos)
            protected = protected | (pos >= at.length[:, None, None] - latest)
        return protected

    def select(
        self,
        scores: Float[Tensor, "batch kv_head slot"],
        at: LayerMoment,
        budget: LayerBudget,
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Choose the protected slots and those with the highest scores, up to the budget, in every row and kv head.

        Among slots of equal score the later one is kept, so that padding and batching make no difference.
        """
        pos = at.kv.pos
        ranked = self._ranked(scores, at)
        if not at.kv.gapless:
            ranked = ranked.masked_fill(pos < 0, -torch.inf)
        stays = (rank_from_top(ranked) < _by_slot(budget, pos)) | (ranked == torch.inf)
        return (pos >= 0) & stays

    def _ranked(self, scores: Tensor, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """The scores, with infinity for slots that are always kept."""
        if any(at.rows.first) or any(at.rows.latest):
            scores = scores.masked_fill(self.protected(at), torch.inf)
        return scores

    def act(self, step: Step) -> None:
        """Choose what is kept in every layer, if it is time to."""
        if not step.prefill_ended and (self.every == "prefill" or step.state.decoded % self.every):
            return
        rows = self.kept_per_row(step)
        one_too_many: dict[tuple[torch.Size, torch.device], list[tuple[CacheLayer, Tensor]]] = {}
        for kv in step.layers:
            at = LayerMoment(kv, step, rows)
            budget = self.layer_budget(at)
            exact = None
            slots = kv.keys.shape[-2]
            if isinstance(budget, int) and type(self).select is Policy.select:  # every head keeps as many
                budget = max(budget, rows.most_protected)
                if slots <= budget:
                    continue
                exact = budget if kv.gapless else None
            scores = self._checked_scores(at)
            if exact == slots - 1:
                ranked = self._ranked(scores, at)
                one_too_many.setdefault((ranked.shape, ranked.device), []).append((kv, ranked))
            else:
                kv.evict(self.select(scores, at, budget), exact)
        # At every generated token one slot leaves: without sorting, and with one launch for all layers of a device.
        for (shape, _), layers in one_too_many.items():
            lowest = torch.stack([ranked for _, ranked in layers]).argmin(-1, keepdim=True)
            for (kv, _), stay in zip(layers, places_without(lowest, shape[-1]), strict=True):
                kv.keep_only(stay)

    def chosen(self, at: LayerMoment) -> Bool[Tensor, "batch kv_head slot"]:
        """Return the slots that a layer keeps."""
        return self.select(self._checked_scores(at), at, self.layer_budget(at))

    def _checked_scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """The scores of a layer's slots, a number for each.

        On an accelerator only the first scores of a cache are checked for NaN, because every later check would have to
        wait for the device.

        Raises:
            SinkscopeError: The scores have the wrong shape, or some are NaN.
        """
        scores: object = self.scores(at)
        shape = at.kv.keys.shape[:3]
        if not isinstance(scores, Tensor) or scores.shape != shape:
            raise SinkscopeError(
                f"{self.shown_name}.scores returned a {type(scores).__name__} of shape "
                f"{tuple(getattr(scores, 'shape', ()))} for layer {at.layer}: expected a tensor of shape "
                f"{tuple(shape)}, one number per row, kv head, slot"
            )
        checked = at.step.prefill_ended or scores.device.type == "cpu"
        # The smallest number is NaN if any is, and it is much faster to find. Padding may be NaN, since it is not kept.
        if checked and scores.is_floating_point() and scores.numel() and math.isnan(scores.amin().item()):
            if bool((scores.isnan() & (at.kv.pos >= 0)).any()):
                raise SinkscopeError(
                    f"{self.shown_name}.scores returned NaN for layer {at.layer}: slots without a score cannot be "
                    "compared; return -torch.inf for what is worth nothing"
                )
        return scores.float()


@dataclass(frozen=True, eq=False)
class PolicyActor(Actor):
    """Lets a policy act before every generated token; `after` is a setting of some policies."""

    policy: Policy

    def before(self, step: Step) -> None:
        """Choose what the cache keeps."""
        if step.decodes:
            self.policy.act(step)


def _number_or_rows(numbers: Sequence[int]) -> LayerBudget:
    """The number that all rows share; else a number for each row."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return torch.tensor(numbers)[:, None]


def _by_slot(number: LayerBudget, like: Tensor) -> int | Int[Tensor, "batch _ 1"]:
    """A number for all rows, or some of each row, to compare with a tensor `[batch kv_head slot]`."""
    if isinstance(number, int):
        return number
    return number.to(like.device)[..., None]


def rank_from_top(scores: Float[Tensor, "*batch slot"]) -> Int[Tensor, "*batch slot"]:
    """Return the rank of each score along the last dimension: 0 for the highest.

    Of equal scores the later one ranks higher.
    """
    order = scores.argsort(dim=-1, stable=True).flip(-1)
    index = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def unseen_queries() -> UnsupportedError:
    """Return the error of a policy that needs queries which were read before it could see them."""
    return UnsupportedError(
        "the latest queries were not seen, because this cache was filled outside of the `with`: read the prompt inside"
    )
