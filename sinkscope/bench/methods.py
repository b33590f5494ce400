"""The methods that a benchmark compares: cache policies, guards and sampling, by name with settings.

A method is written `name`, `name:0.25` (with its budget), `name:key=value:key=value`, or `package.module:Class` for a
policy of another package. `name:paper` selects the algorithm and settings that a paper prints, if they differ from the
default; it calls the class method `paper` of the method's class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pkgutil import resolve_name
from typing import Any, get_type_hints

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_settings
from sinkscope.kv.policy import At, Policy, policies, policy_named
from sinkscope.kv.shapes import Shape, ShapeShare

FULL = "full"
GUARD = "loopguard"
PAPER = "paper"
SAMPLING = "sampling"


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
        home: `module:Class` of what is applied to the model; empty for the full cache and sampling.
        fixed: Fields that the name determines.
        budget: Whether it reads only part of the cache, limited to `budget` tokens.
    """

    home: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    budget: bool = True

    def load(self) -> Any:
        """The class of what is applied to the model."""
        return resolve_name(self.home)

    @property
    def shape(self) -> bool:
        """Whether it is a sparse pattern for prompts; with a budget it becomes `kv.shapes.ShapeShare`."""
        return bool(self.home) and issubclass(self.load(), Shape)

    def settings(self) -> dict[str, Any]:
        """The type of each setting."""
        types: dict[str, Any] = {}
        if self.home:
            hints = get_type_hints(self.load(), include_extras=True)
            types = {each.name: hints[each.name] for each in fields(self.load())}
        if self.shape:
            types["budget"] = Budget
        return types


_SERVE = "sinkscope.kv.loopserve:LoopServe"
_READ_ALL = {"shortest": 0}  # short prompts are made sparse too, because quality is compared and not speed
METHODS: dict[str, MethodKind] = {
    FULL: MethodKind(budget=False),
    "random": MethodKind("sinkscope.bench.methods:RandomSlots"),
    "streaming": MethodKind("sinkscope.kv:StreamingLLM"),
    "h2o": MethodKind("sinkscope.kv:H2O"),
    "snapkv": MethodKind("sinkscope.kv:SnapKV"),
    "tova": MethodKind("sinkscope.kv:TOVA"),
    "adakv": MethodKind("sinkscope.kv:AdaKV"),
    "progressive": MethodKind("sinkscope.kv:Progressive"),
    "progressive-0": MethodKind("sinkscope.kv:Progressive", {"after": 0}),
    "a-shape": MethodKind("sinkscope.kv:AShape", budget=False),
    "tri-shape": MethodKind("sinkscope.kv:TriShape", budget=False),
    "minference": MethodKind("sinkscope.kv:MInference", budget=False),
    "loopserve": MethodKind(_SERVE, _READ_ALL),
    "loopserve-0": MethodKind(_SERVE, {**_READ_ALL, "first": 0}),
    "loopserve-p": MethodKind(_SERVE, {**_READ_ALL, "decode": False}, budget=False),
    "loopserve-d": MethodKind(_SERVE, {"prefill": False}),
    GUARD: MethodKind("sinkscope.kv.loopguard:LoopGuard"),
    SAMPLING: MethodKind(budget=False),
}
"""By the name that commands use. "-0": without steps that read everything first; "-p", "-d": one half alone."""


def kind_of(name: str) -> MethodKind:
    """Definition of a name: a method of the table, a registered policy, or `package.module:Class`.

    Raises:
        SinkscopeError: There is no such method.
    """
    if name in METHODS:
        return METHODS[name]
    if ":" not in name and name not in policies():
        raise SinkscopeError(
            f"method {name!r} is unknown: expected some of {', '.join(METHODS)}, or package.module:Class"
        )
    policy = type(policy_named(name))
    names = {each.name for each in fields(policy)}  # pyright: ignore[reportArgumentType]
    return MethodKind(f"{policy.__module__}:{policy.__qualname__}", budget="budget" in names)


def name_of(spec: str) -> str:
    """A method's name without its settings."""
    name, _, rest = spec.partition(":")
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
        """The intervention to apply to the model; None for the full cache and sampling.

        Raises:
            SinkscopeError: The settings are invalid together.
        """
        kind = self.kind
        if not kind.home:
            return None
        options = {**kind.fixed, **dict(self.options)}
        if kind.shape and self.budget is not None:
            return ShapeShare(kind.home.partition(":")[2], self.budget)
        if self.budget is not None:
            options["budget"] = self.budget
        cls = kind.load()
        if self.paper:
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
    kind = kind_of(name)
    parts = spec.removeprefix(name).split(":")[1:]
    paper = PAPER in parts and bool(kind.home) and hasattr(kind.load(), PAPER)
    if paper:
        parts.remove(PAPER)
    written = [part if "=" in part else f"budget={part}" for part in parts]
    options = read_settings(written, kind.settings(), f"method {spec!r}")
    own = options.pop("budget", None)
    if own is None and (kind.budget or (kind.shape and isinstance(budget, float) and not options)):
        own = budget
    return Method(name, paper, own, tuple(options.items()))


def read_methods(specs: Sequence[str], budget: Budget | None = None) -> tuple[Method, ...]:
    """The methods without duplicates.

    Raises:
        SinkscopeError: There are none, and as for `read_method`.
    """
    if not specs:
        raise SinkscopeError(f"no method is given: choose from {', '.join(METHODS)}")
    return tuple(dict.fromkeys(read_method(spec, budget) for spec in specs))
