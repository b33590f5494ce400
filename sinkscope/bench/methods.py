"""The methods that a benchmark compares: cache policies, guards and samplers, by name with settings.

A method is written `name`, `name:0.25` (with its budget), `name:key=value:key=value`, or `package.module:Class` for a
policy of another package. `name:paper` selects the algorithm and settings that a paper prints, if they differ from the
default; it calls the class method `paper` of the method's class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from importlib import import_module
from typing import Any, Literal, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_setting
from sinkscope.kv.policy import At, Policy, policies, policy_named

Block = Literal["cache", "guard", "sampler"]
FULL = "full"
PAPER = "paper"


@dataclass(frozen=True, kw_only=True)
class RandomSlots(Policy):
    """Keeps random slots, chosen separately in every layer and head: the baseline that a policy has to beat."""

    def scores(self, at: At) -> Float[Tensor, "batch kv_head slot"]:
        """Score a position by its hash, so that a slot that was kept stays."""
        heads = torch.arange(at.kv.pos.shape[1], device=at.kv.pos.device)[:, None]
        hashed = torch.sin(at.kv.pos.double() * 12.9898 + heads * 78.233 + at.layer * 37.719)
        return hashed.mul(43758.5453).frac().abs()


@dataclass(frozen=True)
class MethodKind:
    """Definition of a method name.

    Attributes:
        about: One-line description.
        home: `module:Class` of what is applied to the model; empty for the full cache and samplers.
        fixed: Fields that the name determines.
        budget: Whether it reads only part of the cache, limited to `budget` tokens.
        shape: Whether it is a sparse pattern for prompts; with a budget it becomes `kv.shapes.ShapeShare`.
        paper: Whether it always uses the paper's printed settings.
        block: "sampler" acts on logits, the others on the cache.
    """

    about: str
    home: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    budget: bool = True
    shape: bool = False
    paper: bool = False
    block: Block = "cache"

    def load(self) -> Any:
        """The class of what is applied to the model."""
        module, _, name = self.home.partition(":")
        return getattr(import_module(module), name)

    def has_paper_settings(self) -> bool:
        """Whether its class has settings as a paper prints them."""
        return bool(self.home) and hasattr(self.load(), PAPER)


_SERVE = "sinkscope.kv.loopserve:LoopServe"
_READ_ALL = {"shortest": 0}  # short prompts are made sparse too, because quality is compared and not speed


def _guard(about: str, paper: bool = True, **fixed: Any) -> MethodKind:
    return MethodKind(about, "sinkscope.kv.loopguard:LoopGuard", fixed, paper=paper, block="guard")


METHODS: dict[str, MethodKind] = {
    FULL: MethodKind("the whole cache", budget=False),
    "random": MethodKind("random slots, the control", "sinkscope.bench.methods:RandomSlots"),
    "streaming": MethodKind("first tokens and a window", "sinkscope.kv:StreamingLLM"),
    "h2o": MethodKind("heavy hitters and a window", "sinkscope.kv:H2O"),
    "snapkv": MethodKind("chosen at the end of the prompt", "sinkscope.kv:SnapKV"),
    "tova": MethodKind("what the newest query attends to", "sinkscope.kv:TOVA"),
    "adakv": MethodKind("SnapKV with a budget for each head", "sinkscope.kv:AdaKV"),
    "progressive": MethodKind("chosen anew while decoding", "sinkscope.kv:Progressive"),
    "progressive-0": MethodKind("the same from the first step on", "sinkscope.kv:Progressive", {"after": 0}),
    "a-shape": MethodKind("prompts: first tokens and a window", "sinkscope.kv:AShape", budget=False, shape=True),
    "tri-shape": MethodKind("a-shape with dense last queries", "sinkscope.kv:TriShape", budget=False, shape=True),
    "minference": MethodKind("prompts: fixed numbers of lines", "sinkscope.kv:MInference", budget=False, shape=True),
    "loopserve": MethodKind("sparse prompts, chosen anew while decoding", _SERVE, _READ_ALL),
    "loopserve-0": MethodKind("the same, chosen from the first step on", _SERVE, {**_READ_ALL, "first": 0}),
    "loopserve-p": MethodKind("sparse prompts alone", _SERVE, {**_READ_ALL, "decode": False}, budget=False),
    "loopserve-d": MethodKind("chosen anew while decoding alone", _SERVE, {"prefill": False}),
    "loopguard": _guard("early alarms, a ban, and a few drawn tokens if loops keep coming back", paper=False),
    "loopguard-window": _guard("the paper's guard, always within the budget", between="window"),
    "loopguard-always": _guard("pruning every 200 tokens", variant="always"),
    "loopguard-p1": _guard("pruning on the top-1 streak alone", variant="p1"),
    "loopguard-ttr": _guard("pruning on the type-token ratio alone", variant="ttr"),
    "loopguard-cr": _guard("pruning on the compression ratio alone", variant="cr"),
    "loopguard-stall": _guard("pruning on stalled novelty alone", variant="stall"),
    "loopguard-tail": _guard("pruning on a repeating tail alone", variant="tail"),
    "repetition-penalty": MethodKind("repetition penalty 1.1, prompt included", budget=False, block="sampler"),
    "no-repeat-4-gram": MethodKind("no four tokens twice, prompt included", budget=False, block="sampler"),
    "sampling": MethodKind("drawn at temperature 1", budget=False, block="sampler"),
}
"""By the name that commands use. "-0": without steps that read everything first; "-p", "-d": one half alone."""


def kind_of(name: str) -> MethodKind:
    """Definition of a name: a method of the table, a registered policy, or `package.module:Class`.

    Raises:
        SinkscopeError: There is no such policy.
    """
    if name in METHODS:
        return METHODS[name]
    policy = type(policy_named(name))
    names = {each.name for each in fields(policy)}  # pyright: ignore[reportArgumentType]
    return MethodKind("", f"{policy.__module__}:{policy.__qualname__}", budget="budget" in names)


def name_of(spec: str) -> str:
    """A method's name without its settings."""
    name, _, rest = spec.strip().partition(":")
    first = rest.partition(":")[0]
    if name not in METHODS and first.isidentifier() and first != PAPER:
        return f"{name}:{first}"
    return name


