"""Base class and registry of cache policies. A policy scores each slot; slots are then chosen by score under a budget.

Scoring and choosing are separate, so a new score needs no code for choosing, and a new choice no code for scoring.
Policies are found by name: those of sinkscope, those of installed packages, and any class by its module path.
"""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sinkscope.errors import SinkscopeError, UnsupportedError
from sinkscope.files.records import Budget, Natural, Whole, check_fields, read_setting
from sinkscope.interventions.base import Event, Intervention, Run
from sinkscope.kv.cache import CacheLayer, Rotary
from sinkscope.kv.session import Moment, Session

ENTRY_POINTS = "sinkscope.policies"
_REGISTERED: dict[str, type[Intervention]] = {}
GUARDS: dict[str, Callable[..., Intervention]] = {}
"""Guards by the names that commands take in place of a policy."""
PolicyClass = TypeVar("PolicyClass", bound=type[Intervention])


def register_policy(name: str) -> Callable[[PolicyClass], PolicyClass]:
    """Class decorator: register a policy under `name`, for commands and `make_policy`.

    An installed package can instead list its policies in the entry point group `sinkscope.policies`.

    Raises:
        SinkscopeError: Another policy already has this name.
    """

    def register(policy: PolicyClass) -> PolicyClass:
        if name in _REGISTERED:
            raise _name_taken(name, _REGISTERED[name], policy)
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
        joined: Number of layers whose rows are joined in `kv`, one layer after another.
    """

    layer: int
    kv: CacheLayer
    moment: Moment
    session: Session
    memory: dict[Any, Any]
    joined: int = 1

    @property
    def length(self) -> Int[Tensor, " batch"]:
        """Number of real tokens of each row so far, evicted or not."""
        length = self.moment.call.before.to(self.kv.keys.device)
        if self.joined > 1:
            return length.repeat(self.joined)
        return length


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
    reduce: Literal["mean", "max"] = "mean"

    UNIFORM: ClassVar[bool] = False
    """Whether every layer and head keeps the same positions, as `positions="rebased"` needs."""
    JOINS_LAYERS: ClassVar[bool] = False
    """Whether scores follow from positions and extras alone, so that all layers are scored at once, in less time."""

    def __post_init__(self) -> None:
        check_fields(self)
        name = self.shown_name
        if isinstance(self.budget, int):
            self._check_room(self.budget, "")
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

    @property
    def shown_name(self) -> str:
        """Name in messages."""
        return type(self).__name__

    # Done here ----------------------------------------------------------------------------------------------------

    def summary(self, run: Run) -> str:
        """How many tokens the run's caches held, out of how many were read."""
        name = f"{self.shown_name}({self.budget})"
        if not run.usage:
            return f"{name} has read nothing yet."
        read_tokens = max(usage.read_tokens for usage in run.usage)
        peak_tokens = max(max(usage.peak_tokens) for usage in run.usage)
        size = f"{max(usage.logical_bytes for usage in run.usage) / 1e6:,.3g} MB of keys and values"
        return f"{name} held at most {peak_tokens:,.0f} of {read_tokens:,} tokens ({size})."

    def check_prompt(self, tokens: int) -> None:
        """Refuse a budget, given as a fraction, that is smaller than the tokens that are always kept."""
        self.tokens(torch.tensor([tokens]))

    def enter(self, run: Run, key: int) -> None:
        """Take over the cache and act at the right moments."""
        session = Session.of(run)
        session.own_cache(self.shown_name)
        session.anchors = max(session.anchors, self.first)
        rotary = Rotary(run.target) if self.positions == "rebased" else None
        self.watch(session, key)
        session.before_decode(lambda moment: self._act(moment, session, key, rotary))

    def group(self, heads: Float[Tensor, "batch head *_ slot"], kv_heads: int) -> Float[Tensor, "batch kv_head slot"]:
        """Combine the numbers of query heads that share a kv head into one number, by `reduce`; for one query each."""
        # Without einops, which would take a tenth of a step here: "batch (kv_head group) 1 slot -> batch kv_head slot".
        grouped = heads.reshape(len(heads), kv_heads, -1, heads.shape[-1])
        if self.reduce == "mean":
            return grouped.mean(2)
        return grouped.amax(2)

    def tokens(self, prompt: Int[Tensor, " batch"]) -> list[int]:
        """The budget of each row in tokens."""
        if isinstance(self.budget, int):
            return [self.budget] * len(prompt)
        budgets: list[int] = (prompt * self.budget).long().tolist()
        fewest = min(budgets)
        self._check_room(fewest, f" of a prompt of {int(prompt.min())} tokens, {fewest},")
        return budgets

    def _check_room(self, budget: int, share: str) -> None:
        """Refuse a budget in tokens that is smaller than what is always kept."""
        always_kept = max(1, sum(self.always_kept(budget)))
        if budget < always_kept:
            raise SinkscopeError(
                f"{self.shown_name}: budget={self.budget}{share} is below the {always_kept} tokens that are always "
                "kept: raise the budget or protect fewer",
                page="kv-budget",
            )

    def always_kept(self, budget: int) -> tuple[int, int]:
        """Numbers of first and of latest tokens of a row that are always kept at a budget in tokens."""
        return self.first, self.last

    def protected(self, at: At) -> Bool[Tensor, "batch kv_head slot"]:
        """Slots that are always kept: the first and the last ones.

        The anchors of a guard in the same run are kept too; they take up to half of what the last ones leave.
        """
        pos, latest = at.kv.pos, at.memory["latest"]
        protected = pos < _by_row(at.memory["first"], pos)
        if isinstance(latest, Tensor) or latest:
            protected = protected | (pos >= at.length[:, None, None] - _by_row(latest, pos))
        return protected

    def select(
        self, scores: Float[Tensor, "batch kv_head slot"], at: At, budget: int | Int[Tensor, " batch"]
    ) -> Bool[Tensor, "batch kv_head slot"]:
        """Choose the protected slots and those with the highest scores, up to the budget, in every row and kv head.

        Among slots of equal score the later one is kept, so that padding and batching make no difference.
        """
        pos = at.kv.pos
        slots = pos.shape[-1]
        occupied = pos >= 0
        ranked = scores.float()
        if at.memory["protects"]:
            ranked = ranked.masked_fill(self.protected(at), torch.inf)
        if not at.kv.whole:
            ranked = ranked.masked_fill(~occupied, -torch.inf)
        if not isinstance(budget, int):
            return occupied & (rank_from_top(ranked) < _by_row(budget, pos))
        if slots <= budget:
            return occupied
        if slots == budget + 1:
            lowest = ranked.argmin(-1, keepdim=True)
        else:
            lowest = ranked.argsort(dim=-1, stable=True)[..., : slots - budget]
        return occupied.scatter(-1, lowest, False)

    def _act(self, moment: Moment, session: Session, key: int, rotary: Rotary | None) -> None:
        """Choose what is kept in every layer, if it is time to."""
        state, layers = moment.state, moment.layers
        memory = state.memory.setdefault(key, {})
        if moment.prefill_ended:
            state.uniform = self.UNIFORM and _same_positions(layers)
            if rotary is not None and not state.uniform:
                raise UnsupportedError(
                    "this cache holds other positions in every layer, so new positions cannot be given: use "
                    'positions="original", or start with a new cache',
                    page="kv-session",
                )
            self.begin(moment, session, memory)
        elif self.every == "prefill" or state.decoded % self.every:
            return
        budget = memory["budget"]
        exact: int | None = None  # what every head keeps; None if heads may keep different numbers
        # The choice of a subclass may be smaller than the budget.
        if type(self).select is Policy.select and isinstance(budget, int) and self.mode == "evict":
            exact = budget
            layers = [kv for kv in layers if kv.slots > budget]
            if self.JOINS_LAYERS and rotary is None and _alike(layers):
                joined, count = layers[0], 1  # where scores are uniform it stands for all
                if not state.uniform:
                    joined, count = CacheLayer.joined(layers), len(layers)
                at = At(layers[0].number, joined, moment, session, memory, count)
                joined.evict_joined(layers, self.select(self.checked_scores(at), at, budget), budget)
                return
        if state.padded:
            exact = None
        self._act_by_layer(layers, moment, session, memory, rotary, exact)

    def _act_by_layer(
        self,
        layers: Sequence[CacheLayer],
        moment: Moment,
        session: Session,
        memory: dict[Any, Any],
        rotary: Rotary | None,
        exact: int | None,
    ) -> None:
        """Choose layer by layer, or once for all where scores are uniform; `exact` is what every head keeps."""
        state, budget = moment.state, memory["budget"]
        keep: Tensor | None = None
        for kv in layers:
            if keep is None or not state.uniform:
                at = At(kv.number, kv, moment, session, memory)
                keep = self.select(self.checked_scores(at), at, budget)
            keep = keep.to(kv.keys.device)  # some layers may be on another device
            if self.mode == "select":
                kv.select(keep)
                continue
            if rotary is not None:
                rotary.rebase(kv, keep)
            kv.evict(keep, None if kv.ragged else exact)

    def begin(self, moment: Moment, session: Session, memory: dict[Any, Any]) -> None:
        """Fix the budget of each row at the end of a prompt, and how much of it is for tokens that are always kept."""
        lengths = moment.call.before
        budgets = self.tokens(lengths)
        first: list[int] = []
        latest: list[int] = []
        events: list[Event] = []
        for row, budget in enumerate(budgets):
            first_kept, latest_kept = self.always_kept(budget)
            first.append(max(first_kept, min(session.anchors, (budget - latest_kept) // 2)))
            latest.append(latest_kept)
            if (first_kept, latest_kept) != self.always_kept(sys.maxsize):
                window = {"window": latest_kept or budget - first_kept}
                events.append(Event(row, moment.call.step, int(lengths[row]) - 1, None, None, "window", window))
        memory["protects"] = any(first) or any(latest)
        memory["budget"] = _number_or_rows(budgets)
        memory["first"] = _number_or_rows(first)
        memory["latest"] = _number_or_rows(latest)
        session.run.log(lambda: events)

    def checked_scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Return the scores after checking that there is a number for each slot.

        On an accelerator only the first scores of a cache are checked for NaN, because every later check would have to
        wait for the device.

        Raises:
            SinkscopeError: The scores have the wrong shape, or some are NaN.
        """
        name = self.shown_name
        pos = at.kv.pos
        scores = self.scores(at)
        if not isinstance(scores, Tensor) or scores.shape != pos.shape:
            raise SinkscopeError(
                f"{name}.scores returned a {type(scores).__name__} of shape {tuple(getattr(scores, 'shape', ()))} for "
                f"layer {at.layer}: expected a tensor of shape {tuple(pos.shape)}, one number per row, kv head, slot"
            )
        checked = at.moment.prefill_ended or scores.device.type == "cpu"
        if not checked or not scores.is_floating_point() or not scores.numel():
            return scores
        # The smallest number is NaN if any is, and it is much faster to find. Padding may be NaN, since it is not kept.
        if math.isnan(float(scores.amin())) and bool((scores.isnan() & (pos >= 0)).any()):
            raise SinkscopeError(
                f"{name}.scores returned NaN for layer {at.layer}: slots without a score cannot be compared; return "
                "-torch.inf for what is worth nothing"
            )
        return scores


def _number_or_rows(numbers: list[int]) -> int | Int[Tensor, " batch"]:
    """One number if it is the same for all rows."""
    if len(set(numbers)) == 1:
        return numbers[0]
    return torch.tensor(numbers)


def _by_row(number: int | Int[Tensor, " batch"], like: Tensor) -> int | Int[Tensor, "batch 1 1"]:
    """A number for all rows, or one for each row, to compare with a tensor `[batch kv_head slot]`."""
    if isinstance(number, int):
        return number
    return number.to(like.device).view(-1, 1, 1)  # "batch -> batch 1 1"


def rank_from_top(scores: Float[Tensor, "*batch slot"]) -> Int[Tensor, "*batch slot"]:
    """Rank of each score along the last dimension: 0 for the highest; of equal scores the later one ranks higher."""
    order = scores.argsort(dim=-1, stable=True).flip(-1)
    index = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, index)


def _alike(layers: list[CacheLayer]) -> bool:
    """Whether layers have the same shape, no holes and one device."""
    for kv in layers:
        if not kv.whole or kv.keys.shape != layers[0].keys.shape or kv.keys.device != layers[0].keys.device:
            return False
    return len(layers) > 1


def _same_positions(layers: list[CacheLayer]) -> bool:
    """Whether every layer holds the same positions; another policy may have changed this cache before."""
    first = layers[0].pos
    for kv in layers:
        if kv.pos.shape != first.shape or not torch.equal(kv.pos.to(first.device), first):
            return False
    return True


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
        session.own_cache(self.shown_name)

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Score all slots the same."""
        return torch.zeros(at.kv.pos.shape, device=at.kv.pos.device)


# By name ---------------------------------------------------------------------------------------------------------


def policies() -> dict[str, type[Intervention]]:
    """Every registered policy, by name.

    Raises:
        SinkscopeError: An installed package lists a policy that cannot be imported, or whose name is taken.
    """
    by_name = dict(_REGISTERED)
    for entry in entry_points(group=ENTRY_POINTS):
        policy = _import_policy(entry.value.replace(" ", ""))
        if by_name.setdefault(entry.name, policy) is not policy:
            raise _name_taken(entry.name, by_name[entry.name], policy)
    return dict(sorted(by_name.items()))


def make_policy(name: str, **options: Any) -> Any:
    """Make the policy registered as `name`; the options are its fields.

    Raises:
        SinkscopeError: The policy or field does not exist, or a value is invalid.

    Example:
        >>> make_policy("streaming", budget=512)
        StreamingLLM(budget=512, first=4, last=0, every=1, mode='evict', positions='original', reduce='mean')
    """
    by_name = _REGISTERED if name in _REGISTERED else policies()
    if name not in by_name:
        raise SinkscopeError(f"policy {name!r}: expected one of {', '.join(by_name)}, or package.module:Class")
    return _make(name, by_name[name], options)


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
    for guard in sorted(GUARDS, reverse=True):  # the longest name first
        if text == guard or text.startswith(f"{guard}:"):
            return GUARDS[guard](**_budget_option(text, text.removeprefix(guard)))
    name, colon, rest = text.partition(":")
    class_name, class_colon, budget = rest.partition(":")
    if name not in _REGISTERED and (class_name.isidentifier() or class_colon):
        return _make(text, _import_policy(f"{name}:{class_name}"), _budget_option(text, class_colon + budget))
    return make_policy(name, **_budget_option(text, colon + rest))


def _budget_option(text: str, suffix: str) -> dict[str, Any]:
    """The budget that a name ends with: `suffix` is ":BUDGET" or empty."""
    if not suffix:
        return {}
    return {"budget": read_setting(suffix[1:], Budget, f"policy {text!r}: budget=")}


def _import_policy(path: str) -> type[Intervention]:
    """The class at "package.module:Class"."""
    module, _, name = path.partition(":")
    sys.path.insert(0, "")
    try:
        policy = getattr(import_module(module), name)
    except Exception as error:  # a module that others wrote may fail in any way
        reason = str(error).partition("\n")[0]
        raise SinkscopeError(f"policy {path!r} cannot be imported: {type(error).__name__}: {reason}") from None
    finally:
        sys.path.remove("")
    if not isinstance(policy, type) or not issubclass(policy, Intervention):
        raise SinkscopeError(f"policy {path!r} is no cache policy: expected a subclass of sinkscope.kv.Policy")
    return policy


def _make(name: str, policy: type[Intervention], options: dict[str, Any]) -> Intervention:
    try:
        return policy(**options)
    except TypeError as error:  # a setting that does not exist or is missing, or a method that is missing
        settings = ", ".join(setting.name for setting in fields(policy))  # type: ignore[arg-type]
        raise SinkscopeError(f"policy {name!r} cannot be made: {error}; its settings are {settings}") from None


def _name_taken(name: str, first: type, second: type) -> SinkscopeError:
    first_path = f"{first.__module__}.{first.__qualname__}"
    second_path = f"{second.__module__}.{second.__qualname__}"
    return SinkscopeError(
        f"two policies are called {name!r}, {first_path} and {second_path}: give one of them another name"
    )
