"""What every cache policy is: a score per slot, and a choice of slots by score under a budget.

The two are apart, so that a new score needs no code for choosing, and a new choice none for scoring.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Union, get_args, get_origin, get_type_hints

import torch
from jaxtyping import Bool, Float, Int
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from sinkscope.checked import Natural, Whole
from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.cache import CacheLayer
from sinkscope.kv.rebase import Rotary
from sinkscope.kv.registry import register_policy
from sinkscope.kv.session import Moment, Session


@dataclass(frozen=True, eq=False)
class At:
    """One layer at the moment when a policy acts.

    Attributes:
        layer: decoder layer.
        kv: its cache.
        moment: the call that is about to run, and what is known of the cache.
        session: of the run.
        memory: of this policy for this cache, over the calls.
    """

    layer: int
    kv: CacheLayer
    moment: Moment
    session: Session
    memory: dict[Any, Any]

    @property
    def length(self) -> Int[Tensor, " batch"]:
        """Real tokens of each row so far, evicted or not."""
        return self.moment.call.before.to(self.kv.pos.device)


@dataclass(frozen=True, kw_only=True)
class Policy(Intervention):
    """Base of the cache policies. A subclass writes `scores`, and `watch` if it has to see attention.

    A policy acts when the first token after a prompt is about to be processed, whatever pieces the prompt came in, and
    then every `every` tokens; the step that follows attends to the budget and to its own token. Positions are true
    positions in each row, so padded batches give what single prompts give.

    Attributes:
        budget: tokens kept per row, layer and kv head: a number, or a fraction of the row's prompt, fixed when its
            prefill ends.
        first: positions from the beginning that are always kept.
        last: latest positions that are always kept.
        every: act every so many generated tokens; "prefill": only when a prompt has been read.
        mode: "evict" frees what is not kept; "select" keeps the cache whole and attends to what is kept.
        positions: "original": keys stay rotated by the positions they were read at. "rebased": they are rotated again
            as if nothing lay between them, and new tokens follow closely.
        reduce: how attention of the query heads that share a kv head becomes one number.
    """

    budget: int | float = 1024
    first: Whole = 0
    last: Whole = 0
    every: Natural | Literal["prefill"] = 1
    mode: Literal["evict", "select"] = "evict"
    positions: Literal["original", "rebased"] = "original"
    reduce: Literal["mean", "max", "sum"] = "mean"

    UNIFORM: ClassVar[bool] = False
    """Every layer and head keeps the same positions; needed for `positions="rebased"`."""

    def __post_init__(self) -> None:
        check_fields(self)
        name = type(self).__name__
        whole = isinstance(self.budget, int)
        if (whole and self.budget < 1) or (not whole and not 0 < self.budget <= 1):
            raise SinkscopeError(
                f"{name}: budget={self.budget!r}: expected a number of tokens from 1, or a fraction of the prompt "
                "above 0.0 and up to 1.0",
                page="kv-budget",
            )
        # Looked at here too: a policy may annotate these fields anew.
        if min(self.first, self.last) < 0 or (self.every != "prefill" and self.every < 1):
            raise SinkscopeError(
                f"{name}: first={self.first}, last={self.last}, every={self.every}: expected numbers of tokens from 0, "
                'and an interval from 1 or "prefill"'
            )
        if whole and self.budget < self.first + self.last:
            raise SinkscopeError(
                f"{name}: budget={self.budget} is below the {self.first} first and {self.last} last tokens that are "
                "always kept: raise the budget or protect fewer",
                page="kv-budget",
            )
        if self.positions == "rebased" and not self.UNIFORM:
            raise UnsupportedError(
                f"{name} keeps other positions in every head, so new positions cannot be given: use "
                'positions="original"'
            )
        if self.positions == "rebased" and self.mode == "select":
            raise SinkscopeError(f'{name}: positions="rebased" needs mode="evict"')

    # To be written by a policy ------------------------------------------------------------------------------------

    @abstractmethod
    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """What each slot is worth; the highest are kept."""

    def watch(self, session: Session, key: int) -> None:
        """Ask `session` for what `scores` needs; by default nothing."""

    # Done here ----------------------------------------------------------------------------------------------------

    def check_prompt(self, tokens: int) -> None:
        """Refuse a fraction of the prompt that is less than what is always kept."""
        self.tokens(torch.tensor([tokens]))

    def enter(self, run: Run, key: int) -> None:
        """Own the cache and act at the right moments."""
        session = Session.of(run)
        session.claim(self)
        session.own_cache()
        rotary = Rotary(run.target) if self.positions == "rebased" else None
        self.watch(session, key)
        session.before_decode(lambda moment: self._act(moment, session, key, rotary))

    def group(self, heads: Float[Tensor, "batch head slot"], kv_heads: int) -> Float[Tensor, "batch kv_head slot"]:
        """One number per kv head from those of the query heads that share it, by `reduce`."""
        grouped = heads.unflatten(1, (kv_heads, -1))
        if self.reduce == "max":
            return grouped.amax(2)
        return grouped.mean(2) if self.reduce == "mean" else grouped.sum(2)

    def tokens(self, prompt: Int[Tensor, " batch"]) -> int | Int[Tensor, " batch"]:
        """The budget in tokens; of each row, if it is a fraction."""
        if isinstance(self.budget, int):
            return self.budget
        rows = (prompt * self.budget).long()
        least = int(rows.min())
        if least < max(1, self.first + self.last):
            raise SinkscopeError(
                f"{type(self).__name__}: budget={self.budget} of a prompt of {int(prompt.min())} tokens is {least}, "
                f"below the {max(1, self.first + self.last)} that are always kept: raise it",
                page="kv-budget",
            )
        return rows

    def select(
        self, scores: Float[Tensor, "batch kv_head slot"], at: At, budget: int | Int[Tensor, " batch"]
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """The protected slots and the highest scores, up to the budget, in every row and kv head.

        Of equal scores the later slot stays, so that padding and the batch make no difference.
        """
        pos = at.kv.pos
        protected = pos < self.first
        if self.last:
            protected = protected | (pos >= at.length[:, None, None] - self.last)
        ranked = scores.float().masked_fill(protected, torch.inf).masked_fill(pos < 0, -torch.inf)
        slots = pos.shape[-1]
        if isinstance(budget, int):
            if slots <= budget:
                return pos >= 0
            if slots == budget + 1:
                lowest = ranked.argmin(-1, keepdim=True)
            else:
                lowest = ranked.argsort(dim=-1, stable=True)[..., : slots - budget]
            return (pos >= 0).scatter(-1, lowest, False)
        order = ranked.argsort(dim=-1, stable=True)
        rank = torch.empty_like(order).scatter_(-1, order, torch.arange(slots, device=pos.device).expand_as(order))
        return (rank >= slots - budget.to(pos.device)[:, None, None]) & (pos >= 0)

    def _act(self, moment: Moment, session: Session, key: int, rotary: Rotary | None) -> None:
        memory = moment.state.memory.setdefault(key, {})
        if moment.prefill_ended:
            self._begin(moment, memory, rotary)
        elif self.every == "prefill" or moment.state.decoded % self.every:
            return
        budget = memory["budget"]
        counted = type(self).select is Policy.select  # the choice of a subclass may be smaller than the budget
        exact = budget if counted and isinstance(budget, int) and self.mode == "evict" else None
        keep: Tensor | None = None
        for number, kv in enumerate(moment.layers):
            if exact is not None and kv.slots <= exact:
                continue
            if keep is None or not memory["uniform"]:
                at = At(number, kv, moment, session, memory)
                keep = self.select(self.checked_scores(at), at, budget)
            if self.mode == "select":
                kv.select(keep)
                continue
            if rotary is not None:
                rotary.rebase(number, kv, keep)
            kv.evict(keep, None if memory["padded"] or kv.ragged else exact)

    def _begin(self, moment: Moment, memory: dict[Any, Any], rotary: Rotary | None) -> None:
        """A prompt has been read: what follows from it is settled."""
        assert moment.state.prompt is not None
        memory["budget"] = self.tokens(moment.state.prompt)
        memory["padded"] = bool((moment.call.columns < 0).any())
        # Not so where another policy has been at this cache before.
        first = moment.layers[0].pos
        memory["uniform"] = self.UNIFORM and all(
            kv.pos.shape == first.shape and torch.equal(kv.pos.to(first.device), first) for kv in moment.layers
        )
        if rotary is not None and not memory["uniform"]:
            raise UnsupportedError(
                "this cache holds other positions in every layer, so new positions cannot be given: use "
                'positions="original", or start with a new cache',
                page="kv-session",
            )

    def checked_scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """The scores, which are numbers and one for each slot.

        On an accelerator only the first scores of a cache are looked at for NaN: later ones would have to be waited
        for at every step.

        Raises:
            SinkscopeError: another shape, or NaN.
        """
        name, pos, scores = type(self).__name__, at.kv.pos, self.scores(at)
        if not isinstance(scores, Tensor) or scores.shape != pos.shape:
            what = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise SinkscopeError(
                f"{name}.scores returned {what} for layer {at.layer}: expected a tensor of shape {tuple(pos.shape)}, "
                "one number for each row, kv head and slot"
            )
        looked = at.moment.prefill_ended or scores.device.type == "cpu"
        # The smallest number is NaN if any is, and much faster to find; padding may be NaN, for nobody keeps it.
        if looked and scores.is_floating_point() and scores.numel() and bool(scores.amin().isnan()):
            if bool((scores.isnan() & (pos >= 0)).any()):
                raise SinkscopeError(
                    f"{name}.scores returned NaN for layer {at.layer}: slots without a score cannot be compared; "
                    "return -torch.inf for what is worth nothing"
                )
        return scores


@register_policy("full")
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keep everything; `run.usage` says what that costs.

    Example:
        >>> Full().budget
        1.0
    """

    budget: int | float = 1.0

    def enter(self, run: Run, key: int) -> None:
        """Count, and leave the cache alone."""
        session = Session.of(run)
        session.claim(self)
        session.own_cache()

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """All the same."""
        return torch.zeros(at.kv.pos.shape, device=at.kv.pos.device)