def order_of(spec: str) -> tuple[int, str]:
    """Sort key that follows the order of `METHODS`; other methods come last."""
    names = list(METHODS)
    name = name_of(spec)
    return (names.index(name) if name in METHODS else len(names), spec)


@dataclass(frozen=True)
class Method:
    """One way of generating, with its settings.

    Attributes:
        name: Name in `METHODS`, or of another policy.
        paper: Whether fields that were not given take the paper's values.
        budget: Cached tokens, or a share of the prompt. None for a method without a budget.
        options: Other fields that were given.
    """

    name: str
    paper: bool = False
    budget: Budget | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def spec(self) -> str:
        """The method as it is written; records are stored under this text."""
        parts = [self.name]
        if self.paper:
            parts.append(PAPER)
        if self.budget is not None:
            parts.append(str(self.budget))
        for key, value in self.options:
            parts.append(f"{key}={str(value).lower() if isinstance(value, bool | None) else value}")
        return ":".join(parts)

    @property
    def kind(self) -> MethodKind:
        """Definition of the method's name."""
        return kind_of(self.name)

    def make(self) -> Any:
        """The intervention to apply to the model; None for the full cache and samplers.

        Raises:
            SinkscopeError: The settings are invalid together.
        """
        kind = self.kind
        if not kind.home:
            return None
        options = {**kind.fixed, **dict(self.options)}
        if kind.shape and self.budget is not None:
            from sinkscope.kv.shapes import ShapeShare

            return ShapeShare(kind.home.partition(":")[2], self.budget)
        if self.budget is not None:
            options["budget"] = self.budget
        cls = kind.load()
        if self.paper or kind.paper:
            return cls.paper(**options)
        return cls(**options)


def read_method(spec: str, budget: Budget | None = None) -> Method:
    """Parse a text such as `h2o:0.25` or `loopserve:alpha=0.98:first=0`.

    Args:
        spec: The method as the user writes it.
        budget: Budget of a method that has one and states none.

    Raises:
        SinkscopeError: A name or setting is unknown, a setting occurs twice, or a value has the wrong type.
    """
    name = name_of(spec)
    if name not in METHODS and ":" not in name and name not in policies():
        raise _unknown_method(name)
    kind = kind_of(name)
    types = _setting_types(kind)
    parts = [part.strip() for part in spec.strip().removeprefix(name).split(":")[1:]]
    paper = PAPER in parts and kind.has_paper_settings()
    options: dict[str, Any] = {}
    for part in parts:
        if paper and part == PAPER:
            continue
        key, equals, value = part.partition("=")
        if not equals:
            key, value = "budget", part
        key = key.strip()
        if key not in types:
            settings = ", ".join(types) or "none"
            raise SinkscopeError(f"method {spec!r}: {name} has no setting {part!r}: it has {settings}; write key=value")
        if key in options:
            raise SinkscopeError(f"method {spec!r}: {key} is given twice: give it once")
        options[key] = read_setting(value.strip(), types[key], f"method {spec!r}: {key}=")
    own = options.pop("budget", None)
    if own is None and kind.budget:
        own = budget
    if own is None and kind.shape and isinstance(budget, float) and not options:
        own = budget
    return Method(name, paper, own, tuple(options.items()))


def _unknown_method(name: str) -> SinkscopeError:
    hint = ""
    near = get_close_matches(name, METHODS, 1)
    if near:
        hint = f"did you mean {near[0]!r}? "
    return SinkscopeError(
        f"method {name!r} is unknown: {hint}expected some of {', '.join(METHODS)}, or package.module:Class"
    )


def _setting_types(kind: MethodKind) -> dict[str, Any]:
    """The type of each setting of a method."""
    types: dict[str, Any] = {}
    if kind.home:
        cls = kind.load()
        hints = get_type_hints(cls, include_extras=True)
        for each in fields(cls):
            types[each.name] = hints[each.name]
    if kind.shape:
        types["budget"] = Budget
    return types


def read_methods(specs: Sequence[str], budget: Budget | None = None) -> tuple[Method, ...]:
    """The methods without duplicates.

    Raises:
        SinkscopeError: There are none, and as for `read_method`.
    """
    if not specs:
        raise SinkscopeError(f"no method is given: choose from {', '.join(METHODS)}")
    return tuple(dict.fromkeys(read_method(spec, budget) for spec in specs))
