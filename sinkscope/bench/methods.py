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
from sinkscope.files.records import Budget
from sinkscope.hooks.edit.base import Intervention
from sinkscope.kv.policy import LayerMoment, Policy
from sinkscope.kv.registry import PAPER, policies, read_named
from sinkscope.loops.guard import LoopGuard
from sinkscope.results.notation import word_list
from sinkscope.sparse.progressive import Progressive
from sinkscope.sparse.serve import LoopServe
from sinkscope.sparse.shapes import AShape, MInference, Shape, TriShape

FULL, SAMPLING = "full", "sampling"
GUARD = "loopguard"


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


def method_classes() -> dict[str, Any]:
    """Return the class of every method; that of None applies nothing."""
    not_policies = {FULL: NoneType, SAMPLING: NoneType, "random": RandomSlots, GUARD: LoopGuard}
    return policies() | not_policies | {name: cls for name, (cls, _) in VARIANTS.items()}


def read_method(text: str, budget: Budget | None = None) -> str:
    """Return a text such as `h2o:0.25` or `loopserve:alpha=0.98:first=0` with the budget that it does not state.

    Args:
        text: The method as the user writes it.
        budget: Budget of a method that has one and states none; a fixed shape takes only a share.

    Raises:
        SinkscopeError: A name or setting is unknown, a setting occurs twice, or a value has the wrong type.
    """
    name, make, types, options = _parsed(text)
    if budget is None or "budget" not in types or "budget" in options or not options.get("decode", True):
        return text
    if isinstance(make, type) and issubclass(make, Shape) and (options or isinstance(budget, int)):
        return text
    paper = f"{name}:{PAPER}"
    start = paper if text.startswith(paper) else name
    return f"{start}:{budget}{text.removeprefix(start)}"


def make_method(text: str) -> Intervention | None:
    """Return the intervention to apply to the model; None for the full cache and sampling.

    Raises:
        SinkscopeError: As for `read_method`, or settings are invalid together, or it is no intervention.
    """
    _, make, _, options = _parsed(text)
    try:
        edit = make(**options)
    except TypeError as error:  # it takes something else
        raise SinkscopeError(f"method {text} cannot be made: {error}") from None
    if not isinstance(edit, Intervention | None):
        raise SinkscopeError(f"method {text} is a {type(edit).__name__}, no policy: check-cache takes other caches")
    return edit


def _parsed(text: str) -> tuple[str, Any, dict[str, Any], dict[str, Any]]:
    """The name of a method, its class or what else makes it, the types of its settings, and those that it has."""
    name, make, types, options = read_named(text, method_classes(), "method")
    if name in VARIANTS:
        options = VARIANTS[name][1] | options
    return name, make, types, options


def read_methods(texts: Sequence[str], budget: Budget | None = None) -> tuple[str, ...]:
    """Return the methods without duplicates.

    Raises:
        SinkscopeError: There are none, and as for `read_method`.
    """
    if not texts:
        raise SinkscopeError(f"no method is given: choose from {', '.join(method_classes())}")
    return tuple(dict.fromkeys(read_method(text, budget) for text in texts))


def uneven_budgets(methods: Sequence[str]) -> str | None:
    """Return what the budgets of a table mean, where some policies keep every generated token beside theirs.

    Args:
        methods: The methods of the table. One that cannot be made here is not judged.

    Returns:
        A sentence; None if budgets mean the same in all methods.
    """
    beside: list[str] = []
    within: list[str] = []
    for method in dict.fromkeys(methods):
        try:
            edit = make_method(method)
        except SinkscopeError:
            continue
        if not isinstance(edit, Policy) or isinstance(edit, Progressive):  # nothing leaves the cache
            continue
        if edit.every == "prefill":
            beside.append(method)
        else:
            within.append(method)
    if not beside or not within:
        return None
    return (
        f"Every generated token stays beside the budget of {word_list(beside)}, and counts towards that of "
        f"{word_list(within)}: {beside[0]}:every=1 makes them alike."
    )