_WORDS = {
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "True or False",
    "a whole number or a number": "a number",
    "greater than or equal to": "a number from",
}
"""How errors say what pydantic says."""
_adapter: Any = cache(TypeAdapter)


def check_fields(made: Any) -> None:
    """Refuse fields of a dataclass whose values do not fit the numbers, switches and words that are annotated there.

    A bool is no number here, a whole number is a number, and fields of any other type are left alone. So are those of
    a class whose annotations name what is imported for type checkers only. `Natural`, `Whole` and `Share` of
    `sinkscope.checked` are numbers with a range.

    Raises:
        SinkscopeError: the first such field, with its value and what was expected.
    """
    try:
        hints = get_type_hints(type(made), include_extras=True)
    except NameError:
        return
    for field in fields(made):
        value = getattr(made, field.name)
        try:
            if _checkable(hints[field.name]):
                _adapter(hints[field.name]).validate_python(value, strict=True)
        except ValidationError as error:
            found = dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
            expected = " or ".join(found)
            for theirs, ours in _WORDS.items():
                expected = expected.replace(theirs, ours)
            raise SinkscopeError(f"{type(made).__name__}: {field.name}={value!r}: expected {expected}") from None


def _checkable(hint: Any) -> bool:
    if get_origin(hint) in (Annotated, Union, UnionType):
        return all(_checkable(part) for part in get_args(hint)[: 1 if get_origin(hint) is Annotated else None])
    return hint in (int, float, bool, NoneType) or get_origin(hint) is Literal
