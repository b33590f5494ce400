"""The methods that a benchmark compares: cache policies, guards and sampling, by name with settings.

A method is written `name`, `name:0.25` (with its budget), `name:key=value:key=value`, or `package.module:name` for a
policy class or a function of the budget that makes one. `name:paper` selects the algorithm and settings that a paper
prints, if they differ from the default; it calls the class method `paper` of the method's class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.files.records import Budget, read_settings, setting_types
from sinkscope.generation.progressive import Progressive
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import import_object, policies
from sinkscope.loops.guard import LoopGuard
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.shapes import AShape, MInference, Shape, TriShape

FULL, SAMPLING = "full", "sampling"
GUARD = "loopguard"
PAPER = "paper"


@dataclass(frozen=True, kw_only=True)
class RandomSlots(Policy):
    """Keeps random slots, chosen separately in every layer and head: the baseline that a policy has to beat."""

    def scores(self, at: LayerMoment) -> Float[Tensor, "batch kv_head slot"]:
        """Score a position by its hash, so that a slot that was kept stays."""
        pos = at.kv.pos.cpu().double()
        heads = torch.arange(pos.shape[1])[:, None]
        hashed = torch.sin(pos * 12.9898 + heads * 78.233 + at.layer * 37.719)
        return hashed.mul(43758.5453).frac().abs().float().to(at.kv.pos.device)


ANYWHERE = {"shortest": 0}
"""Bands of short prompts too, because quality is compared and not speed."""
VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a-shape": (AShape, {}),
    "tri-shape": (TriShape, {}),
    "minference": (MInference, {}),
    "progressive-0": (Progressive, {"after": 0}),
    "loopserve": (LoopServe, ANYWHERE),
    "loopserve-0": (LoopServe, {**ANYWHERE, "first": 0}),
    "loopserve-p": (LoopServe, {**ANYWHERE, "decode": False}),
    "loopserve-d": (LoopServe, {"prefill": False}),
}
"""The class of what is applied to the model, and the fields that the name determines, where it is no registered policy
of that name. "-0": without steps that read everything first; "-p", "-d": one half alone."""
Value = bool | int | float | str | None


def method_classes() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Return the class of every method, and the fields that its name determines.

    The class of None applies nothing.
    """
    own = {FULL: NoneType, SAMPLING: NoneType, "random": RandomSlots, GUARD: LoopGuard}
    return {name: (cls, {}) for name, cls in (policies() | own).items()} | VARIANTS


def method_class(name: str) -> tuple[Any, dict[str, Any]]:
    """Return the class after a name, or what stands at `package.module:name`, and the fields that the name determines.

    Raises:
        SinkscopeError: There is no such method.
    """
    classes = method_classes()
    if name not in classes and ":" not in name:
        raise SinkscopeError(
            f"method {name!r} is unknown: expected some of {', '.join(classes)}, or package.module:name of a policy "
            "class or of a function that makes a policy"
        )
    return classes[name] if name in classes else (import_object(name, f"method {name!r}"), {})


@dataclass(frozen=True)
class Method:
    """One way of generating, with its settings. Methods are compared as values; `str` writes one as a user does.

    Attributes:
        name: Name in `method_classes`, or `package.module:name`.
        budget: Its budget; None if it has none.
        paper: Whether it is the algorithm as a paper prints it.
        settings: Its other settings and their values.
    """

    name: str
    budget: Budget | None = None
    paper: bool = False
    settings: tuple[tuple[str, Value | tuple[Value, ...]], ...] = ()

    def __str__(self) -> str:
        written = [self.name]
        if self.paper:
            written.append(PAPER)
        if self.budget is not None:
            written.append(str(self.budget))
        for name, value in self.settings:
            values = value if isinstance(value, tuple) else (value,)
            words = [str(each).lower() if isinstance(each, bool | None) else str(each) for each in values]
            written.append(f"{name}={','.join(words)}")
        return ":".join(written)

    def make(self) -> Intervention | None:
        """Return the intervention to apply to the model; None for the full cache and sampling.

        Raises:
            SinkscopeError: Settings are invalid together, or it is no intervention.
        """
        cls, fixed = method_class(self.name)
        arguments = {**fixed, **dict(self.settings)}
        if self.budget is not None:
            arguments["budget"] = self.budget
        try:
            edit = cls.paper(**arguments) if self.paper else cls(**arguments)
        except TypeError as error:  # it takes something else
            raise SinkscopeError(f"method {self} cannot be made: {error}") from None
        if not isinstance(edit, Intervention | None):
            raise SinkscopeError(f"method {self} is a {type(edit).__name__}, no policy: check-cache takes other caches")
        return edit


def read_method(text: str, budget: Budget | None = None) -> Method:
    """Parse a text such as `h2o:0.25` or `loopserve:alpha=0.98:first=0`.

    Args:
        text: The method as the user writes it.
        budget: Budget of a method that has one and states none; a fixed shape takes only a share.

    Raises:
        SinkscopeError: A name or setting is unknown, a setting occurs twice, or a value has the wrong type.
    """
    name, *parts = text.split(":")
    if name not in method_classes() and parts and parts[0].isidentifier() and parts[0] != PAPER:
        name = f"{name}:{parts.pop(0)}"  # package.module:name
    cls, fixed = method_class(name)
    paper = PAPER in parts and hasattr(cls, PAPER)
    if paper:
        parts.remove(PAPER)
    is_class = isinstance(cls, type)
    types = setting_types(cls) if is_class else {"budget": Budget}
    options = read_settings(parts, types, f"method {text!r}", "budget")
    own = options.pop("budget", None)
    is_shape = is_class and issubclass(cls, Shape)
    takes_budget = "budget" in types and fixed.get("decode", True)
    if own is None and takes_budget and not (is_shape and (options or isinstance(budget, int))):
        own = budget
    return Method(name, own, paper, tuple(options.items()))


def read_methods(texts: Sequence[str], budget: Budget | None = None) -> tuple[Method, ...]:
    """Return the methods without duplicates.

    Raises:
        SinkscopeError: There are none, and as for `read_method`.
    """
    if not texts:
        raise SinkscopeError(f"no method is given: choose from {', '.join(method_classes())}")
    return tuple(dict.fromkeys(read_method(text, budget) for text in texts))
