"""Base class and registry of cache policies. A policy scores each slot; slots are then chosen by score under a budget.

Scoring and choosing are separate, so a new score needs no code for choosing, and a new choice no code for scoring.
Policies are found by name: those of sinkscope, those of installed packages, and any class by its module path.
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, Natural, Whole, check_fields, read_setting
from sinkscope.interventions.base import Intervention, Run
from sinkscope.kv.cache import CacheLayer, Rotary
from sinkscope.kv.session import Moment, Session

ENTRY_POINTS = "sinkscope.policies"
_REGISTERED: dict[str, type[Intervention]] = {}
NAMED: dict[str, Callable[..., Intervention]] = {}
"""What commands take in place of a policy though it is none, by name."""
Class = TypeVar("Class", bound=type[Intervention])


def register_policy(name: str) -> Callable[[Class], Class]:
    """Class decorator: register a policy under `name`, for commands and `make_policy`.

    An installed package can instead list its policies in the entry point group `sinkscope.policies`.

    Raises:
        SinkscopeError: Another policy already has this name.
    """

    def register(policy: Class) -> Class:
        if name in _REGISTERED:
            raise _taken(name, _REGISTERED[name], policy)
        _REGISTERED[name] = policy
        return policy

    return register


@dataclass(frozen=True, eq=False)
class At:
    """One layer at the moment when a policy acts.

    Attributes:
        layer: Index of the decoder layer.
        kv: The layer's cache.
        moment: The forward call that is about to run, and what is known about the cache.
        session: The run's session.
        memory: What this policy remembers for this cache between calls.
    """

    layer: int
    kv: CacheLayer
    moment: Moment
    session: Session
    memory: dict[Any, Any]

    @property
    def length(self) -> Int[Tensor, " batch"]:
        """Number of real tokens of each row so far, evicted or not."""
        return self.moment.call.before.to(self.kv.pos.device)


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
        mode: "evict" frees the tokens that are not chosen; "select" keeps the cache whole and attends to the chosen
            tokens.
        positions: "original" leaves keys rotated to the positions at which they were read. "rebased" re-rotates keys
            to contiguous positions, and new tokens continue from there.
        reduce: How the attention of query heads that share a kv head is combined into one number.
    """

    budget: Budget = field(default=1024, kw_only=False)
    first: Whole = 0
    last: Whole = 0
    every: Natural | Literal["prefill"] = 1
    mode: Literal["evict", "select"] = "evict"
    positions: Literal["original", "rebased"] = "original"
    reduce: Literal["mean", "max", "sum"] = "mean"

    UNIFORM: ClassVar[bool] = False
    """Whether every layer and head keeps the same positions, as `positions="rebased"` needs."""

    def __post_init__(self) -> None:
        check_fields(self)
        name = type(self).__name__
        if isinstance(self.budget, int) and self.budget < self.first + self.last:
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
        """Score each slot; the slots with the highest scores are kept."""

    def watch(self, session: Session, key: int) -> None:
        """Ask `session` for the attention that `scores` needs; by default none."""

    # Done here ----------------------------------------------------------------------------------------------------

    def summary(self, run: Run) -> str:
        """How many tokens the run's caches held, out of how many were read."""
        name, usage = f"{type(self).__name__}({self.budget})", run.usage
        if not usage:
            return f"{name} has read nothing yet."
        most = max(usage, key=lambda one: one.read_tokens)
        held = max(max(one.peak_tokens, default=0) for one in usage)
        size = max(one.logical_bytes for one in usage) / 1e6
        return f"{name} held at most {held:,.0f} of {most.read_tokens:,} tokens ({size:,.3g} MB of keys and values)."

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget, given as a fraction, that is smaller than the tokens that are always kept."""
        self.tokens(torch.tensor([tokens]))

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache and act at the right moments."""
        session = Session.of(run)
        session.claim(self)
        session.own_cache()
        session.anchors = max(session.anchors, self.first)
        rotary = Rotary(run.target) if self.positions == "rebased" else None
        self.watch(session, key)
        session.before_decode(lambda moment: self._act(moment, session, key, rotary))

    def group(self, heads: Float[Tensor, "batch head slot"], kv_heads: int) -> Float[Tensor, "batch kv_head slot"]:
        """Combine the numbers of query heads that share a kv head into one number, by `reduce`."""
        grouped = heads.unflatten(1, (kv_heads, -1))
        if self.reduce == "max":
            return grouped.amax(2)
        return grouped.mean(2) if self.reduce == "mean" else grouped.sum(2)

    def tokens(self, prompt: Int[Tensor, " batch"]) -> int | Int[Tensor, " batch"]:
        """The budget in tokens; if it is a fraction, one number per row."""
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

    def protected(self, at: At, budget: int | Int[Tensor, " batch"]) -> Bool[Tensor, "batch kv_head slot"]:
        """Slots that are always kept: the first and the last ones.

        The anchors of a guard in the same run are kept too; they take up to half of what the last ones leave.
        """
        pos, first = at.kv.pos, self.first
        if at.session.anchors > first:
            room = torch.as_tensor((budget - self.last) // 2, device=pos.device).clamp(self.first, at.session.anchors)
            first = room.view(-1, 1, 1)
        protected = pos < first
        return protected | (pos >= at.length[:, None, None] - self.last) if self.last else protected

    def select(
        self, scores: Float[Tensor, "batch kv_head slot"], at: At, budget: int | Int[Tensor, " batch"]
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Choose the protected slots and those with the highest scores, up to the budget, in every row and kv head.

        Among slots of equal score the later one is kept, so that padding and batching make no difference.
        """
        pos, protected = at.kv.pos, self.protected(at, budget)
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
            keep = keep.to(kv.pos.device)  # the same for all layers, of which some may be on another device
            if self.mode == "select":
                kv.select(keep)
                continue
            if rotary is not None:
                rotary.rebase(number, kv, keep)
            kv.evict(keep, None if memory["padded"] or kv.ragged else exact)

    def _begin(self, moment: Moment, memory: dict[Any, Any], rotary: Rotary | None) -> None:
        """Set everything that depends on the length of the prompt just read."""
        assert moment.state.prompt is not None
        memory["budget"] = self.tokens(moment.state.prompt)
        memory["padded"] = bool((moment.call.columns < 0).any())
        # Another policy may have changed this cache before, and then it is not uniform.
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
        """Return the scores after checking that there is a number for each slot.

        On an accelerator only the first scores of a cache are checked for NaN, because every later check would have to
        wait for the device.

        Raises:
            SinkscopeError: The scores have the wrong shape, or some are NaN.
        """
        name, pos, scores = type(self).__name__, at.kv.pos, self.scores(at)
        if not isinstance(scores, Tensor) or scores.shape != pos.shape:
            what = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
            raise SinkscopeError(
                f"{name}.scores returned {what} for layer {at.layer}: expected a tensor of shape {tuple(pos.shape)}, "
                "one number for each row, kv head and slot"
            )
        looked = at.moment.prefill_ended or scores.device.type == "cpu"
        # The smallest number is NaN if any is, and it is much faster to find. Padding may be NaN, since it is not kept.
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
    """Keep everything; `run.usage` reports what this costs.

    Example:
        >>> Full().budget
        1.0
    """

    budget: Budget = field(default=1.0, kw_only=False)

    def enter(self, run: Run, key: int) -> None:
        """Count the tokens, and leave the cache as it is."""
        session = Session.of(run)
        session.claim(self)
        session.own_cache()

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Score all slots the same."""
        return torch.zeros(at.kv.pos.shape, device=at.kv.pos.device)


# By name ---------------------------------------------------------------------------------------------------------


def policies() -> dict[str, type[Intervention]]:
    """Every registered policy, by name.

    Raises:
        SinkscopeError: An installed package lists a policy that cannot be imported, or whose name is taken.
    """
    found = dict(_REGISTERED)
    for entry in entry_points(group=ENTRY_POINTS):
        loaded = _class(entry.value.replace(" ", ""))
        if found.setdefault(entry.name, loaded) is not loaded:
            raise _taken(entry.name, found[entry.name], loaded)
    return dict(sorted(found.items()))


def make_policy(name: str, **options: Any) -> Any:
    """Make the policy registered as `name`; the options are its fields.

    Raises:
        SinkscopeError: The policy or field does not exist, or a value is invalid.

    Example:
        >>> make_policy("streaming", budget=512)
        StreamingLLM(budget=512, first=4, last=0, every=1, mode='evict', positions='original', reduce='mean')
    """
    known = _REGISTERED if name in _REGISTERED else policies()
    if name not in known:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(known)}, or package.module:Class")
    return _made(name, known[name], options)


def policy_named(text: str) -> Intervention:
    """Make a cache policy from its command-line name: `NAME` or `package.module:Class`, optionally with `:BUDGET`.

    The budget is a number of tokens or a fraction of the prompt. The current folder is also searched for modules.
    `loopguard` and `loopguard:paper` are the two guards.

    Raises:
        SinkscopeError: The policy or class does not exist, or the budget is invalid.

    Example:
        >>> policy_named("streaming:512").budget, policy_named("sinkscope.kv.h2o:H2O:0.25").budget
        (512, 0.25)
    """
    where = f"policy {text!r}: budget="
    if given := next((name for name in sorted(NAMED, reverse=True) if f"{text}:".startswith(f"{name}:")), None):
        size = text.removeprefix(given).removeprefix(":")
        return NAMED[given](**({"budget": read_setting(size, Budget, where)} if size else {}))
    name, *rest = text.split(":")
    own = rest[:1] if rest and (rest[0].isidentifier() or len(rest) > 1) and name not in _REGISTERED else []
    budget = ":".join(rest[len(own) :])
    options = {} if len(rest) == len(own) else {"budget": read_setting(budget, Budget, where)}
    return _made(text, _class(f"{name}:{own[0]}"), options) if own else make_policy(name, **options)


def _class(path: str) -> type[Intervention]:
    """The class at "package.module:Class"."""
    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        found = getattr(import_module(module), name)
    except Exception as error:  # a module that others wrote may fail in any way
        what = str(error).partition("\n")[0]
        raise SinkscopeError(f"policy {path!r} cannot be imported: {type(error).__name__}: {what}") from None
    finally:
        sys.path.remove("")
    if not isinstance(found, type) or not issubclass(found, Intervention):
        raise SinkscopeError(f"policy {path!r} is no cache policy: expected a subclass of sinkscope.kv.Policy")
    return found


def _made(name: str, policy: type[Intervention], options: dict[str, Any]) -> Intervention:
    known = [field.name for field in fields(policy)]  # type: ignore[arg-type]
    if odd := [option for option in options if option not in known]:
        raise SinkscopeError(f"policy {name!r} has no {odd[0]!r}; it has: {', '.join(known)}")
    try:
        return policy(**options)
    except TypeError as error:  # a field without a default, or a method that is missing
        raise SinkscopeError(f"policy {name!r} cannot be made: {error}") from None


def _taken(name: str, first: type, second: type) -> SinkscopeError:
    both = " and ".join(f"{each.__module__}.{each.__qualname__}" for each in (first, second))
    return SinkscopeError(f"two policies are called {name!r}, {both}: give one of them another name")
